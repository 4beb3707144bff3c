import dataclasses
import os
import resource
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from transformer_tf import checkpoints as checkpoints_module
from transformer_tf.checkpoints import CheckpointError, Checkpoints, load_average
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


@pytest.mark.parametrize(("positions", "count"), [("sinusoidal", 33), ("learned", 35)])
def test_every_weight_is_in_the_checkpoint_by_its_name(tmp_path, positions, count):
    model = build_transformer(dataclasses.replace(TINY, positions=positions))
    trainer = Trainer(model, RECIPE, TINY.d_model)
    Checkpoints(tmp_path, trainer, keep=2).save()
    names = {name for name, _ in tf.train.list_variables(str(tmp_path / "ckpt-0"))}
    saved = {name.split("/")[1] for name in names if name.startswith("weights/")}
    assert len(saved) == len(trainer.model.weights) == count
    assert {"encoder-layer1-mha-qkv_kernel", "decoder-layer1-layernorm3-beta"} <= saved
    assert "decoder-layer1-cross_mha-kv_kernel" in saved


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
    assert load_average(tmp_path, model, last=2) == 2
    for weight, third, fourth in zip(model.weights, saved[2], saved[3], strict=True):
        np.testing.assert_allclose(weight, (third + fourth) / 2, atol=1e-7)


def two_checkpoints(directory):
    trainer = make_trainer(max_steps=2, checkpoint_every=1)
    run(trainer, Checkpoints(directory, trainer, keep=2).save)


def data_of(path):
    return next(path.parent.glob(path.name + ".data-*"))


def truncate(path, share):
    os.truncate(path, int(path.stat().st_size * share))


def flip(path, share):
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 1
    path.write_bytes(content)


def index_of(path):
    return path.with_suffix(".index")


DAMAGES = {"no data": lambda path: data_of(path).unlink()}
for kind, file_of in {"data": data_of, "index": index_of}.items():
    for x in (0, 0.25, 0.5, 0.99):
        DAMAGES[f"{kind} cut at {x}"] = lambda p, f=file_of, x=x: truncate(f(p), x)
    for x in np.arange(16) / 16:
        DAMAGES[f"a bit of the {kind} at {x}"] = lambda p, f=file_of, x=x: flip(f(p), x)


def test_every_damage_is_found_and_named_and_what_is_damaged_stays(tmp_path):
    two_checkpoints(tmp_path / "whole")
    other = make_trainer()
    for number, (name, damage) in enumerate(DAMAGES.items()):
        place = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", place)
        damage(place / "ckpt-2")
        sizes = sorted(f.stat().st_size for f in place.glob("ckpt-2.*"))
        told, checkpoints = [], Checkpoints(place, other, keep=2)
        assert checkpoints.restore(told.append), name
        assert other.step == 1, name
        assert len(told) == 1, name
        assert "ckpt-2" in told[0], name
        aside = sorted(f.stat().st_size for f in place.glob("damaged-ckpt-2.*"))
        assert aside == sizes, name
        assert [path.rsplit("-")[-1] for path in checkpoints.paths] == ["1"], name


def test_a_checkpoint_without_an_index_is_none(tmp_path):
    # As a save leaves it that is broken off.
    two_checkpoints(tmp_path)
    (tmp_path / "ckpt-2.index").unlink()
    other = make_trainer()
    assert Checkpoints(tmp_path, other, keep=2).restore()
    assert other.step == 1


def test_older_ones_go_only_when_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    two_checkpoints(tmp_path)
    trainer = make_trainer()
    checkpoints = Checkpoints(tmp_path, trainer, keep=1)
    checkpoints.restore()
    trainer.counters.updates.assign(3)
    synced = []

    def sync(path):
        synced.append(path.name)
        assert (tmp_path / "ckpt-1.index").exists()

    monkeypatch.setattr(checkpoints_module, "_sync", sync)
    checkpoints.save()
    assert synced[0] == "ckpt-3.index"
    assert "ckpt-3.data-00000-of-00001" in synced
    assert synced[-1] == tmp_path.name
    assert sorted(f.suffix for f in tmp_path.glob("ckpt-*")) == [
        ".data-00000-of-00001",
        ".index",
    ]


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path):
    two_checkpoints(tmp_path)
    trainer = make_trainer()
    checkpoints = Checkpoints(tmp_path, trainer, keep=2)
    checkpoints.restore()
    trainer.counters.updates.assign(3)
    size = data_of(tmp_path / "ckpt-2").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match="cannot write the checkpoint.*ckpt-3"
        ):
            checkpoints.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    other = make_trainer()
    assert Checkpoints(tmp_path, other, keep=2).restore()
    assert other.step == 2


def test_nothing_but_damage_is_an_error_of_one_line(tmp_path):
    trainer = make_trainer()
    Checkpoints(tmp_path, trainer, keep=2).save()
    flip(data_of(tmp_path / "ckpt-0"), 0.5)
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
