import dataclasses
import functools
import hashlib
import itertools
import tracemalloc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from data_pipeline.batches import Batches
from data_pipeline.buckets import Bucket
from data_pipeline.encoded import EncodedPairs
from data_pipeline.errors import DataError
from data_pipeline.shards import Shard, count_lengths, join
from data_pipeline.tokenizer import BOS_ID, EOS_ID, PAD_ID


def flat(rows):
    """Ids and offsets of lists of ids."""
    ids = np.array([i for row in rows for i in row], np.uint16)
    return ids, np.cumsum([0, *map(len, rows)])


def shard_from(rows):
    """A shard of [(source ids, target ids), ...]."""
    return Shard(*flat([row[0] for row in rows]), *flat([row[1] for row in rows]))


def encoded_of(*shards):
    return EncodedPairs(
        # Copies, as what is opened on disk is nobody else's.
        [lambda shard=shard: dataclasses.replace(shard) for shard in shards],
        [count_lengths(np.stack([s.source_lengths, s.target_lengths])) for s in shards],
        {"kept": sum(map(len, shards)), "duplicate": 2},
        "made up",
    )


def encoded_from(rows):
    return encoded_of(shard_from(rows))


def everyday_shard(rows=20_000, seed=0):
    """Lengths like those of everyday sentences; ids tell rows apart."""
    rng = np.random.default_rng(seed)
    target = rng.lognormal(2.2, 0.35, rows).clip(2, 60).astype(int)
    source = (target * rng.lognormal(-0.1, 0.2, rows) + 1).clip(1, 60).astype(int)
    ids = [rng.integers(4, 8000, lengths.sum()) for lengths in (source, target)]
    source_ids, target_ids = (i.astype(np.uint16) for i in ids)
    return Shard(
        source_ids, np.cumsum([0, *source]), target_ids, np.cumsum([0, *target])
    )


@pytest.fixture(scope="module")
def everyday():
    return encoded_of(everyday_shard())


@pytest.fixture(scope="module")
def several():
    """Shards of 4,000, 3,000, 5,000 and 0 rows."""
    sizes = (4000, 3000, 5000, 0)
    return encoded_of(*(everyday_shard(n, seed) for seed, n in enumerate(sizes)))


@pytest.fixture(scope="module")
def batches(everyday):
    return Batches(everyday, batch_tokens=1024, seed=7)


def plan_of(batches, epoch=0):
    """Every batch of an epoch in order, as (shard, bucket, rows)."""
    return [
        (int(shard), *batch)
        for shard in batches.shard_order(epoch)[0]
        for batch in batches.plan(epoch, int(shard))
    ]


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
    assert sorted((b, sorted(rows)) for b, rows in batches.plan(0, 0)) == [
        (0, [0, 2, 3]),
        (1, [1, 4]),
    ]
    step = next(i for i, (bucket, _) in enumerate(batches.plan(0, 0)) if bucket == 1)
    order = list(batches.plan(0, 0)[step][1])
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
    epoch, ids = 3, everyday.shards[0]()
    for step in range(0, batches.steps_per_epoch, 9):
        bucket, rows = batches.plan(epoch, 0)[step]
        shape = batches.buckets[bucket]
        (source, target_in), target_out = batches.batch(epoch, step)
        assert source.shape == (shape.rows, shape.source_length)
        assert target_in.shape == target_out.shape == (shape.rows, shape.target_length)
        assert {a.dtype for a in (source, target_in, target_out)} == {np.dtype("int32")}
        for i, row in enumerate(rows):
            s = list(ids.source_ids[slice(*ids.source_offsets[row : row + 2])])
            t = list(ids.target_ids[slice(*ids.target_offsets[row : row + 2])])
            pad_s = [PAD_ID] * (shape.source_length - len(s) - 1)
            pad_t = [PAD_ID] * (shape.target_length - len(t) - 1)
            assert source[i].tolist() == [*s, EOS_ID, *pad_s]
            assert target_in[i].tolist() == [BOS_ID, *t, *pad_t]
            assert target_out[i].tolist() == [*t, EOS_ID, *pad_t]


