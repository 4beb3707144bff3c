import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from small_training import RECIPE, TINY, make_batch, make_trainer, part_of, run

from transformer_tf.model import build_transformer
from transformer_tf.training import Trainer
from transformer_tf.update import FIRST_SCALE


def gradients_after(trainer, batches):
    """What one update handed to Adam: its first moment is then 0.1 times that.

    Weights would not do: Adam makes a step of full size even of a gradient that is
    nothing but rounding, as that of a bias on the keys.
    """
    run(trainer, batches)
    assert trainer.step == 1
    return [10 * v.numpy() for v in trainer.optimizer.variables if "momentum" in v.path]


@pytest.fixture(scope="module")
def plain_gradients():
    gradients = gradients_after(make_trainer(), [make_batch()])
    assert len(gradients) > 20
    assert max(np.abs(g).max() for g in gradients) > 0.01
    return gradients


def assert_same(gradients, expected):
    for one, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_parts_of_an_update_equal_the_whole(plain_gradients):
    # Cut unevenly: the parts have different numbers of rows and of real tokens.
    parts = [part_of(make_batch(), rows) for rows in (slice(0, 1), slice(1, 8))]
    gradients = gradients_after(make_trainer(accumulation=2), parts)
    assert_same(gradients, plain_gradients)


def test_padding_changes_no_update(plain_gradients):
    inputs, target = make_batch()
    wide = tuple(np.pad(x, ((0, 3), (0, 2))) for x in (*inputs, target))
    assert_same(gradients_after(make_trainer(), [(wide[:2], wide[2])]), plain_gradients)


def test_xla_computes_the_same_update(plain_gradients):
    gradients = gradients_after(make_trainer(xla="full"), [make_batch()])
    assert_same(gradients, plain_gradients)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_computes_nearly_the_same_update(plain_gradients, policy):
    trainer = make_trainer(policy=policy)
    gradients = gradients_after(trainer, [make_batch()])
    assert {v.dtype for v in trainer.model.weights} == {"float32"}
    rough, fine = (
        np.concatenate([g.ravel() for g in gs]) for gs in (gradients, plain_gradients)
    )
    assert 0 < np.linalg.norm(rough - fine) < 0.04 * np.linalg.norm(fine)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_replicas_compute_the_same_update(plain_gradients, accumulation):
    devices = tf.config.list_logical_devices("CPU")
    if len(devices) < 2:
        pytest.skip("needs two logical CPU devices; tests/conftest.py makes them")
    batches = [make_batch()]
    if accumulation == 2:
        batches = [part_of(make_batch(), rows) for rows in (slice(0, 2), slice(2, 8))]
    with tf.distribute.MirroredStrategy([d.name for d in devices[:2]]).scope():
        gradients = gradients_after(make_trainer(accumulation=accumulation), batches)
    assert_same(gradients, plain_gradients)


def test_all_shapes_share_one_graph():
    trainer = make_trainer(max_steps=4)
    run(trainer, [part_of(make_batch(), slice(0, rows)) for rows in (1, 3, 8, 2)])
    assert trainer.update.step.experimental_get_tracing_count() == 1


def state_of(trainer):
    """Weights and the optimizer's state, as one array."""
    variables = [*trainer.model.weights, *trainer.optimizer.variables]
    return np.concatenate([np.ravel(v.numpy()) for v in variables])


def spoiled_after(trainer, updates, batches=10, **options):
    """Runs with one weight that is no number from that update on."""
    bias = trainer.model.encoder.enc_layers[0].mha.output_bias

    def spoil():
        if trainer.step == updates:
            bias.assign(tf.fill(bias.shape, float("nan")))

    run(trainer, [make_batch()] * batches, after_update=spoil, **options)


def test_an_update_that_is_not_finite_changes_nothing_and_is_counted():
    trainer = make_trainer(max_steps=5)
    spoiled_after(trainer, 2)
    assert trainer.step == 5
    counters = trainer.counters
    assert (counters.skipped.numpy(), counters.skipped_in_row.numpy()) == (3, 3)
    assert int(trainer.optimizer.iterations) == 2
    finite = np.isfinite(state_of(trainer))
    assert np.count_nonzero(~finite) == TINY.d_model  # those that the test spoiled


def test_what_was_skipped_is_no_part_of_the_reported_loss():
    reports = []
    trainer = make_trainer(max_steps=4, log_every=4)
    spoiled_after(trainer, 2, report=reports.append)
    assert (reports[0].step, reports[0].skipped) == (4, 2)
    assert 0 < reports[0].loss < 10


def test_a_good_update_ends_the_row_of_skipped_ones():
    trainer = make_trainer(max_steps=3)
    spoiled_after(trainer, 1)
    bias = trainer.model.encoder.enc_layers[0].mha.output_bias
    bias.assign(tf.zeros(bias.shape))
    trainer.config = dataclasses.replace(trainer.config, max_steps=4)
    run(trainer, [make_batch()])
    counters = trainer.counters
    assert (counters.skipped.numpy(), counters.skipped_in_row.numpy()) == (2, 0)


def test_float16_halves_its_loss_scale_until_the_gradient_is_finite():
    trainer = make_trainer(policy="mixed_float16", max_steps=12)
    trainer.counters.loss_scale.assign(2.0**18)
    run(trainer, [make_batch()] * 12)
    counters = trainer.counters
    skipped = int(counters.skipped.numpy())
    assert 0 < skipped < 10
    assert float(counters.loss_scale.numpy()) == 2.0 ** (18 - skipped)
    assert counters.skipped_in_row.numpy() == 0
    assert np.isfinite(state_of(trainer)).all()


def test_float16_tries_a_larger_scale_after_many_good_updates():
    trainer = make_trainer(policy="mixed_float16", max_steps=1)
    trainer.counters.since_skipped.assign(1999)
    run(trainer, [make_batch()])
    assert float(trainer.counters.loss_scale.numpy()) == 2 * FIRST_SCALE


def test_warming_up_changes_nothing():
    model = dataclasses.replace(TINY, dropout_rate=0.1)
    warm, cold = (make_trainer(model=model, max_steps=2) for _ in range(2))
    warm.update.warm_up([(8, 6, 5), (3, 2, 2)])
    assert warm.step == 0
    for trainer in (warm, cold):
        run(trainer, [make_batch()] * 2)
    np.testing.assert_array_equal(state_of(warm), state_of(cold))


def test_replicas_stay_equal_with_dropout():
    devices = tf.config.list_logical_devices("CPU")
    if len(devices) < 2:
        pytest.skip("needs two logical CPU devices; tests/conftest.py makes them")
    model = dataclasses.replace(TINY, dropout_rate=0.1)
    with tf.distribute.MirroredStrategy([d.name for d in devices[:2]]).scope():
        trainer = make_trainer(model=model, max_steps=3)
        run(trainer, [make_batch()] * 3)
    for variable in trainer.model.weights:
        one, other = (v.numpy() for v in variable.value.values)
        np.testing.assert_array_equal(one, other)


def test_dropout_states_are_found():
    model = dataclasses.replace(TINY, dropout_rate=0.1)
    trainer = Trainer(build_transformer(model), RECIPE, TINY.d_model)
    # 2 in each encoder layer, 3 in each decoder layer, 1 on each way in
    assert len(trainer.update.dropout_states()) == 2 + 3 + 2
