import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from transformer_tf.checkpoints import CheckpointError, Checkpoints
from transformer_tf.config import PRESETS, TrainingConfig
from transformer_tf.model import build_transformer
from transformer_tf.training import Trainer

TINY = dataclasses.replace(
    PRESETS["tiny"].model, vocab_size=300, num_layers=1, d_model=16, d_ff=32
)
RECIPE = TrainingConfig(batch_tokens=64, warmup_steps=10, max_steps=6)


def make_model(seed=3):
    keras.utils.set_random_seed(seed)
    return build_transformer(TINY)


def make_trainer(seed=3, **changes):
    return Trainer(
        make_model(seed), dataclasses.replace(RECIPE, **changes), TINY.d_model
    )


def batches(start=0):
    """Batch number n is a function of n, as in training."""

    def generate():
        for n in range(start, 100):
            tokens = np.random.default_rng(n).integers(4, 300, (3, 4, 5))
            yield (tokens[0], tokens[1]), tokens[2]

    spec = tf.TensorSpec([None, None], tf.int32)
    return tf.data.Dataset.from_generator(
        generate, output_signature=((spec, spec), spec)
    )


def run(trainer, checkpoint):
    trainer.train(
        batches(trainer.step),
        should_stop=lambda: False,
        after_update=lambda: None,
        report=lambda progress: None,
        checkpoint=checkpoint,
        validate=lambda: None,
    )


def state_of(trainer):
    variables = [*trainer.model.variables, *trainer.optimizer.variables]
    return [v.numpy() for v in variables]


def test_resuming_equals_never_having_stopped(tmp_path):
    # Dropout is on: its states must come back too.
    whole = make_trainer()
    run(whole, lambda: None)

    first = make_trainer(max_steps=3)
    run(first, Checkpoints(tmp_path, first, keep=5).save)
    second = make_trainer(seed=99)
    assert Checkpoints(tmp_path, second, keep=5).restore()
    assert second.step == 3
    run(second, lambda: None)

    assert second.step == whole.step == 6
    for resumed, expected in zip(state_of(second), state_of(whole), strict=True):
        np.testing.assert_array_equal(resumed, expected)


@pytest.mark.parametrize(("positions", "count"), [("sinusoidal", 31), ("learned", 33)])
def test_every_weight_is_in_the_checkpoint_by_its_name(tmp_path, positions, count):
    model = build_transformer(dataclasses.replace(TINY, positions=positions))
    trainer = Trainer(model, RECIPE, TINY.d_model)
    Checkpoints(tmp_path, trainer, keep=2).save()
    names = {name for name, _ in tf.train.list_variables(str(tmp_path))}
    saved = {name.split("/")[1] for name in names if name.startswith("weights/")}
    assert len(saved) == len(trainer.model.weights) == count
    assert {"encoder-layer1-mha-qkv_kernel", "decoder-layer1-layernorm3-beta"} <= saved


def test_counters_come_back(tmp_path):
    trainer = make_trainer()
    trainer.note_validation(2.5)
    trainer.note_validation(2.75)
    Checkpoints(tmp_path, trainer, keep=2).save()
    other = make_trainer()
    Checkpoints(tmp_path, other, keep=2).restore()
    assert float(other.counters.best_loss.numpy()) == 2.5
    assert int(other.counters.since_best.numpy()) == 1


def test_nothing_to_restore_is_no_error(tmp_path):
    assert not Checkpoints(tmp_path, make_trainer(), keep=2).restore()


def test_the_newest_stay_and_are_averaged(tmp_path):
    trainer = make_trainer(max_steps=4, checkpoint_every=1)
    checkpoints = Checkpoints(tmp_path, trainer, keep=3)
    saved = []

    def save():
        checkpoints.save()
        saved.append([w.numpy() for w in trainer.model.weights])

    run(trainer, save)
    assert [path.rsplit("-", 1)[1] for path in checkpoints.paths] == ["2", "3", "4"]

    model = make_model(seed=5)
    assert checkpoints.load_average(model, last=2) == 2
    for weight, third, fourth in zip(model.weights, saved[2], saved[3], strict=True):
        np.testing.assert_allclose(weight, (third + fourth) / 2, atol=1e-7)


def damage(path):
    data = next(path.parent.glob(path.name + ".data-*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path):
    trainer = make_trainer(max_steps=2, checkpoint_every=1)
    run(trainer, Checkpoints(tmp_path, trainer, keep=2).save)
    damage(tmp_path / "ckpt-2")
    told, other = [], make_trainer()
    assert Checkpoints(tmp_path, other, keep=2).restore(told.append)
    assert other.step == 1
    assert len(told) == 1
    assert "ckpt-2" in told[0]
    assert (tmp_path / "ckpt-2.index").exists()


def test_the_files_count_and_not_what_tensorflow_noted(tmp_path):
    trainer = make_trainer(max_steps=1)
    run(trainer, Checkpoints(tmp_path, trainer, keep=2).save)
    (tmp_path / "checkpoint").unlink()
    other = make_trainer()
    assert Checkpoints(tmp_path, other, keep=2).restore()
    assert other.step == 1


def test_nothing_but_damage_is_an_error_of_one_line(tmp_path):
    trainer = make_trainer()
    Checkpoints(tmp_path, trainer, keep=2).save()
    damage(tmp_path / "ckpt-0")
    with pytest.raises(CheckpointError, match="none of the.*--fresh") as caught:
        Checkpoints(tmp_path, make_trainer(), keep=2).restore()
    assert "\n" not in str(caught.value)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    place = tmp_path / "checkpoints"
    checkpoints = Checkpoints(place, make_trainer(), keep=2)
    place.rmdir() if place.exists() else None
    place.write_text("a file in the way")
    with pytest.raises(CheckpointError, match="cannot write.*checkpoints"):
        checkpoints.save()
