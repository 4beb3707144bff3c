"""Who takes part? One device, several of a machine, or several machines.

`tf.distribute` does the work: MirroredStrategy on the GPUs of one machine,
MultiWorkerMirroredStrategy where TF_CONFIG names several. Every worker runs the same
command and keeps the same weights; the chief alone writes. The run directory is on a
disk that all of them see.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformer_tf.config import ConfigError

EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


class WorkerLostError(Exception):
    """Another worker has ended or cannot be reached: no update can be finished."""

    exit_code = 6


class Task(NamedTuple):
    """The part of this process in a cluster."""

    index: int  # 0 is the chief
    workers: int


def read_task(strategy: str) -> Task:
    """What TF_CONFIG says, if the strategy is to heed it; else the only worker.

    Raises:
        ConfigError: several workers are wanted and TF_CONFIG does not name them.
    """
    text = os.environ.get("TF_CONFIG", "")
    if strategy in ("none", "mirrored") or (strategy == "auto" and not text):
        return Task(0, 1)
    try:
        config = json.loads(text)
        workers, task = config["cluster"]["worker"], config["task"]
        if set(config["cluster"]) != {"worker"} or task["type"] != "worker":
            raise ValueError
        index = int(task["index"])
        if not isinstance(workers, list) or not 0 <= index < len(workers):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"TF_CONFIG is {text!r}, expected workers, the first of them the chief, "
            f"and which one this is, as {EXAMPLE}"
        ) from None
    return Task(index, len(workers))


class Cluster:
    """The processes and devices of a run.

    Made before anything else touches TensorFlow: the workers find each other here, and
    wait until all are there.

    Attributes:
        strategy: of `tf.distribute`; variables are made in its scope.
        is_chief: whether this process writes.

    Args:
        strategy: auto, none, mirrored or multi_worker. auto takes all GPUs of the
            machine, and the machines that TF_CONFIG names.

    Raises:
        ConfigError: TF_CONFIG is missing or wrong.
    """

    def __init__(self, strategy: str = "auto"):
        task = read_task(strategy)
        self.workers = task.workers
        self.is_chief = task.index == 0
        import tensorflow as tf

        if task.workers > 1:
            self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        elif strategy == "mirrored" or (
            strategy == "auto" and len(tf.config.list_logical_devices("GPU")) > 1
        ):
            kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
            devices = [device.name for device in tf.config.list_logical_devices(kind)]
            self.strategy = tf.distribute.MirroredStrategy(devices)
        else:
            self.strategy = tf.distribute.get_strategy()
        self.replicas = self.strategy.num_replicas_in_sync
        self._gather = tf.function(
            lambda value: self.strategy.run(self._gathered, (value,)),
            input_signature=[tf.TensorSpec([], tf.int64)],
        )

    def distribute(self, batches: Any, *position: int | None) -> Any:
        """The batches of `Batches.dataset(*position)`; each worker makes its rows."""

        def of_worker(context):
            replicas = context.num_replicas_in_sync
            local = replicas // context.num_input_pipelines
            first = context.input_pipeline_id * local
            return batches.dataset(
                *position, replicas=range(first, first + local), of=replicas
            )

        return self.strategy.distribute_datasets_from_function(of_worker)

    def gather(self, value: int) -> list[int]:
        """The values that all workers bring; waits for the last of them."""
        if self.workers == 1:
            return [value]
        values = self.strategy.experimental_local_results(self._gather(value))[0]
        return values.numpy().tolist()[:: self.replicas // self.workers]

    def _gathered(self, value):
        """Runs on each replica: a row with the value of each."""
        import tensorflow as tf

        replica = tf.distribute.get_replica_context()
        place = tf.one_hot(
            replica.replica_id_in_sync_group, self.replicas, dtype=tf.int64
        )
        return replica.all_reduce("SUM", place * value)

    def any(self, flag: bool) -> bool:
        """Whether any worker says yes."""
        return any(self.gather(int(flag)))

    @contextlib.contextmanager
    def chief_first(self) -> Iterator[None]:
        """What the chief does inside is done when the others come to it."""
        if not self.is_chief:
            self.gather(0)
        yield
        if self.is_chief:
            self.gather(0)

    def check_agreement(self, what: str, value: Any) -> None:
        """Raises ConfigError unless all workers bring the same value."""
        found = self.gather(zlib.crc32(repr(value).encode()))
        if len(set(found)) > 1:
            raise ConfigError(
                f"the workers do not agree on {what} (here: {value}), expected the "
                "same command on all, and an --output_dir that all of them see"
            )

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Turns the errors of a collective operation into one that says what it means.

        Raises:
            WorkerLostError: another worker does not answer.
        """
        import tensorflow as tf

        lost = (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.DeadlineExceededError,
        )
        try:
            yield
        except lost as error:
            if self.workers == 1:
                raise
            raise WorkerLostError(
                f"another worker was lost ({type(error).__name__}); the same command "
                "on all of them goes on from the last checkpoint"
            ) from error
