"""Which lengths share a shape, so that little is padding?

Sentences of similar length share a bucket, and each bucket has one static shape: few
shapes to compile. Only how many rows have which lengths is asked, never the rows.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of all batches of sentences up to these lengths, end token included."""

    source_length: int
    target_length: int
    rows: int


class Grouping:
    """Groups of rows by their two lengths, so that little padding is needed.

    Which shapes save most is the facility-location problem; adding the best one each
    time, then exchanging while that helps, comes close to its optimum.

    Attributes:
      shapes: (source length, target length) of each group, shortest targets first.
    """

    def __init__(self, lengths: np.ndarray, max_shapes: int):
        """Chooses the groups.

        Args:
          lengths: (points, 3) source length, target length, rows that have them.
          max_shapes: how many groups there may be.
        """
        source, target, rows = lengths.T
        self._source_levels = _levels(source, rows)
        self._target_levels = _levels(target, rows)
        point_of_row = self._points(source, target)
        rows_at = np.zeros(len(self._source_levels) * len(self._target_levels), int)
        np.add.at(rows_at, point_of_row, rows)
        points = np.flatnonzero(rows_at)
        grid = np.meshgrid(self._source_levels, self._target_levels, indexing="ij")
        # Any crossing of two levels may become a shape, (2, shapes).
        shapes = np.stack(grid).reshape(2, -1)

        holds = (shapes[:, :, None] >= shapes[:, None, points]).all(axis=0)
        # Cells that each shape spends on a row at each point, (shapes, points).
        cells = np.where(holds, shapes.sum(axis=0)[:, None], np.inf).astype(np.float32)
        chosen = _choose(cells, rows_at[points], max_shapes)

        shape_of_point = np.zeros(len(rows_at), int)
        shape_of_point[points] = cells[chosen].argmin(axis=0)
        shape_of_row = shape_of_point[point_of_row]
        # A shape need not be larger than the longest rows that it holds.
        largest = {
            int(i): tuple(
                int(side[shape_of_row == i].max()) for side in (target, source)
            )
            for i in np.unique(shape_of_row)
        }
        order = sorted(largest, key=largest.__getitem__)
        self.shapes = [largest[i][::-1] for i in order]
        rank = np.zeros(len(chosen), int)
        rank[order] = np.arange(len(order))
        self._group_of_point = rank[shape_of_point]

    def groups(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The group of each row, by its lengths, (rows,)."""
        return self._group_of_point[self._points(source, target)]

    def _points(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        points = np.searchsorted(self._source_levels, source) * len(self._target_levels)
        return points + np.searchsorted(self._target_levels, target)


def _levels(lengths: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Lengths worth a bucket's edge: all, or 48 with equal shares of the tokens."""
    tokens = np.zeros(lengths.max() + 1, int)
    np.add.at(tokens, lengths, rows * lengths)
    tokens_up_to = np.cumsum(tokens)
    shares = np.linspace(0, tokens_up_to[-1], 48)
    return np.unique(np.searchsorted(tokens_up_to, shares).clip(lengths.min()))


def _choose(cells: np.ndarray, weights: np.ndarray, count: int) -> list[int]:
    """Chooses the shapes on which all rows spend fewest cells.

    Args:
      cells: (shapes, points) cells for a row; inf where the shape is too small. The
        last shape holds every row.
      weights: (points,) rows.
      count: how many to choose.

    Returns:
      their numbers.
    """

    def spent(chosen: list[int]) -> float:
        return cells[chosen].min(axis=0) @ weights

    def with_one_more(chosen: list[int]) -> list[int]:
        saved = np.maximum(cells[chosen].min(axis=0) - cells, 0) @ weights
        return [*chosen, int(saved.argmax())]

    def with_one_less(chosen: list[int]) -> list[int]:
        return min(
            (chosen[:i] + chosen[i + 1 :] for i in range(len(chosen))), key=spent
        )

    chosen = [len(cells) - 1]
    while len(chosen) < count:
        chosen = with_one_more(chosen)
    while True:
        exchanged = with_one_less(with_one_more(chosen))
        if spent(exchanged) >= spent(chosen):
            return chosen
        chosen = exchanged


def even_rows(rows: np.ndarray, limit: int, multiple: int) -> int:
    """Chooses the height of a bucket's batches so that nearly no row is left empty.

    Args:
      rows: (shards,) rows to place; each shard has batches of its own.
      limit: rows that the token budget allows in a batch.
      multiple: of the height; goes before the limit.

    Returns:
      of the heights that need the fewest batches possible, or up to a twentieth more,
      the one that leaves fewest rows empty.
    """
    highest = max(limit // multiple, 1) * multiple
    fewest = ceil_div(rows, highest)
    heights = np.unique(  # that some shard can be cut into without a rest
        [
            ceil_div(count, batches * multiple) * multiple
            for count, least in zip(rows.tolist(), fewest.tolist(), strict=True)
            for batches in range(max(least, 1), least + least // 20 + 1)
        ]
    )
    batches = ceil_div(rows, heights[:, None]).sum(axis=1)
    allowed = batches <= fewest.sum() + fewest.sum() // 20
    heights, batches = heights[allowed], batches[allowed]
    return int(heights[np.lexsort([batches, heights * batches])[0]])


def ceil_div(a, b):
    """Of integers or arrays of them."""
    return -(-a // b)
