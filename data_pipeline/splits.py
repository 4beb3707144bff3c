"""Which pairs may never be seen in training?

A sentence of a parallel corpus often stands in several pairs (one English sentence,
three Japanese ones). Drawn at random, a test pair would then share a sentence with the
training data: on Tatoeba that leaks every fifth English reference. So the unit that is
drawn is the connected component: pairs that share a sentence on either side, directly
or through other pairs, always stay together.
"""

import unicodedata
from array import array
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

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
) -> list[str]:
    """Assigns each pair to "train", "validation" or "test".

    No normalised sentence ever stands in two splits. The choice is a hash of the
    component, so it depends neither on chance nor on the order of the pairs, not even
    on which side is the source; new pairs that touch no old one move nothing.

    Args:
        pairs: (source, target) sentences; read once, only 16 bytes of each are kept.
        validation_percent: share of the components, 0 for none.
        test_percent: likewise; changing one share leaves the other split as it is.

    Returns:
        One of `SPLITS` for each pair, in order.
    """
    keys = array("Q")
    for source, target in pairs:
        keys.append(_hash(normalize(source) or source))
        keys.append(_hash(normalize(target) or target))
    components = _components(np.array(keys, np.uint64).reshape(-1, 2))
    names, component_of_pair = np.unique(components, return_inverse=True)
    split_of_component = [
        _draw(int(name), validation_percent, test_percent) for name in names
    ]
    return [split_of_component[component] for component in component_of_pair]


def _components(keys: np.ndarray) -> np.ndarray:
    """Returns for each row of `keys` (pairs, 2) the smallest key of its component.

    Each pair tells its name, the smallest key it knows of, to both of its sentences,
    and learns theirs; names spread until nothing changes. Arrays instead of a
    union-find over dicts: a tenth of the memory, and twenty million pairs pass.
    """
    sides = [np.unique(side, return_inverse=True)[1] for side in keys.T]
    names = keys.min(axis=1)
    while True:
        before = names
        for sentence in sides:
            smallest = np.full(len(names), np.iinfo(np.uint64).max, np.uint64)
            np.minimum.at(smallest, sentence, names)
            names = smallest[sentence]
        if np.array_equal(names, before):
            return names


def _draw(component: int, validation_percent: float, test_percent: float) -> str:
    # Hashed again: the smallest of many hashes is small, so the name of a large
    # component is no fair draw. Test counts from below and validation from above.
    percent = 100.0 * _hash(component.to_bytes(8, "big")) / 2**64
    if percent < test_percent:
        return "test"
    return "validation" if percent >= 100.0 - validation_percent else "train"


def _hash(data: str | bytes) -> int:
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")
