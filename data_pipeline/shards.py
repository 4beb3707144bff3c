"""How do the ids of many pairs lie on disk, and how is damage noticed?

A shard is a folder of flat arrays that are mapped, not read: what is not looked at
needs no memory. It appears whole or not at all, and is checked whenever it is opened.
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError

ABOUT = "about.json"
SIDES = ("source", "target")
ARRAYS = ("source_ids", "source_offsets", "target_ids", "target_offsets")


@dataclasses.dataclass(frozen=True, eq=False)
class Shard:
    """Token ids of sentence pairs, without start and end tokens.

    Row i of the source is `source_ids[source_offsets[i]:source_offsets[i + 1]]`.

    Attributes:
      source_ids: (tokens,) uint16 or int32.
      source_offsets: (rows + 1,) int64.
      target_ids: likewise.
      target_offsets: likewise.
    """

    source_ids: np.ndarray
    source_offsets: np.ndarray
    target_ids: np.ndarray
    target_offsets: np.ndarray

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


def count_lengths(lengths: np.ndarray) -> np.ndarray:
    """Counts rows by their lengths.

    Args:
      lengths: (2, rows) tokens of source and target.

    Returns:
      (points, 3) int64: source length, target length, how many rows have them.
    """
    points, rows = np.unique(lengths, axis=1, return_counts=True)
    return np.concatenate([points, rows[None]]).T.astype(np.int64)


def join(shards: Sequence[Shard]) -> Shard:
    """One shard of the rows of several, in order; copied where there are several."""
    if len(shards) == 1:
        return shards[0]
    arrays = {}
    for side in SIDES:
        ids = [getattr(shard, f"{side}_ids") for shard in shards]
        lengths = [getattr(shard, f"{side}_lengths") for shard in shards]
        arrays[f"{side}_ids"] = np.concatenate(ids)
        arrays[f"{side}_offsets"] = _offsets(lengths)
    return Shard(**arrays)


def _offsets(lengths: Sequence[np.ndarray]) -> np.ndarray:
    return np.cumsum(np.concatenate([[0], *lengths]), dtype="<i8")


@dataclasses.dataclass(frozen=True)
class StoredShard:
    """A shard on disk.

    Attributes:
      folder: where it lies.
      arrays: type, elements and checksum of each array by name.
      pairs: pairs of text that it was made from.
      dropped: how many of them are not in it, by reason.
    """

    folder: Path
    arrays: dict[str, tuple[str, int, int]]
    pairs: int
    dropped: dict[str, int]

    @classmethod
    def find(cls, folder: Path) -> "StoredShard | None":
        """Finds what a `ShardWriter` left; None if that is not there or cut short."""
        try:
            about = json.loads((folder / ABOUT).read_text())
            for name in (*ARRAYS, "lengths"):
                dtype, elements, _ = about["arrays"][name]
                size = (folder / name).stat().st_size
                if size != elements * np.dtype(dtype).itemsize:
                    return None
            return cls(folder, about["arrays"], about["pairs"], about["dropped"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def lengths(self) -> np.ndarray:
        """What `count_lengths` says of its rows."""
        return self._map("lengths").reshape(-1, 3)

    def open(self) -> Shard:
        """Maps the arrays.

        Raises:
          DataError: if they are not what was written.
        """
        return Shard(**{name: self._map(name) for name in ARRAYS})

    def _map(self, name: str) -> np.ndarray:
        dtype, elements, checksum = self.arrays[name]
        try:
            array = np.empty(0, dtype)
            if elements:  # an empty file cannot be mapped
                array = np.memmap(self.folder / name, dtype, mode="r").view(np.ndarray)
            if len(array) == elements and zlib.crc32(array) == checksum:
                return array
            problem = "is damaged"
        except (OSError, ValueError) as error:
            problem = f"cannot be read ({error})"
        raise DataError(
            f"{self.folder / name} {problem}; expected the ids that were encoded: "
            f"remove them with `rm -r {self.folder}`, and the same command encodes "
            "them again"
        )


class ShardWriter:
    """Pairs on their way into a folder.

    It appears when the `with` ends, and only if something was written.
    """

    def __init__(self, folder: Path, ids_dtype: str):
        self._folder, self._ids_dtype = folder, ids_dtype
        self._unfinished = folder.with_suffix(".tmp")
        self._lengths: list[np.ndarray] = []
        self._arrays: dict[str, tuple[str, int, int]] = {}
        self._pairs, self._dropped = 0, {}

    def __enter__(self) -> "ShardWriter":
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir()
        self._files = {
            side: (self._unfinished / f"{side}_ids").open("wb") for side in SIDES
        }
        return self

    def append(
        self,
        ids: Sequence[np.ndarray],
        lengths: np.ndarray,
        dropped: dict[str, int],
    ) -> None:
        """Writes some rows.

        Args:
          ids: all tokens of the source, and of the target.
          lengths: (2, rows) tokens of each row.
          dropped: pairs that were left out here, by reason.
        """
        for side, tokens in zip(SIDES, ids, strict=True):
            self._write(self._files[side], f"{side}_ids", tokens, self._ids_dtype)
        self._lengths.append(lengths)
        self._pairs += lengths.shape[1] + sum(dropped.values())
        for reason, pairs in dropped.items():
            self._dropped[reason] = self._dropped.get(reason, 0) + pairs

    def __exit__(self, failure, *_) -> None:
        try:
            for file in self._files.values():
                file.close()
            if failure is None and self._lengths:
                self._finish()
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def _finish(self) -> None:
        lengths = np.concatenate(self._lengths, axis=1)
        rest = {
            f"{side}_offsets": (_offsets([row]), "<i8")
            for side, row in zip(SIDES, lengths, strict=True)
        }
        rest["lengths"] = (count_lengths(lengths).ravel(), "<i8")
        for name, (array, dtype) in rest.items():
            with (self._unfinished / name).open("wb") as file:
                self._write(file, name, array, dtype)
        about = {
            "arrays": self._arrays,
            "pairs": self._pairs,
            "dropped": self._dropped,
        }
        (self._unfinished / ABOUT).write_text(json.dumps(about, indent=1))
        shutil.rmtree(self._folder, ignore_errors=True)
        os.rename(self._unfinished, self._folder)

    def _write(self, file, name: str, array: np.ndarray, dtype: str) -> None:
        data = array.astype(dtype).tobytes()
        file.write(data)
        _, elements, checksum = self._arrays.get(name, (dtype, 0, 0))
        self._arrays[name] = (dtype, elements + len(array), zlib.crc32(data, checksum))
