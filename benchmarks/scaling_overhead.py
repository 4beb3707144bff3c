"""What does a second replica cost? Updates of two devices against those of one.

    python benchmarks/scaling_overhead.py [--preset small] [--tokens 2048]

Each device has one core and the same share of the work, so that two should take as long
as one: the ratio is what exchanging and adding up gradients costs, and what two cores
take from each other (memory, clock). Measured in turns, on the clock, the median of
`--repeats`; XLA off.
"""

import argparse
import os
import statistics
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
    parser.add_argument("--tokens", type=int, default=2048, help="of each device")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    updates = {n: update_of(n, options.preset, options.tokens) for n in (1, 2)}
    seconds = {n: [] for n in updates}
    for _ in range(options.repeats + 1):
        for replicas, update in updates.items():
            start = time.monotonic()
            update()
            seconds[replicas].append(time.monotonic() - start)
    # The first turn traced.
    medians = {n: statistics.median(times[1:]) for n, times in seconds.items()}
    for replicas, times in seconds.items():
        print(
            f"{replicas} x {options.tokens:,} tokens: {medians[replicas]:.3f} s an "
            f"update [{min(times[1:]):.3f}..{max(times[1:]):.3f}]"
        )
    print(f"ratio {medians[2] / medians[1]:.3f}")


def update_of(replicas: int, preset: str, tokens: int):
    """A function that makes one update of a model on so many devices."""
    import tensorflow as tf

    from transformer_tf.config import PRESETS
    from transformer_tf.model import build_transformer
    from transformer_tf.training import Trainer

    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(devices[:replicas])
    size = PRESETS[preset].model
    with strategy.scope():
        model = build_transformer(size)
        trainer = Trainer(model, PRESETS[preset].training, size.d_model)
    rows = replicas * tokens // LENGTH
    ids = tf.random.uniform((rows, LENGTH), 4, size.vocab_size, tf.int32)
    batches = tf.data.Dataset.from_tensors(((ids, ids), ids)).repeat()
    shared = iter(strategy.experimental_distribute_dataset(batches))

    def update() -> None:
        trainer.update(shared, apply=True)
        trainer.update.counters.updates.numpy()  # waits for it

    return update


if __name__ == "__main__":
    main()
