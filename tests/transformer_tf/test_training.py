import dataclasses
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from transformer_tf.config import PRESETS, TrainingConfig
from transformer_tf.model import build_transformer
from transformer_tf.training import (
    DivergedError,
    Trainer,
    WarmupSchedule,
    choose_precision,
    label_smoothed_loss,
)

SIZES = dict(vocab_size=300, num_layers=1, d_model=16, d_ff=32, dropout_rate=0.0)
TINY = dataclasses.replace(PRESETS["tiny"].model, **SIZES)
RECIPE = TrainingConfig(
    batch_tokens=64, warmup_steps=10, max_steps=1, learning_rate_scale=0.5
)


def test_loss_equals_a_calculation_by_hand():
    # Softmax of [ln 1, ln 2, ln 5] is [1/8, 2/8, 5/8]. The first token is piece 2, the
    # second is padding. 0.9 * ln(8/5) + 0.1 * mean(ln 8, ln 4, ln 8/5) = 0.5543.
    logits = tf.math.log([[[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]]])
    loss, tokens = label_smoothed_loss(logits, tf.constant([[2, 0]]), 0.1)
    assert float(loss) == pytest.approx(0.9 * 0.4700 + 0.1 * 1.3119, abs=1e-4)
    assert float(tokens) == 1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_keras_with_one_hot(smoothing):
    random = np.random.default_rng(1)
    logits = tf.Variable(random.standard_normal((3, 4, 7)), dtype=tf.float32)
    target = tf.constant(random.integers(0, 7, (3, 4)))
    keras_loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=smoothing, reduction=None
    )
    with tf.GradientTape(persistent=True) as tape:
        loss, tokens = label_smoothed_loss(logits, target, smoothing)
        per_token = keras_loss(tf.one_hot(target, 7), logits)
        expected = tf.reduce_sum(per_token * tf.cast(target != 0, tf.float32))
    assert float(tokens) == np.count_nonzero(target)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        tape.gradient(loss, logits), tape.gradient(expected, logits), atol=1e-6
    )


def test_rate_is_the_papers():
    base = WarmupSchedule(d_model=512, warmup_steps=4000)
    assert float(base(3999)) == pytest.approx(7.0e-4, rel=0.01)  # the peak of base
    assert float(base(0)) == pytest.approx(512**-0.5 * 4000**-1.5)
    assert float(base(15_999)) == pytest.approx(float(base(3999)) / 2)
    assert WarmupSchedule.from_config(base.get_config())(7) == base(7)


def test_precision_without_a_gpu_is_float32():
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU; run where there is none")
    assert choose_precision("auto") == "float32"
    assert choose_precision("bfloat16") == "bfloat16"


def make_trainer(**changes):
    keras.utils.set_random_seed(3)
    return Trainer(
        build_transformer(TINY), dataclasses.replace(RECIPE, **changes), TINY.d_model
    )


def make_batch(rows=8, seed=1):
    """Sentences of different lengths: ((source, target_in), target_out)."""
    random = np.random.default_rng(seed)
    source = random.integers(4, 300, (rows, 6)).astype(np.int32)
    target = random.integers(4, 300, (rows, 5)).astype(np.int32)
    for row in range(rows):
        source[row, 2 + row % 5 :] = 0
        target[row, 1 + row % 4 :] = 0
    target_in = np.roll(target, 1, axis=1)
    target_in[:, 0] = 2
    return (source, target_in), target


def part_of(batch, rows):
    (source, target_in), target = batch
    return (source[rows], target_in[rows]), target[rows]


def dataset_of(*batches):
    spec = tf.TensorSpec([None, None], tf.int32)
    return tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=((spec, spec), spec)
    )


def run(trainer, batches, **callbacks):
    defaults = dict(
        should_stop=lambda: False,
        after_update=lambda: None,
        report=lambda progress: None,
        checkpoint=lambda: None,
        validate=lambda: None,
    )
    trainer.train(dataset_of(*batches), **{**defaults, **callbacks})


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


def test_learns_a_batch_by_heart():
    trainer = make_trainer(max_steps=150, warmup_steps=40, label_smoothing=0.0)
    run(trainer, [make_batch()] * 150)
    assert trainer.validation_loss(dataset_of(make_batch())) < 0.1


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
    assert trainer._step.experimental_get_tracing_count() == 1


def test_callbacks_come_when_due():
    calls = []
    trainer = make_trainer(
        max_steps=10, log_every=5, validate_every=4, checkpoint_every=3
    )
    run(
        trainer,
        [make_batch()] * 10,
        after_update=lambda: calls.append(("update", trainer.step)),
        report=lambda p: calls.append(("report", p.step)),
        checkpoint=lambda: calls.append(("checkpoint", trainer.step)),
        validate=lambda: calls.append(("validate", trainer.step)),
    )

    def steps_of(called):
        return [step for name, step in calls if name == called]

    assert steps_of("update") == list(range(1, 11))
    assert steps_of("report") == [3, 4, 5, 6, 8, 9, 10]
    assert steps_of("validate") == [4, 8]
    assert steps_of("checkpoint") == [3, 6, 9, 10]


def test_stops_when_asked_and_saves_without_validating():
    saved, validated = [], []
    trainer = make_trainer(max_steps=10, validate_every=2)
    run(
        trainer,
        [make_batch()] * 10,
        should_stop=lambda: trainer.step == 2,
        checkpoint=lambda: saved.append(trainer.step),
        validate=lambda: validated.append(trainer.step),
    )
    assert (saved, validated) == ([2], [])


def test_patience_ends_a_run_for_good():
    losses = [3.0, 2.0, 2.5, 1.9, 2.0, 1.95, 1.0]
    trainer = make_trainer(patience=2, max_steps=10, validate_every=1)

    def validate():
        trainer.note_validation(losses[trainer.step - 1])

    run(trainer, [make_batch()] * 10, validate=validate)
    assert trainer.step == 6
    run(trainer, [make_batch()] * 10, validate=validate)
    assert trainer.step == 6


def test_minutes_end_a_run_for_good():
    trainer = make_trainer(max_minutes=0.01, max_steps=10)
    run(trainer, [make_batch()] * 10, after_update=lambda: time.sleep(0.7))
    assert trainer.step == 1
    run(trainer, [make_batch()] * 10)
    assert trainer.step == 1


def test_a_loss_that_is_no_number_stops_the_run_before_it_is_saved():
    trainer = make_trainer(max_steps=10, checkpoint_every=2)
    embeddings = trainer.model.embedding.embeddings
    saved = []

    def spoil():
        if trainer.step == 3:
            embeddings.assign(tf.fill(embeddings.shape, float("nan")))

    with pytest.raises(DivergedError, match="nan at update 4.*before update 3"):
        run(
            trainer,
            [make_batch()] * 10,
            after_update=spoil,
            checkpoint=lambda: saved.append(trainer.step),
        )
    assert saved == [2]


def test_dropout_states_are_found():
    model = dataclasses.replace(TINY, dropout_rate=0.1)
    trainer = Trainer(build_transformer(model), RECIPE, TINY.d_model)
    # 2 in each encoder layer, 3 in each decoder layer, 1 on each way in
    assert len(trainer.dropout_states()) == 2 + 3 + 2
