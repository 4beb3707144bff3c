"""Which sentences come together, in which shape, in which order?

Sentences of similar length share a bucket, and each bucket has one static shape:
little padding, few shapes to compile. The order of an epoch is computed from
(seed, epoch), not remembered: batch n is the same after a crash, resuming is counting.
"""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from data_pipeline.encoded import EncodedPairs
from data_pipeline.errors import DataError
from data_pipeline.tokenizer import BOS_ID, EOS_ID, PAD_ID

Batch = tuple[tuple[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The shape of all batches of sentences up to these lengths, end token included."""

    source_length: int
    target_length: int
    rows: int


class Batches:
    """Batches of (source, target_in), target_out under a budget of target tokens.

    Attributes:
      buckets: at most `max_shapes`, shortest target first.
      steps_per_epoch: batches in each epoch.
      tokens_per_epoch: target tokens in each epoch, end tokens included.
      plan: function from an epoch to its batches in order, as (bucket number, row
        numbers). Every row comes exactly once. Depends on (seed, epoch) only.
    """

    def __init__(
        self,
        encoded: EncodedPairs,
        *,
        batch_tokens: int,
        seed: int,
        max_shapes: int = 12,
        row_multiple: int = 1,
    ):
        """Chooses the buckets.

        Args:
          encoded: the ids.
          batch_tokens: target cells of a batch, at most; the source may have twice as
            many. A sentence longer than that still gets a batch: none is left out.
          seed: of the order.
          max_shapes: how many buckets there may be.
          row_multiple: divides the rows of every batch (replicas, accumulation steps).

        Raises:
          DataError: if `encoded` is empty.
        """
        for name, value in [
            ("batch_tokens", batch_tokens),
            ("max_shapes", max_shapes),
            ("row_multiple", row_multiple),
        ]:
            if value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more")
        if not len(encoded):
            counts = ", ".join(f"{reason} {n}" for reason, n in encoded.counts.items())
            raise DataError(
                f"no sentence pair is left ({counts}); expected at least one: "
                "check the corpus and --max_length"
            )
        self.encoded = encoded
        self.seed = seed
        source_lengths = encoded.source_lengths + 1  # the end token
        target_lengths = encoded.target_lengths + 1
        self.tokens_per_epoch = int(target_lengths.sum())
        self._tokens = self.tokens_per_epoch + int(source_lengths.sum())

        self.buckets: list[Bucket] = []
        self._rows: list[np.ndarray] = []  # of each bucket
        self._batches: list[int] = []  # of each bucket in an epoch
        for rows in _group_rows(source_lengths, target_lengths, max_shapes):
            source = int(source_lengths[rows].max())
            target = int(target_lengths[rows].max())
            limit = min(batch_tokens // target, 2 * batch_tokens // source)
            height, batches = _even_rows(len(rows), limit, row_multiple)
            self.buckets.append(Bucket(source, target, height))
            self._rows.append(rows)
            self._batches.append(batches)
        self.steps_per_epoch = sum(self._batches)
        # A second plan is wanted where two epochs meet.
        self.plan = functools.lru_cache(maxsize=2)(self._plan)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(B, S, T) of every bucket, the largest batch first."""
        shapes = [(b.rows, b.source_length, b.target_length) for b in self.buckets]
        return sorted(shapes, key=lambda s: s[0] * (s[1] + s[2]), reverse=True)

    @property
    def padding_share(self) -> float:
        """Share of the cells of an epoch, both sides, that hold no token."""
        cells = sum(
            batches * bucket.rows * (bucket.source_length + bucket.target_length)
            for bucket, batches in zip(self.buckets, self._batches, strict=True)
        )
        return 1 - self._tokens / cells

    @property
    def mean_target_tokens(self) -> float:
        """Target tokens of a batch on average, padding not counted."""
        return self.tokens_per_epoch / self.steps_per_epoch

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """Computes `plan`: rows are shuffled in their bucket, then the batches."""
        rng = np.random.default_rng([self.seed, epoch])
        batches = [
            (bucket, part)
            for bucket, rows in enumerate(self._rows)
            for part in np.array_split(rng.permutation(rows), self._batches[bucket])
        ]
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, epoch: int, step: int) -> Batch:
        """One batch: int32 arrays of the bucket's shape, padded on the right.

        Rows that the bucket has and the plan has not are all padding.

        Returns:
          (source, target_in), target_out: source (B, S) and target_out (B, T) end with
          EOS; target_in (B, T) is target_out one step later, from BOS on.
        """
        number, rows = self.plan(epoch)[step]
        bucket, encoded = self.buckets[number], self.encoded
        source, source_lengths = _padded(
            encoded.source_ids,
            encoded.source_offsets,
            rows,
            (bucket.rows, bucket.source_length),
        )
        target_out, target_lengths = _padded(
            encoded.target_ids,
            encoded.target_offsets,
            rows,
            (bucket.rows, bucket.target_length),
        )
        target_in = np.roll(target_out, 1, axis=1)  # the last column is still padding
        used = np.arange(len(rows))
        target_in[used, 0] = BOS_ID
        source[used, source_lengths] = EOS_ID
        target_out[used, target_lengths] = EOS_ID
        return (source, target_in), target_out

    def dataset(self, start: int = 0, epochs: int | None = None) -> tf.data.Dataset:
        """The batches from number `start` on, counted over epochs, prefetched.

        Args:
          start: epoch and step are `divmod(start, steps_per_epoch)`.
          epochs: the dataset ends with the last batch of epoch number `epochs - 1`;
            None is endless.

        Returns:
          a dataset of ((source, target_in), target_out), each (None, None) int32.
        """

        def assemble(number: np.int64) -> tuple[np.ndarray, ...]:
            (source, target_in), target_out = self.batch(
                *divmod(int(number), self.steps_per_epoch)
            )
            return source, target_in, target_out

        def load(number: tf.Tensor):
            arrays = tf.numpy_function(assemble, [number], [tf.int32] * 3)
            source, target_in, target_out = (
                tf.ensure_shape(array, (None, None)) for array in arrays
            )
            return (source, target_in), target_out

        end = tf.int64.max if epochs is None else epochs * self.steps_per_epoch
        options = tf.data.Options()
        # Replicas split each batch; no file is there to be shared out.
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        numbers = tf.data.Dataset.range(start, end)
        return numbers.map(load).prefetch(tf.data.AUTOTUNE).with_options(options)


def _padded(
    ids: np.ndarray, offsets: np.ndarray, rows: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Gathers sentences into an array of `shape`, int32; returns their lengths too."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    columns = np.arange(shape[1])
    used = columns < lengths[:, None]  # (rows, columns)
    cells = np.full(shape, PAD_ID, np.int32)
    cells[: len(rows)][used] = ids[(starts[:, None] + columns)[used]]
    return cells, lengths


def _even_rows(count: int, limit: int, multiple: int) -> tuple[int, int]:
    """Cuts `count` rows into batches of one height with nearly no row left empty.

    Args:
      count: rows to place, at least 1.
      limit: rows that the token budget allows in a batch.
      multiple: of the height; goes before the limit.

    Returns:
      the height and the number of batches: of the fewest possible up to a twentieth
      more, the number that leaves fewest rows empty.
    """
    fewest = _ceil_div(count, max(limit // multiple, 1) * multiple)
    options = (
        (_ceil_div(count, batches * multiple) * multiple, batches)
        for batches in range(fewest, fewest + fewest // 20 + 1)
    )
    return min(options, key=lambda option: option[0] * option[1])


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _group_rows(
    source: np.ndarray, target: np.ndarray, max_shapes: int
) -> list[np.ndarray]:
    """Groups rows by their two lengths so that little padding is needed.

    Which shapes save most is the facility-location problem; adding the best one each
    time, then exchanging while that helps, comes close to its optimum.

    Args:
      source: (rows,) lengths.
      target: (rows,) lengths.
      max_shapes: how many groups there may be.

    Returns:
      the row numbers of each group, shortest targets first.
    """
    source_levels, target_levels = _levels(source), _levels(target)
    point_of_row = np.searchsorted(source_levels, source) * len(target_levels)
    point_of_row += np.searchsorted(target_levels, target)
    points, weights = np.unique(point_of_row, return_counts=True)
    grid = np.stack(np.meshgrid(source_levels, target_levels, indexing="ij"))
    shapes = grid.reshape(2, -1)  # any crossing of two levels may become a shape
    point_lengths = shapes[:, points]

    holds = (shapes[:, :, None] >= point_lengths[:, None, :]).all(axis=0)
    # Cells that each shape spends on a row at each point, (shapes, points).
    cells = np.where(holds, shapes.sum(axis=0)[:, None], np.inf).astype(np.float32)
    chosen = _choose(cells, weights, max_shapes)

    shape_of_point = np.zeros(shapes.shape[1], np.intp)
    shape_of_point[points] = cells[chosen].argmin(axis=0)
    shape_of_row = shape_of_point[point_of_row]
    groups = (np.flatnonzero(shape_of_row == i) for i in range(len(chosen)))
    return sorted(
        (rows for rows in groups if len(rows)),
        key=lambda rows: (target[rows].max(), source[rows].max()),
    )


def _levels(lengths: np.ndarray) -> np.ndarray:
    """Lengths worth a bucket's edge: all, or 48 with equal shares of the tokens."""
    tokens_up_to = np.cumsum(np.bincount(lengths) * np.arange(lengths.max() + 1))
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