@pytest.mark.parametrize("corpus", ["everyday", "several"])
@pytest.mark.parametrize("row_multiple", [1, 8])
def test_figures_equal_a_count(corpus, row_multiple, request):
    encoded = request.getfixturevalue(corpus)
    batches = Batches(encoded, batch_tokens=512, seed=1, row_multiple=row_multiple)
    cells = tokens = target_tokens = 0
    for (source, _), target in epoch_of(batches):
        cells += source.size + target.size
        tokens += np.count_nonzero(source) + np.count_nonzero(target)
        target_tokens += np.count_nonzero(target)
    assert batches.padding_share == pytest.approx(1 - tokens / cells, abs=1e-12)
    assert batches.tokens_per_epoch == target_tokens
    assert batches.source_tokens_per_epoch == tokens - target_tokens
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


@pytest.mark.parametrize("corpus", ["everyday", "several"])
@pytest.mark.parametrize("row_multiple", [1, 3, 8])
@pytest.mark.parametrize("batch_tokens", [50, 1024, 10**7])
def test_every_row_once_in_every_epoch(corpus, batch_tokens, row_multiple, request):
    encoded = request.getfixturevalue(corpus)
    batches = Batches(
        encoded, batch_tokens=batch_tokens, seed=1, row_multiple=row_multiple
    )
    assert all(bucket.rows % row_multiple == 0 for bucket in batches.buckets)
    expected = [(n, r) for n, s in enumerate(encoded.shards) for r in range(len(s()))]
    for epoch in (0, 1):
        plan = plan_of(batches, epoch)
        assert len(plan) == batches.steps_per_epoch
        assert sorted((n, r) for n, _, rows in plan for r in rows) == expected
        assert all(0 < len(r) <= batches.buckets[b].rows for _, b, r in plan)


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
        everyday.lengths[0][:, 1].max() + 1
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
    again.plan(5, 0)  # what was asked before does not matter
    for step in (0, 1, 17):
        assert same(batches.batch(2, step), again.batch(2, step))
    assert not same(batches.batch(2, 0), batches.batch(3, 0))
    assert not same(batches.batch(2, 0), other.batch(2, 0))


def test_epochs_mix_rows_and_order(batches):
    def companions(epoch):
        return {frozenset(rows.tolist()) for _, rows in batches.plan(epoch, 0)}

    assert not companions(0) & companions(1)
    order = [[bucket for bucket, _ in batches.plan(epoch, 0)] for epoch in (0, 1)]
    assert order[0] != order[1] and sorted(order[0]) == sorted(order[1])
    assert order[0] != sorted(order[0])


def digest(plan):
    lines = (f"{bucket}:{','.join(map(str, rows.tolist()))};" for bucket, rows in plan)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("sizes", "epochs"),
    [
        ({"batch_tokens": 300, "seed": 7}, ["7ae7278b43ee58ba", "c9d496411f40d1fb"]),
        (
            {"batch_tokens": 512, "seed": 1, "max_shapes": 5, "row_multiple": 4},
            ["a8a6c68b62891561", "1fc3d2c780a05781"],
        ),
    ],
)
def test_the_order_of_one_shard_is_what_it_was_before_there_were_shards(sizes, epochs):
    """A run that began then goes on with the batches that it would have had."""
    n = np.arange(5000)
    source = 1 + n * n % 17
    target = 1 + n**3 % 23 // 2 + source // 2
    sides = [
        (np.zeros(k.sum(), np.uint16), np.cumsum([0, *k])) for k in (source, target)
    ]
    batches = Batches(encoded_of(Shard(*sides[0], *sides[1])), **sizes)
    assert [digest(batches.plan(epoch, 0)) for epoch in (0, 1)] == epochs


# Shards ------------------------------------------------------------------------------


