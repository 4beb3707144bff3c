"""Who takes part, as TF_CONFIG says; for several workers see test_scale_out.py."""

import json

import pytest
import tensorflow as tf

from transformer_tf.cluster import Cluster, Task, WorkerLostError, read_task
from transformer_tf.config import ConfigError

TWO = {"worker": ["a:1", "b:1"]}


def config_of(cluster, task):
    return json.dumps({"cluster": cluster, "task": task})


def test_the_part_of_this_process(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert read_task("auto") == Task(0, 1)
    second = config_of(TWO, {"type": "worker", "index": 1})
    monkeypatch.setenv("TF_CONFIG", second)
    assert read_task("auto") == read_task("multi_worker") == Task(1, 2)
    assert read_task("none") == read_task("mirrored") == Task(0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        config_of(TWO, {"type": "worker", "index": 2}),
        config_of(TWO, {"type": "worker", "index": -1}),
        config_of(TWO, {"type": "ps", "index": 0}),
        config_of({"worker": "a:1"}, {"type": "worker", "index": 0}),
        config_of({**TWO, "ps": ["c:1"]}, {"type": "worker", "index": 0}),
        config_of({"chief": ["a:1"]}, {"type": "chief", "index": 0}),
    ],
)
def test_what_names_no_workers_is_refused(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ConfigError, match="TF_CONFIG is .*, expected workers"):
        read_task("multi_worker")


def test_alone_nobody_is_waited_for(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster = Cluster("auto")
    assert cluster.strategy is tf.distribute.get_strategy()
    assert (cluster.replicas, cluster.workers, cluster.is_chief) == (1, 1, True)
    assert cluster.gather(7) == [7]
    assert cluster.any(True) and not cluster.any(False)
    cluster.check_agreement("anything", "x")
    with cluster.chief_first():
        pass
    # What fails here is no worker's loss.
    with pytest.raises(tf.errors.UnavailableError), cluster.watch():
        raise tf.errors.UnavailableError(None, None, "a disk")


def test_mirrored_takes_every_device():
    cluster = Cluster("mirrored")
    assert cluster.replicas == len(tf.config.list_logical_devices("CPU")) >= 2
    assert cluster.workers == 1
    assert cluster.gather(7) == [7]


class Rows:
    """Stands in for `Batches`: says which rows it is asked for."""

    def dataset(self, start, epochs, *, replicas, of):
        self.asked = (start, epochs, list(replicas), of)
        numbers = [10 * start + replica for replica in replicas]
        return tf.data.Dataset.from_tensor_slices(numbers)


def test_each_replica_gets_its_rows():
    cluster, rows = Cluster("mirrored"), Rows()
    batches = iter(cluster.distribute(rows, 3, 1))
    parts = cluster.strategy.experimental_local_results(next(batches))
    assert rows.asked == (3, 1, list(range(cluster.replicas)), cluster.replicas)
    assert [int(part) for part in parts] == [30 + i for i in range(cluster.replicas)]


def test_a_lost_worker_is_told_from_other_trouble(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    cluster = Cluster("none")
    cluster.workers = 2
    with (
        pytest.raises(WorkerLostError, match="the same command") as caught,
        cluster.watch(),
    ):
        raise tf.errors.UnavailableError(None, None, "reset by peer")
    assert caught.value.exit_code == 6
    with pytest.raises(tf.errors.ResourceExhaustedError), cluster.watch():
        raise tf.errors.ResourceExhaustedError(None, None, "memory")
