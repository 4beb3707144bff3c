"""How do sentences become ids once, and never again?

The ids of a split are cached on disk as flat arrays with offsets and mapped into
memory: a second start reads no text, and a large corpus needs no memory.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from tqdm import tqdm

if TYPE_CHECKING:
    from data_pipeline.corpus import Pairs
    from data_pipeline.tokenizer import Tokenizer

FORMAT = 1  # part of the key: another layout or rule is another cache
CHUNK_PAIRS = 4096
CHUNKS_PER_LINE = 256  # a line of progress per million pairs, without a terminal


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedPairs:
    """Token ids of sentence pairs, without start and end tokens.

    Row i of the source is `source_ids[source_offsets[i]:source_offsets[i + 1]]`.

    Attributes:
      source_ids: (tokens,) uint16 or int32.
      source_offsets: (rows + 1,) int64.
      target_ids: likewise.
      target_offsets: likewise.
      counts: "kept", and each reason for a drop: the corpus's rules and ours.
      fingerprint: of the corpus split, the vocabulary and the length rule.
    """

    source_ids: np.ndarray
    source_offsets: np.ndarray
    target_ids: np.ndarray
    target_offsets: np.ndarray
    counts: dict[str, int]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.source_offsets) - 1

    @property
    def source_lengths(self) -> np.ndarray:
        """Tokens of each source sentence, (rows,)."""
        return np.diff(self.source_offsets)

    @property
    def target_lengths(self) -> np.ndarray:
        """Tokens of each target sentence, (rows,)."""
        return np.diff(self.target_offsets)


def encode_pairs(
    pairs: "Pairs",
    tokenizer: "Tokenizer",
    cache_dir: str | os.PathLike,
    max_length: int,
    report: Callable[[str], None] = print,
) -> EncodedPairs:
    """Returns the ids of `pairs`: from the cache, or encoded now and cached.

    Args:
      pairs: iterated at most once; its `fingerprint` tells whether it has to be.
      tokenizer: text to ids.
      cache_dir: gets one folder for each split, vocabulary and `max_length`.
      max_length: pairs with more tokens than this on a side, the end token included,
        are left out and counted.
      report: takes lines for the log. A terminal also gets a progress bar.
    """
    rules = [FORMAT, pairs.fingerprint, tokenizer.fingerprint, max_length]
    key = hashlib.sha256(json.dumps(rules).encode()).hexdigest()[:32]
    cache_dir = Path(cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    folder = cache_dir / key
    # Of several workers one encodes; the others wait here and find it done.
    with _locked(cache_dir / f"{key}.lock"):
        encoded = _load(folder)
        if encoded is not None:
            report(f"{len(encoded):,} encoded pairs from {folder}")
            return encoded
        if folder.exists():
            report(f"the encoded pairs in {folder} are damaged: encoding again")
        start = time.monotonic()
        _build(folder, pairs, tokenizer, max_length, report)
        encoded = _load(folder)
        seconds = time.monotonic() - start
        report(f"{len(encoded):,} pairs encoded in {seconds:.0f} s into {folder}")
        return encoded


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the file's lock. The lock of a killed process is free."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # closing is not enough if a process was forked meanwhile
            fcntl.flock(file, fcntl.LOCK_UN)


def _load(folder: Path) -> EncodedPairs | None:
    """Maps what `_build` wrote; None if that is missing, cut short or altered."""
    try:
        about = json.loads((folder / "about.json").read_text())
        arrays = {}
        for name, (dtype, checksum) in about["arrays"].items():
            arrays[name] = _map(folder / name, dtype)
            if zlib.crc32(arrays[name]) != checksum:
                return None
        return EncodedPairs(**arrays, counts=about["counts"], fingerprint=folder.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _map(path: Path, dtype: str) -> np.ndarray:
    if path.stat().st_size == 0:  # which cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _build(
    folder: Path,
    pairs: "Pairs",
    tokenizer: "Tokenizer",
    max_length: int,
    report: Callable[[str], None],
) -> None:
    """Writes the arrays beside `folder`, then moves the whole into place."""
    unfinished = folder.with_suffix(".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        ids_dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<i4"
        source = _SideWriter(unfinished, "source", ids_dtype)
        target = _SideWriter(unfinished, "target", ids_dtype)
        dropped = {"no tokens": 0, "too many tokens": 0}
        with source, target:
            for chunk in _chunks(pairs, report):
                texts = zip(*chunk, strict=True)
                ragged = [tokenizer.tokenize(tf.constant(side)) for side in texts]
                lengths = np.stack([side.row_lengths().numpy() for side in ragged])
                empty = (lengths == 0).any(axis=0)
                long = (lengths + 1 > max_length).any(axis=0) & ~empty
                dropped["no tokens"] += int(empty.sum())
                dropped["too many tokens"] += int(long.sum())
                source.append(ragged[0], ~empty & ~long)
                target.append(ragged[1], ~empty & ~long)
        arrays = source.finish() | target.finish()
        rows = len(_map(unfinished / "source_offsets", "<i8")) - 1
        about = {"arrays": arrays, "counts": {**pairs.counts, "kept": rows, **dropped}}
        (unfinished / "about.json").write_text(json.dumps(about, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _chunks(
    pairs: "Pairs", report: Callable[[str], None]
) -> Iterator[list[tuple[str, str]]]:
    """Cuts `pairs` into lists of `CHUNK_PAIRS` and shows how far it is."""
    iterator = iter(pairs)
    with tqdm(desc="encoding", unit=" pairs", unit_scale=True, disable=None) as bar:
        for number in itertools.count(1):
            chunk = list(itertools.islice(iterator, CHUNK_PAIRS))
            if not chunk:
                return
            yield chunk
            bar.update(len(chunk))
            if bar.disable and number % CHUNKS_PER_LINE == 0:
                report(f"{number * CHUNK_PAIRS:,} pairs encoded so far")


class _SideWriter:
    """The ids of one language on their way to disk."""

    def __init__(self, folder: Path, side: str, dtype: str):
        self.folder, self.side, self.dtype = folder, side, dtype
        self.lengths: list[np.ndarray] = []

    def __enter__(self) -> "_SideWriter":
        self.file = open(self.folder / f"{self.side}_ids", "wb")  # noqa: SIM115
        return self

    def __exit__(self, *_) -> None:
        self.file.close()

    def append(self, ragged: tf.RaggedTensor, keep: np.ndarray) -> None:
        """Writes the rows of `ragged` (rows, None) where `keep` (rows,) is True."""
        lengths = ragged.row_lengths().numpy()
        ids = ragged.flat_values.numpy()[np.repeat(keep, lengths)]
        self.file.write(ids.astype(self.dtype).tobytes())
        self.lengths.append(lengths[keep])

    def finish(self) -> dict[str, tuple[str, int]]:
        """Writes the offsets; returns type and checksum of each array by name."""
        offsets = np.cumsum(np.concatenate([[0], *self.lengths]), dtype="<i8")
        offsets.tofile(self.folder / f"{self.side}_offsets")
        dtypes = {f"{self.side}_ids": self.dtype, f"{self.side}_offsets": "<i8"}
        return {
            name: (dtype, zlib.crc32(_map(self.folder / name, dtype)))
            for name, dtype in dtypes.items()
        }