def test_two_shards_by_hand():
    """Rows 1 and 4 of `FIVE` and the others, in shards of their own."""
    long, short = [FIVE[1], FIVE[4]], [FIVE[0], FIVE[2], FIVE[3]]
    encoded = encoded_of(shard_from(long), shard_from(short))
    batches = Batches(encoded, batch_tokens=10, seed=0, max_shapes=2)
    assert batches.buckets == [Bucket(3, 3, 3), Bucket(4, 5, 2)]
    assert batches.steps_per_epoch == 2
    assert sorted((n, b, sorted(rows)) for n, b, rows in plan_of(batches)) == [
        (0, 1, [0, 1]),
        (1, 0, [0, 1, 2]),
    ]
    (order, through) = batches.shard_order(0)
    assert sorted(order) == [0, 1] and through.tolist() == [1, 2]
    sources = {1: {11, 15, 17}, 0: {12, 18}}  # first ids
    for step, shard in enumerate(order):
        (source, _), _ = batches.batch(0, step)
        assert set(source[:, 0].tolist()) == sources[shard]


def test_batches_follow_the_plan_over_shards(several):
    batches = Batches(several, batch_tokens=512, seed=3)
    shards = [open_shard() for open_shard in several.shards]
    plan = plan_of(batches, 2)
    for step in (*range(0, len(plan), 7), len(plan) - 1):
        number, _, rows = plan[step]
        (_, _), target = batches.batch(2, step)
        firsts = shards[number].target_ids[shards[number].target_offsets[rows]]
        assert target[: len(rows), 0].tolist() == firsts.tolist()


def test_epochs_mix_the_shards_too(several):
    batches = Batches(several, batch_tokens=512, seed=3)
    orders = {tuple(batches.shard_order(epoch)[0]) for epoch in range(20)}
    assert len(orders) > 5 and all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert digest(batches.plan(0, 1)) != digest(batches.plan(1, 1))


def test_shards_cost_little_padding():
    """As many rows in one shard, and in nine of which the last is half as large."""
    parts = [everyday_shard(n, seed) for seed, n in enumerate([8000] * 8 + [4000])]
    one, nine = (
        Batches(encoded, batch_tokens=512, seed=1)
        for encoded in (encoded_of(join(parts)), encoded_of(*parts))
    )
    assert nine.padding_share - one.padding_share < 0.03
    assert nine.steps_per_epoch < 1.04 * one.steps_per_epoch


def test_never_more_than_two_shards_are_held(several):
    alive = weakref.WeakSet()

    def watched(open_shard):
        def opened():
            assert len(alive) <= 2
            shard = open_shard()
            alive.add(shard)
            return shard

        return opened

    shards = [watched(open_shard) for open_shard in several.shards]
    encoded = dataclasses.replace(several, shards=shards)
    batches = Batches(encoded, batch_tokens=2048, seed=1)
    assert not alive  # choosing buckets needs none
    for epoch in range(3):
        for step in range(batches.steps_per_epoch):
            batches.batch(epoch, step)
            assert 1 <= len(alive) <= 2


def test_memory_does_not_grow_with_the_corpus():
    peaks = {}
    for count in (4, 16):
        made_anew = functools.partial(everyday_shard, 5000)
        lengths = encoded_of(made_anew()).lengths
        encoded = EncodedPairs(
            [made_anew] * count, lengths * count, {"kept": 5000 * count}, "alike"
        )
        batches = Batches(encoded, batch_tokens=8192, seed=1)
        tracemalloc.start()
        for step in range(batches.steps_per_epoch):
            batches.batch(0, step)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[16] < 1.1 * peaks[4]


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


# Replicas of a cluster ---------------------------------------------------------------


def test_replicas_by_hand():
    batches = Batches(
        encoded_from(FIVE), batch_tokens=100, seed=0, max_shapes=1, row_multiple=4
    )
    assert batches.buckets == [Bucket(4, 5, 8)]  # five rows and three that are padding
    (_, rows) = batches.plan(0, 0)[0]
    (whole, _), _ = batches.batch(0, 0)
    for replica in range(4):
        (source, _), _ = batches.batch(0, 0, replica, of=4)
        assert source.tolist() == [whole[replica].tolist(), whole[replica + 4].tolist()]
    assert source.any(axis=1).tolist() == [True, False]  # replica 3 of 4: rows 3, 7


