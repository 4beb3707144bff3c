import itertools

import numpy as np
import pytest
import tensorflow as tf

from data_pipeline.batches import Batches, Bucket
from data_pipeline.encoded import EncodedPairs
from data_pipeline.errors import DataError
from data_pipeline.tokenizer import BOS_ID, EOS_ID, PAD_ID


def encoded_from(rows):
    """EncodedPairs of [(source ids, target ids), ...]."""

    def flat(side):
        lengths = [len(row[side]) for row in rows]
        ids = np.array([i for row in rows for i in row[side]], np.uint16)
        return ids, np.cumsum([0, *lengths])

    (source_ids, source_offsets), (target_ids, target_offsets) = flat(0), flat(1)
    counts = {"kept": len(rows), "duplicate": 2}
    return EncodedPairs(
        source_ids, source_offsets, target_ids, target_offsets, counts, "made up"
    )


def everyday_corpus(rows=20_000, seed=0):
    """Lengths like those of everyday sentences; ids tell rows apart."""
    rng = np.random.default_rng(seed)
    target = rng.lognormal(2.2, 0.35, rows).clip(2, 60).astype(int)
    source = (target * rng.lognormal(-0.1, 0.2, rows) + 1).clip(1, 60).astype(int)
    ids = [rng.integers(4, 8000, lengths.sum()) for lengths in (source, target)]
    source_ids, target_ids = (i.astype(np.uint16) for i in ids)
    return EncodedPairs(
        source_ids,
        np.cumsum([0, *source]),
        target_ids,
        np.cumsum([0, *target]),
        {"kept": rows},
        "everyday",
    )


@pytest.fixture(scope="module")
def everyday():
    return everyday_corpus()


@pytest.fixture(scope="module")
def batches(everyday):
    return Batches(everyday, batch_tokens=1024, seed=7)


def epoch_of(batches, epoch=0):
    return [batches.batch(epoch, step) for step in range(batches.steps_per_epoch)]


def same(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True)
    )


# By hand -----------------------------------------------------------------------------

FIVE = [
    ([11], [21, 22]),
    ([12, 13, 14], [23, 24, 25, 26]),
    ([15, 16], [27, 28]),
    ([17], [29]),
    ([18, 19, 20], [30, 31, 32]),
]


def test_five_rows_by_hand():
    """With the end token, sources are 2 4 3 2 4 long, targets 3 5 3 2 4.

    Two shapes: rows 0, 2, 3 in (3, 3) and rows 1, 4 in (4, 5) are 3*6 + 2*9 = 36 cells;
    any other cut costs more. A budget of 10 target cells is 3 rows of 3, 2 rows of 5.
    """
    batches = Batches(encoded_from(FIVE), batch_tokens=10, seed=0, max_shapes=2)
    assert batches.buckets == [Bucket(3, 3, 3), Bucket(4, 5, 2)]
    assert batches.steps_per_epoch == 2
    assert batches.tokens_per_epoch == 17
    assert batches.mean_target_tokens == 8.5
    assert batches.padding_share == pytest.approx(1 - (15 + 17) / 36)
    assert sorted((b, sorted(rows)) for b, rows in batches.plan(0)) == [
        (0, [0, 2, 3]),
        (1, [1, 4]),
    ]
    step = next(i for i, (bucket, _) in enumerate(batches.plan(0)) if bucket == 1)
    order = list(batches.plan(0)[step][1])
    (source, target_in), target_out = batches.batch(0, step)
    rows = {
        1: ([12, 13, 14, 3], [2, 23, 24, 25, 26], [23, 24, 25, 26, 3]),
        4: ([18, 19, 20, 3], [2, 30, 31, 32, 0], [30, 31, 32, 3, 0]),
    }
    assert source.tolist() == [rows[i][0] for i in order]
    assert target_in.tolist() == [rows[i][1] for i in order]
    assert target_out.tolist() == [rows[i][2] for i in order]


def test_missing_rows_are_padding():
    batches = Batches(
        encoded_from(FIVE), batch_tokens=100, seed=0, max_shapes=1, row_multiple=4
    )
    assert batches.buckets == [Bucket(4, 5, 8)]
    (source, target_in), target_out = batches.batch(0, 0)
    for array in (source, target_in, target_out):
        assert (array[:5, 0] != PAD_ID).all() and (array[5:] == PAD_ID).all()
    assert batches.padding_share == pytest.approx(1 - (15 + 17) / (8 * 9))


