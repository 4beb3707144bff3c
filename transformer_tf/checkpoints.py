"""What survives a crash: the state of a run, whole or not at all.

A checkpoint holds weights, optimizer, counters and the states that dropout draws from;
the position in the data is the number of finished updates, so the same command goes on
where the last checkpoint was made. Paper, section 6.1, for the averaging.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from transformer_tf.training import Trainer


class CheckpointError(OSError):
    """A checkpoint could not be written or read; the message names the path."""

    exit_code = 5


class Checkpoints:
    """The numbered checkpoints of a run directory, the newest `keep` of them.

    Args:
        directory: where they lie.
        trainer: whose state they hold.
        keep: how many stay on disk.
    """

    def __init__(self, directory: Path, trainer: Trainer, keep: int):
        self.directory = Path(directory)
        self.trainer = trainer
        self.checkpoint = tf.train.Checkpoint(
            weights=_named_weights(trainer.model),
            optimizer=trainer.optimizer,
            counters=trainer.counters,
            dropout=trainer.update.dropout_states(),
        )
        self.keep = keep

    @property
    def paths(self) -> list[str]:
        return checkpoint_paths(self.directory)

    def save(self) -> None:
        """Writes the current state, then removes what is older than the newest `keep`.

        Raises:
            CheckpointError: the disk is full, the directory not writable, …
        """
        path = self.directory / f"ckpt-{self.trainer.step}"
        try:
            # The index comes last: a save that is broken off has none.
            self.checkpoint.write(str(path))
            for file in self._files(path):
                _sync(file)
            _sync(self.directory)
            for old in self.paths[: -self.keep]:
                for file in self._files(Path(old)):
                    file.unlink()
        except (tf.errors.OpError, OSError) as error:
            raise CheckpointError(
                f"cannot write the checkpoint {path}: {_first_line(error)}; make room "
                "or name another --output_dir; the same command goes on from the "
                "checkpoint before"
            ) from error

    def _files(self, path: Path) -> list[Path]:
        """The index of a checkpoint first: without it the rest counts for nothing."""
        data = sorted(self.directory.glob(f"{path.name}.data-*"))
        return [path.with_name(f"{path.name}.index"), *data]

    def restore(self, report: Callable[[str], None] = print) -> bool:
        """Takes up the newest checkpoint that can be read; False if there is none.

        One that cannot is set aside under another name, so that no later one takes its
        place: it may be all that is left of a month.

        Args:
            report: told which ones were passed over, and why.

        Raises:
            CheckpointError: there are some, and none can be read.
        """
        unreadable: list[Path] = []
        for path in reversed(self.paths):
            try:
                _read(self.checkpoint, path)
            except CheckpointError as error:
                unreadable.append(Path(path))
                report(f"passed over: {error}")
            else:
                for damaged in unreadable:
                    self._set_aside(damaged)
                return True
        if unreadable:
            raise CheckpointError(
                f"none of the checkpoints in {self.directory} can be read; "
                "begin anew with --fresh"
            )
        return False

    def _set_aside(self, path: Path) -> None:
        for file in self._files(path):
            file.rename(file.with_name(f"damaged-{file.name}"))


def checkpoint_paths(directory: Path) -> list[str]:
    """Oldest first, by the files there; a list beside them could be damaged."""
    numbered = {
        int(match[1]): str(path.with_suffix(""))
        for path in Path(directory).glob("ckpt-*.index")
        if (match := re.fullmatch(r"ckpt-(\d+)\.index", path.name))
    }
    return [numbered[number] for number in sorted(numbered)]


def load_average(directory: Path, model: keras.Model, last: int) -> int:
    """Sets a model's weights to the mean over the newest `last` checkpoints (6.1).

    Returns:
        How many there were to average.

    Raises:
        CheckpointError: there is none, or one cannot be read.
    """
    paths = checkpoint_paths(directory)[-last:]
    if not paths:
        raise CheckpointError(
            f"no checkpoint in {directory}, expected those of a run; `python train.py` "
            "makes them"
        )
    reader = tf.train.Checkpoint(weights=_named_weights(model))
    total = [np.zeros(w.shape, np.float64) for w in model.weights]
    for path in paths:
        _read(reader, path)
        for mean, weight in zip(total, model.weights, strict=True):
            mean += weight.numpy() / len(paths)
    for mean, weight in zip(total, model.weights, strict=True):
        weight.assign(mean.astype(np.float32))
    return len(paths)


def _read(checkpoint: tf.train.Checkpoint, path: str) -> None:
    try:
        status = checkpoint.read(path)
        status.assert_existing_objects_matched()
        status.expect_partial()
    except (tf.errors.OpError, AssertionError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {_first_line(error)}"
        ) from error


def _named_weights(model: keras.Model) -> dict[str, tf.Variable]:
    """Every weight by the names of its layers, as encoder-layer1-mha-qkv_kernel.

    `tf.train.Checkpoint(model=model)` would pass over layers that Keras 3 keeps in
    lists, and not say so.
    """
    names = [weight.path.split("/", 1)[1].replace("/", "-") for weight in model.weights]
    named = dict(zip(names, (weight.value for weight in model.weights), strict=True))
    assert len(named) == len(model.weights), "two weights share a name"
    return named


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return str(getattr(error, "message", error)).strip().split("\n")[0][:300]
