"""How do sentences become ids once, and never again?

The ids of a split are cached on disk in shards: a second start reads no text, one that
was killed goes on after its last whole shard, and a large corpus needs no more memory
than a small one.
"""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from data_pipeline.shards import ABOUT, Shard, ShardWriter, StoredShard, join

if TYPE_CHECKING:
    from data_pipeline.corpus import Pairs
    from data_pipeline.tokenizer import Tokenizer

FORMAT = 2  # part of the key: another layout or rule is another cache
# Likewise. Each bucket of a shard has batches of its own, so that a small shard means
# padding: 25,000 tokens in 32 shapes pad 1 % more here than in a single shard, and
# 5 % more in shards of 2^18. A large one is memory for its plan: 50 MB.
SHARD_PAIRS = 2**20
CHUNK_PAIRS = 4096
PAIRS_PER_LINE = 2**20  # of progress, without a terminal
# Reading and cleaning is the work of one thread; a few keep up with it.
THREADS = min(os.cpu_count() or 1, 8)

Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedPairs:
    """Token ids of sentence pairs, in shards.

    Attributes:
      shards: functions that open one each; what they give is held by nobody else. They
        raise a DataError where the shard is damaged.
      lengths: of each shard what `count_lengths` says, so that none has to be opened to
        plan: (points, 3).
      counts: "kept", and each reason for a drop: the corpus's rules and ours.
      fingerprint: of the corpus split, the vocabulary and the length rule.
    """

    shards: Sequence[Callable[[], Shard]]
    lengths: Sequence[np.ndarray]
    counts: dict[str, int]
    fingerprint: str

    def __len__(self) -> int:
        return sum(int(lengths[:, 2].sum()) for lengths in self.lengths)


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
      tokenizer: text to ids; used by several threads.
      cache_dir: gets one folder for each split, vocabulary and `max_length`.
      max_length: pairs with more tokens than this on a side, the end token included,
        are left out and counted.
      report: takes lines for the log. A terminal also gets a progress bar.
    """
    rules = [FORMAT, SHARD_PAIRS, pairs.fingerprint, tokenizer.fingerprint, max_length]
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
            report(f"the encoded pairs in {folder} are not whole: encoding the rest")
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


# ------------------------------------------------------------------------------ reading


def _load(folder: Path) -> EncodedPairs | None:
    """Finds what `_build` wrote; None if some of it is missing or cut short."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        numbers, counts = range(about["shards"]), dict(about["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    stored = [StoredShard.find(_shard_folder(folder, number)) for number in numbers]
    if not all(stored):
        return None
    groups = _without_small_shards([(shard, shard.lengths()) for shard in stored])
    return EncodedPairs(
        [functools.partial(_open, [shard for shard, _ in group]) for group in groups],
        [_sum_lengths([lengths for _, lengths in group]) for group in groups],
        counts,
        folder.name,
    )


def _shard_folder(folder: Path, number: int) -> Path:
    return folder / f"{number:05}"


def _without_small_shards(shards: Iterable[tuple]) -> list[list[tuple]]:
    """Puts a small shard, most often the last, to the one before it.

    Every bucket of a shard ends with a batch that may be half empty: it must not be
    most of what the shard has.
    """
    groups, rows = [], []
    for shard in shards:
        size = shard[1][:, 2].sum()
        small = 2 * size < SHARD_PAIRS and rows and rows[-1] + size < 1.5 * SHARD_PAIRS
        if small:
            groups[-1].append(shard)
            rows[-1] += size
        else:
            groups.append([shard])
            rows.append(size)
    return groups


def _open(stored: Sequence[StoredShard]) -> Shard:
    return join([shard.open() for shard in stored])


def _sum_lengths(lengths: Sequence[np.ndarray]) -> np.ndarray:
    together = np.concatenate(lengths)
    points, place = np.unique(together[:, :2], axis=0, return_inverse=True)
    rows = np.zeros(len(points), np.int64)
    np.add.at(rows, place.ravel(), together[:, 2])
    return np.concatenate([points, rows[:, None]], axis=1)


# ------------------------------------------------------------------------------ writing


def _build(
    folder: Path,
    pairs: "Pairs",
    tokenizer: "Tokenizer",
    max_length: int,
    report: Callable[[str], None],
) -> None:
    """Writes the shards that are not there, then says how many there are."""
    folder.mkdir(exist_ok=True)
    (folder / ABOUT).unlink(missing_ok=True)
    ids_dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<i4"
    encode = functools.partial(_encode, tokenizer, max_length)
    shards = []
    with _progress(report) as advance, futures.ThreadPoolExecutor(THREADS) as pool:
        texts = iter(pairs)
        for number in itertools.count():
            place = _shard_folder(folder, number)
            shard = StoredShard.find(place)
            if shard:  # its text still has to be passed over
                for _ in _chunks(texts, shard.pairs, advance):
                    pass
            else:
                chunks = _chunks(texts, SHARD_PAIRS, advance)
                with ShardWriter(place, ids_dtype) as writer:
                    for part in _in_order(pool, encode, chunks):
                        writer.append(*part)
                shard = StoredShard.find(place)
            if not shard:
                break  # no text was left to make it from
            shards.append(shard)
    rows = sum(int(shard.lengths()[:, 2].sum()) for shard in shards)
    dropped = collections.Counter({"no tokens": 0, "too many tokens": 0})
    for shard in shards:
        dropped.update(shard.dropped)
    counts = {**pairs.counts, "kept": rows, **dropped}
    unfinished = folder / f"{ABOUT}.tmp"
    unfinished.write_text(json.dumps({"shards": len(shards), "counts": counts}))
    os.replace(unfinished, folder / ABOUT)


def _chunks(
    texts: Iterator[Pair], count: int, advance: Callable[[int], None]
) -> Iterator[list[Pair]]:
    """Cuts the next `count` pairs into lists of `CHUNK_PAIRS`."""
    texts = itertools.islice(texts, count)
    while chunk := list(itertools.islice(texts, CHUNK_PAIRS)):
        yield chunk
        advance(len(chunk))


@contextlib.contextmanager
def _progress(report: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told of pairs and shows how far it is."""
    done = 0
    with tqdm(desc="encoding", unit=" pairs", unit_scale=True, disable=None) as bar:

        def advance(pairs: int) -> None:
            nonlocal done
            lines = done // PAIRS_PER_LINE
            done += pairs
            bar.update(pairs)
            if bar.disable and done // PAIRS_PER_LINE > lines:
                report(f"{done:,} pairs encoded so far")

        yield advance


def _in_order(
    pool: futures.Executor, function: Callable, items: Iterable
) -> Iterator[Any]:
    """`pool.map` that never has more than a few items and results waiting."""
    waiting = collections.deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > 2 * THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _encode(
    tokenizer: "Tokenizer", max_length: int, chunk: Sequence[Pair]
) -> tuple[list[np.ndarray], np.ndarray, dict[str, int]]:
    """Returns what `ShardWriter.append` takes."""
    sides = [tokenizer.tokenize(tf.constant(side)) for side in zip(*chunk, strict=True)]
    lengths = np.stack([side.row_lengths().numpy() for side in sides])
    empty = (lengths == 0).any(axis=0)
    long = (lengths + 1 > max_length).any(axis=0) & ~empty
    keep = ~empty & ~long
    ids = [
        side.flat_values.numpy()[np.repeat(keep, length)]
        for side, length in zip(sides, lengths, strict=True)
    ]
    dropped = {"no tokens": int(empty.sum()), "too many tokens": int(long.sum())}
    return ids, lengths[:, keep], dropped