def test_one_row():
    batches = Batches(encoded_from(FIVE[:1]), batch_tokens=1, seed=0)
    assert batches.buckets == [Bucket(2, 3, 1)]  # over the budget, but not left out
    (source, target_in), target_out = batches.batch(0, 0)
    assert source.tolist() == [[11, 3]]
    assert target_in.tolist() == [[2, 21, 22]]
    assert target_out.tolist() == [[21, 22, 3]]
    assert batches.padding_share == 0


# Against a plain loop ----------------------------------------------------------------


def test_batches_equal_a_plain_loop(everyday, batches):
    epoch = 3
    for step in range(0, batches.steps_per_epoch, 9):
        bucket, rows = batches.plan(epoch)[step]
        shape = batches.buckets[bucket]
        (source, target_in), target_out = batches.batch(epoch, step)
        assert source.shape == (shape.rows, shape.source_length)
        assert target_in.shape == target_out.shape == (shape.rows, shape.target_length)
        assert {a.dtype for a in (source, target_in, target_out)} == {np.dtype("int32")}
        for i, row in enumerate(rows):
            s = list(
                everyday.source_ids[slice(*everyday.source_offsets[row : row + 2])]
            )
            t = list(
                everyday.target_ids[slice(*everyday.target_offsets[row : row + 2])]
            )
            pad_s = [PAD_ID] * (shape.source_length - len(s) - 1)
            pad_t = [PAD_ID] * (shape.target_length - len(t) - 1)
            assert source[i].tolist() == [*s, EOS_ID, *pad_s]
            assert target_in[i].tolist() == [BOS_ID, *t, *pad_t]
            assert target_out[i].tolist() == [*t, EOS_ID, *pad_t]


@pytest.mark.parametrize("row_multiple", [1, 8])
def test_figures_equal_a_count(everyday, row_multiple):
    batches = Batches(everyday, batch_tokens=512, seed=1, row_multiple=row_multiple)
    cells = tokens = target_tokens = 0
    for (source, _), target in epoch_of(batches):
        cells += source.size + target.size
        tokens += np.count_nonzero(source) + np.count_nonzero(target)
        target_tokens += np.count_nonzero(target)
    assert batches.padding_share == pytest.approx(1 - tokens / cells, abs=1e-12)
    assert batches.tokens_per_epoch == target_tokens
    assert batches.mean_target_tokens == target_tokens / batches.steps_per_epoch


def test_the_buckets_are_nearly_the_best_possible():
    """All choices of 3 shapes for a small corpus, tried out."""
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.integers(1, 7, (2, 60)), rng.integers(1, 9, (2, 60)))
    encoded = encoded_from([([9] * s, [9] * t) for s, t in lengths.T])
    s, t = lengths + 1
    grid = list(itertools.product(range(2, s.max() + 1), range(2, t.max() + 1)))
    cells = np.array(
        [np.where((s <= a) & (t <= b), a + b, 10**6) for a, b in grid], np.int64
    )
    best = min(
        cells[[*pair, -1]].min(axis=0).sum()
        for pair in itertools.combinations(range(len(grid)), 2)
    )
    batches = Batches(encoded, batch_tokens=1, seed=0, max_shapes=3)
    assert batches.steps_per_epoch == 60  # a budget of 1: one row each, none empty
    found = (s.sum() + t.sum()) / (1 - batches.padding_share)
    assert best <= round(found) <= 1.03 * best


# Properties --------------------------------------------------------------------------


@pytest.mark.parametrize("row_multiple", [1, 3, 8])
@pytest.mark.parametrize("batch_tokens", [50, 1024, 10**7])
def test_every_row_once_in_every_epoch(everyday, batch_tokens, row_multiple):
    batches = Batches(
        everyday, batch_tokens=batch_tokens, seed=1, row_multiple=row_multiple
    )
    assert all(bucket.rows % row_multiple == 0 for bucket in batches.buckets)
    for epoch in (0, 1):
        plan = batches.plan(epoch)
        assert len(plan) == batches.steps_per_epoch
        rows = np.concatenate([rows for _, rows in plan])
        assert np.array_equal(np.sort(rows), np.arange(len(everyday)))
        assert all(0 < len(r) <= batches.buckets[b].rows for b, r in plan)


def test_budget(everyday):
    for bucket in Batches(everyday, batch_tokens=1024, seed=1).buckets:
        assert bucket.rows * bucket.target_length <= 1024
        assert bucket.rows * bucket.source_length <= 2048