@pytest.mark.parametrize("start", [0, 1, 50, "the last"])
def test_two_workers_with_two_replicas_share_each_batch(several, start):
    batches = Batches(several, batch_tokens=512, seed=5, row_multiple=4)
    if start == "the last":
        start = batches.steps_per_epoch - 1  # and into the next epoch
    workers = [
        batches.dataset(start, replicas=replicas, of=4).as_numpy_iterator()
        for replicas in (range(0, 2), range(2, 4))
    ]
    for number in range(start, start + 3):
        parts = [next(worker) for worker in workers for _ in range(2)]
        whole = batches.batch(*divmod(number, batches.steps_per_epoch))
        for name in ((0, 0), (0, 1), (1,)):
            array, *pieces = (
                functools.reduce(lambda part, i: part[i], name, part)
                for part in (whole, *parts)
            )
            assert len({piece.shape for piece in pieces}) == 1
            # Row r of the batch is row r // 4 of replica r % 4.
            together = np.stack(pieces, axis=1).reshape(array.shape)
            assert np.array_equal(together, array)


def test_a_strategy_gives_each_replica_its_own_part(several):
    devices = tf.config.list_logical_devices("CPU")[:2]
    if len(devices) < 2:
        pytest.skip("one device; tests/conftest.py asks for two")
    batches = Batches(several, batch_tokens=512, seed=1, row_multiple=2)
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
    shared = strategy.distribute_datasets_from_function(
        lambda context: batches.dataset(start=4, replicas=range(2), of=2)
    )
    for step, (_, target) in zip((4, 5, 6), shared, strict=False):
        parts = [p.numpy() for p in strategy.experimental_local_results(target)]
        whole = batches.batch(0, step)[1]
        assert len(parts) == 2
        for replica, part in enumerate(parts):
            assert np.array_equal(part, whole[replica::2])


def test_a_replica_without_rows_is_all_padding():
    batches = Batches(encoded_from(FIVE[:1]), batch_tokens=9, seed=0, row_multiple=4)
    last = next(batches.dataset(replicas=[3], of=4).as_numpy_iterator())
    assert [array.any() for array in tf.nest.flatten(last)] == [False] * 3


def test_the_worker_of_all_replicas_ends_with_the_epoch(several):
    batches = Batches(several, batch_tokens=2048, seed=5, row_multiple=2)
    dataset = batches.dataset(epochs=2, replicas=range(2), of=2)
    assert len(dataset) == 2 * 2 * batches.steps_per_epoch
    assert len(list(dataset)) == len(dataset)


@pytest.mark.parametrize(("replicas", "of"), [([0], 3), ([4], 4), ([-1], 2), ([0], 8)])
def test_replicas_that_there_are_not(everyday, replicas, of):
    batches = Batches(everyday, batch_tokens=512, seed=1, row_multiple=4)
    with pytest.raises(ValueError, match=f"of {of} with a row_multiple of 4"):
        batches.dataset(replicas=replicas, of=of)


# Mistakes ----------------------------------------------------------------------------


def test_no_rows_is_one_line_with_the_counts():
    with pytest.raises(DataError, match="kept 0, duplicate 2") as error:
        Batches(encoded_from([]), batch_tokens=100, seed=0)
    assert "\n" not in str(error.value) and error.value.exit_code == 3


def test_a_damaged_shard_is_its_own_error_after_tf_data_too(everyday):
    def damaged():
        raise DataError("shard 0 is damaged")

    broken = dataclasses.replace(everyday, shards=[damaged])
    batches = Batches(broken, batch_tokens=512, seed=1)
    with pytest.raises(DataError, match="shard 0"), batches.failures():
        next(iter(batches.dataset()))
    with pytest.raises(tf.errors.OpError), batches.failures():
        batches._failure = None
        raise tf.errors.AbortedError(None, None, "something else")


@pytest.mark.parametrize("name", ["batch_tokens", "max_shapes", "row_multiple"])
def test_sizes_below_one(name):
    sizes = {"batch_tokens": 100, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Batches(encoded_from(FIVE), seed=0, **sizes)
