"""Several replicas, several workers: the same run as one that computes alone.

The workers are processes of this machine; they find each other through loopback ports.
"""

import csv
import json
import os
import signal
import socket
import subprocess
import sys

import made_up_corpus
import numpy as np
import pytest
import tensorflow as tf
from commands import FAST, ROOT, data_flags, read_until, words

UPDATES = 50
RECIPE = (
    f"--max_steps {UPDATES} --validate_every 25 --checkpoint_every 5 --log_every 5 "
    "--validation_sentences 4 --precision float32"
)
# `train.py` where TensorFlow sees two devices: one for each of two replicas.
TWO_DEVICES = """
import sys
import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
import train

sys.exit(train.main(sys.argv[1:]))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    corpus = made_up_corpus.write(tmp_path_factory.mktemp("corpus"))
    return [*data_flags(corpus), *words(FAST), *words(RECIPE)]


def start(*arguments, script=(str(ROOT / "train.py"),), **environment):
    return subprocess.Popen(
        [sys.executable, *script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )


def end(process, code=0):
    out, error = process.communicate(timeout=240)
    assert process.returncode == code, out + error
    return out, error


def start_workers(*arguments, others=()):
    """Two processes that run the same command; the first one is the chief.

    The second one has `others` in addition.
    """
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    tasks = ({"type": "worker", "index": index} for index in range(2))
    configs = (json.dumps({"cluster": cluster, "task": task}) for task in tasks)
    added = ((), others)
    return [
        start(*arguments, *more, TF_CONFIG=config)
        for config, more in zip(configs, added, strict=True)
    ]


def weights_of(run, step=UPDATES):
    reader = tf.train.load_checkpoint(str(run / "checkpoints" / f"ckpt-{step}"))
    names = [n for n in reader.get_variable_to_shape_map() if n.startswith("weights/")]
    # A key's bias moves all scores of a row alike, so that no share and no loss depends
    # on it: its gradient is rounding, which Adam makes as large as any other.
    return {name: reader.get_tensor(name) for name in names if "kv_bias" not in name}


def metrics_of(run):
    with open(run / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    names = ("step", "train_loss", "validation_loss")
    return np.array([[float(row[name]) for name in names] for row in rows])


def losses_in(printed):
    return [line.split()[3] for line in printed.splitlines() if " rate " in line]


def assert_same(run, other, atol):
    np.testing.assert_allclose(metrics_of(run), metrics_of(other), atol=1e-5)
    ours, theirs = weights_of(run), weights_of(other)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        np.testing.assert_allclose(weight, theirs[name], atol=atol, err_msg=name)


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    out, _ = end(start(*flags, "--dropout_rate", 0, "--output_dir", run))
    return run, out


@pytest.fixture(scope="module")
def workers(flags, tmp_path_factory):
    run = tmp_path_factory.mktemp("workers") / "run"
    arguments = [*flags, "--dropout_rate", 0, "--output_dir", run]
    return run, [end(process)[0] for process in start_workers(*arguments)]


def test_two_devices_learn_as_one(flags, alone, tmp_path):
    expected, printed = alone
    run = tmp_path / "run"
    arguments = [*flags, "--dropout_rate", 0, "--output_dir", run]
    script = ("-c", TWO_DEVICES)
    out, _ = end(start(*arguments, "--strategy", "mirrored", script=script))
    assert "replicas: 2\n" in out
    assert losses_in(out) == losses_in(printed)
    assert_same(run, expected, atol=1e-6)


def test_two_workers_learn_as_one(alone, workers):
    expected, printed = alone
    run, (chief, worker) = workers
    assert "workers: 2\n" in chief and "workers: 2\n" in worker
    assert losses_in(chief) == losses_in(printed)
    assert_same(run, expected, atol=1e-6)
    # Both end with the same weights, and one of them alone wrote.
    ends = [
        out[out.index("weights after update") :].split("\n")[0] for out in workers[1]
    ]
    assert ends[0] == ends[1]
    assert f"weights after update {UPDATES}: " in ends[0]
    assert "saved " in chief and "saved " not in worker


@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_a_lost_worker_ends_the_others_and_the_same_command_goes_on(
    flags, tmp_path, victim
):
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    for process in (processes := start_workers(*flags, "--output_dir", undisturbed)):
        end(process)
    processes = start_workers(*flags, "--output_dir", run)
    read_until(processes[0], "update 15")
    processes[victim].send_signal(signal.SIGKILL)
    processes[victim].communicate()
    _, error = end(processes[1 - victim], code=6)
    [line] = [x for x in error.splitlines() if x.startswith("train.py: ")]
    assert "another worker was lost" in line and "the same command" in line
    assert "Traceback" not in error
    for process in (processes := start_workers(*flags, "--output_dir", run)):
        end(process)
    ours, theirs = weights_of(run), weights_of(undisturbed)
    for name, weight in theirs.items():
        np.testing.assert_array_equal(ours[name], weight, err_msg=name)
    assert (metrics_of(run) == metrics_of(undisturbed)).all()


def test_told_to_stop_all_workers_stop_together(flags, tmp_path):
    run = tmp_path / "run"
    processes = start_workers(*flags, "--output_dir", run, "--max_steps", 5000)
    read_until(processes[0], "update 15")
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        out, _ = end(process, code=143)
        assert "stopped after update" in out
    assert (run / "export" / "1" / "saved_model.pb").exists()


def test_workers_that_do_not_agree_are_refused(flags, tmp_path):
    run = tmp_path / "run"
    processes = start_workers(*flags, "--output_dir", run, others=["--seed", "2"])
    for process in processes:
        _, error = end(process, code=2)
        assert "train.py: the workers do not agree on the flags" in error
    assert not (run / "config.yaml").exists()