@pytest.mark.parametrize("max_shapes", [1, 2, 5, 12, 1000])
def test_at_most_so_many_shapes(everyday, max_shapes):
    batches = Batches(everyday, batch_tokens=512, seed=1, max_shapes=max_shapes)
    shapes = {b.source_length + 1000 * b.target_length for b in batches.buckets}
    assert len(batches.buckets) == len(shapes) <= max_shapes
    assert max(b.target_length for b in batches.buckets) == (
        everyday.target_lengths.max() + 1
    )


def test_shapes_are_those_of_an_epoch_the_largest_first(batches):
    met = {
        (*source.shape, target.shape[1]) for (source, _), target in epoch_of(batches)
    }
    assert set(batches.shapes) == met
    cells = [rows * (source + target) for rows, source, target in batches.shapes]
    assert cells == sorted(cells, reverse=True)


def test_little_padding(everyday):
    for batch_tokens in (1024, 4096):
        batches = Batches(everyday, batch_tokens=batch_tokens, seed=1)
        assert batches.padding_share < 0.12
        assert batches.mean_target_tokens > 0.75 * batch_tokens
    assert len(batches.buckets) <= 12


def test_more_shapes_pad_less(everyday):
    shares = [
        Batches(everyday, batch_tokens=4096, seed=1, max_shapes=n).padding_share
        for n in (1, 2, 4, 8, 16)
    ]
    assert shares == sorted(shares, reverse=True)


def test_order_depends_on_seed_and_epoch_only(everyday, batches):
    again = Batches(everyday, batch_tokens=1024, seed=7)
    other = Batches(everyday, batch_tokens=1024, seed=8)
    again.plan(5)  # what was asked before does not matter
    for step in (0, 1, 17):
        assert same(batches.batch(2, step), again.batch(2, step))
    assert not same(batches.batch(2, 0), batches.batch(3, 0))
    assert not same(batches.batch(2, 0), other.batch(2, 0))


def test_epochs_mix_rows_and_order(batches):
    def companions(epoch):
        return {frozenset(rows.tolist()) for _, rows in batches.plan(epoch)}

    assert not companions(0) & companions(1)
    order = [[bucket for bucket, _ in batches.plan(epoch)] for epoch in (0, 1)]
    assert order[0] != order[1] and sorted(order[0]) == sorted(order[1])
    assert order[0] != sorted(order[0])


# tf.data -----------------------------------------------------------------------------


def test_dataset_is_the_batches_in_order(batches):
    spec = tf.TensorSpec([None, None], tf.int32)
    dataset = batches.dataset(epochs=2)
    assert dataset.element_spec == ((spec, spec), spec)
    seen = list(dataset.as_numpy_iterator())
    assert len(seen) == len(dataset) == 2 * batches.steps_per_epoch
    for number in [0, 1, batches.steps_per_epoch - 1, batches.steps_per_epoch]:
        assert same(seen[number], batches.batch(*divmod(number, len(seen) // 2)))


def test_dataset_continues_exactly(batches):
    start = batches.steps_per_epoch - 3  # and over the end of the epoch
    resumed = batches.dataset(start=start).as_numpy_iterator()
    whole = itertools.islice(batches.dataset().as_numpy_iterator(), start, start + 6)
    for expected in whole:
        assert same(next(resumed), expected)


def test_dataset_from_far_away_needs_no_history(batches):
    number = 10**9
    first = next(batches.dataset(start=number).as_numpy_iterator())
    assert same(first, batches.batch(*divmod(number, batches.steps_per_epoch)))


def test_replicas_share_each_batch(everyday):
    devices = tf.config.list_logical_devices("CPU")[:2]
    if len(devices) < 2:
        pytest.skip("one device")
    batches = Batches(everyday, batch_tokens=512, seed=1, row_multiple=2)
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
    shared = strategy.experimental_distribute_dataset(batches.dataset(start=4))
    for step, (_, target) in zip((4, 5, 6), shared, strict=False):
        parts = [p.numpy() for p in strategy.experimental_local_results(target)]
        assert len(parts) == 2 and parts[0].shape == parts[1].shape
        assert np.array_equal(np.concatenate(parts), batches.batch(0, step)[1])


# Mistakes ----------------------------------------------------------------------------


def test_no_rows_is_one_line_with_the_counts():
    with pytest.raises(DataError, match="kept 0, duplicate 2") as error:
        Batches(encoded_from([]), batch_tokens=100, seed=0)
    assert "\n" not in str(error.value) and error.value.exit_code == 3


@pytest.mark.parametrize("name", ["batch_tokens", "max_shapes", "row_multiple"])
def test_sizes_below_one(name):
    sizes = {"batch_tokens": 100, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Batches(encoded_from(FIVE), seed=0, **sizes)
