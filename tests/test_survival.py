"""A run that is killed, again and again, ends as one that nobody disturbed."""

import csv
import random
import time

import made_up_corpus
import numpy as np
import pytest
import tensorflow as tf
from commands import FAST, data_flags, read_until, refused, start, train, words

UPDATES = 60
# A checkpoint after each update: about half of the time goes into saving.
SCHEDULE = (
    f"--max_steps {UPDATES} --checkpoint_every 1 --keep_checkpoints 3 "
    "--average_checkpoints 2 --log_every 1 --validate_every 20 "
    "--validation_sentences 4"
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    corpus = made_up_corpus.write(tmp_path_factory.mktemp("corpus"))
    return [*data_flags(corpus), *words(FAST), *words(SCHEDULE)]


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    result = train(*flags, "--output_dir", directory)
    assert result.returncode == 0, result.stderr
    return directory


def state_of(directory):
    """All that the last checkpoint holds, but for the time that passed."""
    reader = tf.train.load_checkpoint(
        str(directory / "checkpoints" / f"ckpt-{UPDATES}")
    )
    names = reader.get_variable_to_shape_map()
    state = {name: reader.get_tensor(name) for name in names}
    state.pop("counters/seconds/.ATTRIBUTES/VARIABLE_VALUE")
    state.pop("_CHECKPOINTABLE_OBJECT_GRAPH")
    assert len(state) > 60
    return state


def metrics_of(directory):
    with open(directory / "metrics.csv") as file:
        return [{**row, "minutes": None} for row in csv.DictReader(file)]


def kill_at_random(flags, kills, seed):
    """Starts the command, kills it in the middle of something, starts it again …"""
    choose = random.Random(seed)
    for _ in range(kills):
        process = start(*flags)
        for _ in range(choose.randint(1, 2)):
            read_until(process, "update ")
        time.sleep(choose.uniform(0, 0.1))
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(flags, undisturbed, tmp_path, kills):
    directory = tmp_path / "run"
    flags = [*flags, "--output_dir", directory]
    kill_at_random(flags, kills, seed=kills)
    result = train(*flags)
    assert result.returncode == 0, result.stderr
    assert "going on after update" in result.stdout
    whole, resumed = state_of(undisturbed), state_of(directory)
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    assert metrics_of(directory) == metrics_of(undisturbed)


def test_an_absurd_rate_diverges_and_leaves_sound_checkpoints(flags, tmp_path):
    directory = tmp_path / "run"
    absurd = words("--learning_rate_scale 1000 --warmup_steps 1 --max_steps 1000")
    result = train(*flags, *absurd, "--output_dir", directory)
    refused(result, 4, "diverged at update", "--learning_rate_scale")
    for path in (directory / "checkpoints").glob("*.index"):
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        for name in reader.get_variable_to_shape_map():
            if name.startswith(("weights", "optimizer")):
                assert np.isfinite(reader.get_tensor(name)).all(), name


def test_a_run_that_does_not_learn_is_given_a_hint(flags, tmp_path):
    # The rate falls so soon that nothing is learnt in 20 updates.
    slow = words("--learning_rate_scale 0.0001 --warmup_steps 5 --max_steps 20")
    result = train(*flags, *slow, "--output_dir", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "hint: after the warm-up a loss of " in result.stdout
