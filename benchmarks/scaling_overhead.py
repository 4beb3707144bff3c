"""What does a second replica cost? Updates of two against those of one.

    python benchmarks/scaling_overhead.py [--preset small] [--tokens 2048]

Each replica has one core and the same share of the work, so that two should take as
long as one: the ratio is what exchanging and adding up gradients costs, and what two
cores take from each other (memory, clock). Two replicas are two processes under
MultiWorkerMirroredStrategy, over loopback, or two devices of one process under
MirroredStrategy. On the clock, medians, XLA off.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LENGTH = 16  # tokens of each sentence


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=int, default=2048, help="of each replica")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(statistics.median(seconds_of_updates(options)))
        return
    for name, two in (
        ("two workers", lambda: max(run_workers(2))),
        ("two devices", lambda: max(run_workers(1, devices=2))),
    ):
        turns = [(max(run_workers(1)), two()) for _ in range(3)]
        one, both = map(statistics.median, zip(*turns, strict=True))
        print(
            f"{name}: {both:.3f} s an update of 2 x {options.tokens:,} tokens, one "
            f"replica {one:.3f} s, ratio {both / one:.2f}",
            flush=True,
        )


def run_workers(workers: int, devices: int = 1) -> list[float]:
    """Seconds of an update, from each of so many processes with a core each."""
    ports = []
    for _ in range(workers):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    for index in range(workers):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        mine = cores[index : index + 1] if devices == 1 else cores[:devices]
        processes.append(
            subprocess.Popen(
                [sys.executable, *sys.argv, "--child", "--devices", str(devices)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TF_CONFIG": json.dumps(task)},
                preexec_fn=lambda cores=mine: os.sched_setaffinity(0, cores),
            )
        )
    return [float(process.communicate()[0].split()[-1]) for process in processes]


def seconds_of_updates(options: argparse.Namespace) -> list[float]:
    """Seconds of each update but the first, which traces."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    if options.devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        several = [tf.config.LogicalDeviceConfiguration()] * options.devices
        tf.config.set_logical_device_configuration(cpu, several)
    from transformer_tf.cluster import Cluster
    from transformer_tf.config import PRESETS
    from transformer_tf.model import build_transformer
    from transformer_tf.training import Trainer

    cluster = Cluster("mirrored" if options.devices > 1 else "auto")
    size = PRESETS[options.preset].model
    with cluster.strategy.scope():
        model = build_transformer(size)
        trainer = Trainer(model, PRESETS[options.preset].training, size.d_model)
    rows = options.tokens // LENGTH
    ids = tf.random.uniform((rows, LENGTH), 4, size.vocab_size, tf.int32)
    batches = tf.data.Dataset.from_tensors(((ids, ids), ids)).repeat()
    shared = cluster.strategy.distribute_datasets_from_function(lambda _: batches)
    shared, seconds = iter(shared), []
    for _ in range(options.repeats + 1):
        start = time.monotonic()
        trainer.update(shared, apply=True)
        _ = trainer.step  # waits for it
        seconds.append(time.monotonic() - start)
    return seconds[1:]


if __name__ == "__main__":
    main()
