"""Which pairs may never be seen in training?

A sentence of a parallel corpus often stands in several pairs (one English sentence,
three Japanese ones). Drawn at random, a test pair would then share a sentence with the
training data: on Tatoeba that leaks every fifth English reference. So the unit that is
drawn is the connected component: pairs that share a sentence on either side, directly
or through other pairs, always stay together.
"""

import contextlib
import os
import tempfile
import unicodedata
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from data_pipeline.keys import BLOCK, KeyTable, hash_text, scratch

SPLITS = ("train", "validation", "test")


class _Strip(dict):
    """Table for `str.translate`, filled on demand: drops what is not text."""

    def __missing__(self, code: int) -> int | None:
        # P punctuation, Z spaces, C controls and invisible format characters.
        drop = unicodedata.category(chr(code))[0] in "PZC"
        self[code] = None if drop else code
        return self[code]


_STRIP = _Strip()


def normalize(text: str) -> str:
    """Returns the key under which two sentences count as the same.

    Width, letter case, punctuation and spaces do not matter: `Ｙｅｓ！` equals `yes`.
    """
    return unicodedata.normalize("NFKC", text).casefold().translate(_STRIP)


def assign_splits(
    pairs: Iterable[tuple[str, str]],
    validation_percent: float = 1.0,
    test_percent: float = 1.0,
) -> np.ndarray:
    """Assigns each pair to "train", "validation" or "test".

    No normalised sentence ever stands in two splits. The choice is a hash of the
    component, so it depends neither on chance nor on the order of the pairs, not even
    on which side is the source; new pairs that touch no old one move nothing.

    Args:
        pairs: (source, target) sentences; read once. Some 60 bytes of each are kept,
            all but one in files for the time being (`keys.scratch`).
        validation_percent: share of the components, 0 for none.
        test_percent: likewise; changing one share leaves the other split as it is.

    Returns:
        (pairs,) uint8, in order: numbers in `SPLITS`.
    """
    components = _components(_sentence_keys(pairs))
    splits = np.empty(len(components), np.uint8)
    for block in _blocks(len(components)):
        names, component_of_pair = np.unique(components[block], return_inverse=True)
        split_of_component = [
            SPLITS.index(_draw(int(name), validation_percent, test_percent))
            for name in names
        ]
        splits[block] = np.array(split_of_component)[component_of_pair]
    return splits


def remembered(path: Path, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """What `draw` gives, (pairs,) uint8: drawn now, or from the file that it left.

    One that is damaged is drawn again: it would let test sentences into training.
    """
    with contextlib.suppress(OSError, ValueError):
        content = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        if len(content) >= 4 and _checksum(content[:-4]) == content[-4:].tobytes():
            return content[:-4]
    splits = draw()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(splits.tobytes() + _checksum(splits))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return splits


def _checksum(splits: np.ndarray) -> bytes:
    return zlib.crc32(splits).to_bytes(4, "big")


def _sentence_keys(pairs: Iterable[tuple[str, str]]) -> np.ndarray:
    """Hashes of the sentences, (pairs, 2) uint64, in a file."""
    with tempfile.TemporaryFile() as file:
        keys = array("Q")
        for source, target in pairs:
            keys.append(hash_text(normalize(source) or source))
            keys.append(hash_text(normalize(target) or target))
            if len(keys) >= BLOCK:
                keys.tofile(file)
                keys = array("Q")
        keys.tofile(file)
        file.flush()
        if not file.tell():  # an empty file cannot be mapped
            return np.empty((0, 2), np.uint64)
        return np.memmap(file, np.uint64, mode="r").view(np.ndarray).reshape(-1, 2)


def _components(keys: np.ndarray) -> np.ndarray:
    """Returns for each row of `keys` (pairs, 2) the smallest key of its component.

    Each pair tells its name, the smallest key it knows of, to both of its sentences,
    and learns theirs; names spread until nothing changes.
    """
    pairs = len(keys)
    blocks = list(_blocks(pairs))
    names = scratch(pairs, np.uint64)
    for block in blocks:
        names[block] = keys[block].min(axis=1)
    sides = []
    for side in keys.T:
        table, sentences = KeyTable(pairs), scratch(pairs, np.int64)
        for block in blocks:
            sentences[block] = table.places(side[block])
        sides.append((sentences, scratch(len(table), np.uint64)))
    changed = True
    while changed:
        changed = False
        for sentences, smallest in sides:
            smallest[:] = np.iinfo(np.uint64).max
            for block in blocks:
                np.minimum.at(smallest, sentences[block], names[block])
            for block in blocks:
                learnt = smallest[sentences[block]]
                changed = changed or not np.array_equal(learnt, names[block])
                names[block] = learnt
    return names


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, count, BLOCK))


def _draw(component: int, validation_percent: float, test_percent: float) -> str:
    # Hashed again: the smallest of many hashes is small, so the name of a large
    # component is no fair draw. Test counts from below and validation from above.
    percent = 100.0 * hash_text(component.to_bytes(8, "big")) / 2**64
    if percent < test_percent:
        return "test"
    return "validation" if percent >= 100.0 - validation_percent else "train"
