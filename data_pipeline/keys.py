"""Which sentences were met before, where there are too many to remember?

Texts are told apart by 64-bit hashes. They lie in files that nobody else sees and that
are gone with the process: the kernel keeps in memory what there is room for, and no
corpus is too large.
"""

import os
import tempfile
from hashlib import blake2b

import numpy as np

BLOCK = 2**14  # keys that are looked at together


def hash_text(data: str | bytes) -> int:
    """64 bits of it."""
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def scratch(count: int, dtype: type) -> np.ndarray:
    """Zeros, (count,), in a file in the folder for temporary ones (`TMPDIR`).

    Raises:
      OSError: if there is no room for it.
    """
    size = max(count, 1) * np.dtype(dtype).itemsize
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):  # a full disk would be a SIGBUS later
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return np.memmap(file, dtype, shape=max(count, 1))[:count].view(np.ndarray)


class KeyTable:
    """A place for each key, found by open addressing: 12 to 24 bytes a key."""

    def __init__(self, room: int = 1024):
        """Makes a table; up to `room` keys it does not grow, so that places last."""
        self._count = 0
        places = 3 * (room + BLOCK) // 2
        self._table = scratch(2 ** places.bit_length(), np.uint64)

    def __len__(self) -> int:
        """Places, taken or not."""
        return len(self._table)

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Adds keys, (n,) uint64, n up to `BLOCK`.

        Returns:
          for each whether it was met for the first time, (n,).
        """
        unique, first = np.unique(keys, return_index=True)
        is_new = np.zeros(len(keys), bool)
        is_new[first] = self._place(unique)[1]
        return is_new

    def places(self, keys: np.ndarray) -> np.ndarray:
        """Adds keys, (n,) uint64, n up to `BLOCK`; returns the place of each, (n,)."""
        unique, inverse = np.unique(keys, return_inverse=True)
        return self._place(unique)[0][inverse]

    def _place(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds or makes places for keys that are all different; says which are new."""
        while 3 * (self._count + len(keys)) > 2 * len(self._table):
            self._grow()
        keys = np.maximum(keys, 1)  # zero is a free place
        places = (keys % len(self._table)).astype(np.intp)
        is_new = np.zeros(len(keys), bool)
        looking = np.arange(len(keys))
        while len(looking):
            free = looking[self._table[places[looking]] == 0]
            self._table[places[free]] = keys[free]  # where several meet, one stays
            is_new[free] = self._table[places[free]] == keys[free]
            looking = looking[self._table[places[looking]] != keys[looking]]
            places[looking] = (places[looking] + 1) % len(self._table)
        self._count += int(is_new.sum())
        return places, is_new

    def _grow(self) -> None:
        old, self._count = self._table, 0
        self._table = scratch(2 * len(old), np.uint64)
        for start in range(0, len(old), BLOCK):
            block = old[start : start + BLOCK]
            self._place(block[block != 0])
