"""Which sentences come together, and in which order?

The order of an epoch is computed from (seed, epoch), not remembered: batch n is the
same after a crash, resuming is counting. Shards come one after the other, each in an
order of its own, so what must be held is a shard, whatever the size of the corpus.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from data_pipeline.buckets import Bucket, Grouping, ceil_div, even_rows
from data_pipeline.encoded import EncodedPairs
from data_pipeline.errors import DataError
from data_pipeline.tokenizer import BOS_ID, EOS_ID, PAD_ID

Batch = tuple[tuple[np.ndarray, np.ndarray], np.ndarray]


class Batches:
    """Batches of (source, target_in), target_out under a budget of target tokens.

    Attributes:
      buckets: at most `max_shapes`, shortest target first.
      steps_per_epoch: batches in each epoch.
      tokens_per_epoch: target tokens in each epoch, end tokens included.
      source_tokens_per_epoch: likewise.
      shard_order: function from an epoch to its shards in order: their numbers, and how
        many batches have come when each is through.
      plan: function from an epoch and a shard to its batches in order, as (bucket
        number, row numbers). Every row comes exactly once. Depends on the seed too.
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
        self.row_multiple = row_multiple
        end_token = np.array([1, 1, 0])
        lengths = [of_shard + end_token for of_shard in encoded.lengths]
        self._choose_buckets(lengths, batch_tokens, max_shapes)
        self.steps_per_epoch = int(self._batches.sum())
        together = np.concatenate(lengths)
        self.source_tokens_per_epoch = int(together[:, 0] @ together[:, 2])
        self.tokens_per_epoch = int(together[:, 1] @ together[:, 2])
        self._failure: DataError | None = None
        # A second one of each is wanted where two shards or two epochs meet.
        self.shard_order = functools.lru_cache(maxsize=2)(self._shard_order)
        self.plan = functools.lru_cache(maxsize=2)(self._plan)
        self._shard = functools.lru_cache(maxsize=2)(lambda n: encoded.shards[n]())

    def _choose_buckets(
        self, lengths: list[np.ndarray], batch_tokens: int, max_shapes: int
    ) -> None:
        """Sets `buckets`, and `_batches` (shards, buckets): how many there are."""
        self._grouping = Grouping(np.concatenate(lengths), max_shapes)
        rows = np.zeros((len(lengths), len(self._grouping.shapes)), int)
        for of_shard, (source, target, count) in zip(
            rows, (points.T for points in lengths), strict=True
        ):
            np.add.at(of_shard, self._grouping.groups(source, target), count)
        self.buckets: list[Bucket] = []
        for bucket, (source, target) in enumerate(self._grouping.shapes):
            limit = min(batch_tokens // target, 2 * batch_tokens // source)
            height = even_rows(rows[:, bucket], limit, self.row_multiple)
            self.buckets.append(Bucket(source, target, height))
        self._batches = ceil_div(rows, [bucket.rows for bucket in self.buckets])

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(B, S, T) of every bucket, the largest batch first."""
        shapes = [(b.rows, b.source_length, b.target_length) for b in self.buckets]
        return sorted(shapes, key=lambda s: s[0] * (s[1] + s[2]), reverse=True)

    @property
    def padding_share(self) -> float:
        """Share of the cells of an epoch, both sides, that hold no token."""
        cells = sum(
            int(batches) * bucket.rows * (bucket.source_length + bucket.target_length)
            for bucket, batches in zip(
                self.buckets, self._batches.sum(axis=0), strict=True
            )
        )
        return 1 - (self.source_tokens_per_epoch + self.tokens_per_epoch) / cells

    @property
    def mean_target_tokens(self) -> float:
        """Target tokens of a batch on average, padding not counted."""
        return self.tokens_per_epoch / self.steps_per_epoch

    def _shard_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Computes `shard_order`."""
        shards = len(self._batches)
        # Each shard's own number follows in its place: this one is nobody's.
        order = np.random.default_rng([self.seed, epoch, shards]).permutation(shards)
        return order, np.cumsum(self._batches[order].sum(axis=1))

    def _plan(self, epoch: int, shard: int) -> list[tuple[int, np.ndarray]]:
        """Computes `plan`: rows are shuffled in their bucket, then the batches."""
        rows = self._shard(shard)
        groups = self._grouping.groups(rows.source_lengths + 1, rows.target_lengths + 1)
        rng = np.random.default_rng([self.seed, epoch, shard])
        batches = [
            (bucket, part)
            for bucket, count in enumerate(self._batches[shard])
            if count
            for part in np.array_split(
                rng.permutation(np.flatnonzero(groups == bucket)), count
            )
        ]
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch(self, epoch: int, step: int, replica: int = 0, of: int = 1) -> Batch:
        """One batch: int32 arrays of the bucket's shape, padded on the right.

        Rows that the bucket has and the plan has not are all padding.

        Args:
          epoch: which one.
          step: of the epoch.
          replica: gets rows replica, replica + of, replica + 2 of, ... of the batch.
          of: how many replicas share it; divides `row_multiple`.

        Returns:
          (source, target_in), target_out: source (B, S) and target_out (B, T) end with
          EOS; target_in (B, T) is target_out one step later, from BOS on.
        """
        order, through = self.shard_order(epoch)
        turn = int(np.searchsorted(through, step, side="right"))
        shard = int(order[turn])
        first = through[turn - 1] if turn else 0
        number, rows = self.plan(epoch, shard)[step - first]
        bucket, ids = self.buckets[number], self._shard(shard)
        rows, height = rows[replica::of], bucket.rows // of
        source, source_lengths = _padded(
            ids.source_ids, ids.source_offsets, rows, (height, bucket.source_length)
        )
        target_out, target_lengths = _padded(
            ids.target_ids, ids.target_offsets, rows, (height, bucket.target_length)
        )
        target_in = np.roll(target_out, 1, axis=1)  # the last column is still padding
        used = np.arange(len(rows))
        target_in[used, 0] = BOS_ID
        source[used, source_lengths] = EOS_ID
        target_out[used, target_lengths] = EOS_ID
        return (source, target_in), target_out

    def dataset(
        self,
        start: int = 0,
        epochs: int | None = None,
        replicas: Sequence[int] = range(1),
        of: int = 1,
    ) -> tf.data.Dataset:
        """The batches from number `start` on, counted over epochs, prefetched.

        Args:
          start: epoch and step are `divmod(start, steps_per_epoch)`.
          epochs: the dataset ends with the last batch of epoch number `epochs - 1`;
            None is endless.
          replicas: of a worker; each gets its own part of each batch, one after the
            other. A worker reads no rows but these.
          of: how many replicas there are on all workers together.

        Returns:
          a dataset of ((source, target_in), target_out), each (None, None) int32.
        """
        if self.row_multiple % of or not set(replicas) <= set(range(of)):
            raise ValueError(
                f"replicas {list(replicas)} of {of} with a row_multiple of "
                f"{self.row_multiple}; expected a divisor of that, and numbers below it"
            )

        def load(number: tf.Tensor):
            arrays = tf.numpy_function(
                lambda number: self._part(int(number), replicas, of),
                [number],
                [tf.int32] * 3,
            )
            source, target_in, target_out = (
                tf.ensure_shape(array, (None, None)) for array in arrays
            )
            return (source, target_in), target_out

        last = tf.int64.max // len(replicas)
        if epochs is not None:
            last = epochs * self.steps_per_epoch
        options = tf.data.Options()
        # Replicas split each batch; no file is there to be shared out.
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        numbers = tf.data.Dataset.range(start * len(replicas), last * len(replicas))
        return numbers.map(load).prefetch(tf.data.AUTOTUNE).with_options(options)

    def _part(
        self, number: int, replicas: Sequence[int], of: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Element `number` of `dataset`, counted from the first batch on."""
        batch, place = divmod(number, len(replicas))
        epoch, step = divmod(batch, self.steps_per_epoch)
        try:
            inputs, target_out = self.batch(epoch, step, replicas[place], of)
        except DataError as error:
            self._failure = error
            raise
        return *inputs, target_out

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Lets a DataError of `dataset` out as it is: tf.data makes another of it."""
        try:
            yield
        except tf.errors.OpError:
            if self._failure is not None:
                raise self._failure from None
            raise


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
