"""Where does a run keep what? Its directory, its settings, its metrics, its log."""

import json
import os
import shutil
import sys
from pathlib import Path

import yaml
from tqdm import tqdm

from transformer_tf.config import ConfigError

# What may change between two sittings of a run: it does not alter the past.
FREE_FIELDS = {
    "max_steps",
    "max_minutes",
    "log_every",
    "validate_every",
    "checkpoint_every",
    "keep_checkpoints",
    "average_checkpoints",
    "patience",
    "validation_sentences",
    "beam_size",
    "length_penalty",
    "extra_length",
    "data_dir",
    "manual_dir",
}


class RunDirectory:
    """The files of a run: config.yaml, run.json, vocab.model, checkpoints/, ids/,
    metrics.csv, log/ (TensorBoard), test/, export/1/.

    Args:
        path: the directory; made if it does not exist.
        settings: every field by name, as config.yaml keeps them.
        fresh: remove the run that is there.

    Raises:
        ConfigError: the directory cannot be written to, or holds a run that began with
            other settings.
    """

    def __init__(self, path: Path, settings: dict, fresh: bool = False):
        self.path = path
        self.vocabulary = self.path / "vocab.model"
        self.checkpoints = self.path / "checkpoints"
        self.ids = self.path / "ids"
        self.log = self.path / "log"
        self.test = self.path / "test"
        self.export = self.path / "export" / "1"
        self.metrics = Metrics(self.path / "metrics.csv")
        try:
            if fresh and (self.path / "config.yaml").exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim(settings)
        except OSError as error:
            raise ConfigError(
                f"cannot write to --output_dir {self.path}: {error.strerror}; "
                "name a directory that you may write to"
            ) from error

    def _claim(self, wanted: dict) -> None:
        """Writes config.yaml, or checks that the one there says the same."""
        path = self.path / "config.yaml"
        if path.exists():
            saved = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            difference = [
                f"{key} {saved.get(key)!r} there, {value!r} now"
                for key, value in wanted.items()
                if key not in FREE_FIELDS and saved.get(key) != value
            ]
            if difference:
                raise ConfigError(
                    f"{self.path} holds a run with another configuration "
                    f"({'; '.join(difference)}); give the same flags to go on, another "
                    "--output_dir, or --fresh to remove it"
                )
        write_text(path, yaml.safe_dump(wanted, sort_keys=False, allow_unicode=True))

    def note(self, **facts) -> None:
        """Adds facts about the run to run.json."""
        path = self.path / "run.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        write_text(path, json.dumps({**known, **facts}, indent=1, ensure_ascii=False))


class Metrics:
    """metrics.csv: one line for each validation."""

    HEADER = "step,minutes,learning_rate,train_loss,validation_loss,bleu,chrf"

    def __init__(self, path: Path):
        self.path = path

    def rewind(self, step: int) -> None:
        """Forgets the lines after `step`, which will be written again."""
        lines = [self.HEADER]
        if self.path.exists():
            lines += self.path.read_text().splitlines()[1:]
        kept = [line for line in lines[1:] if int(line.split(",")[0]) <= step]
        write_text(self.path, "\n".join([self.HEADER, *kept]) + "\n")

    def add(self, *values: float) -> None:
        with open(self.path, "a") as file:
            file.write(",".join(f"{value:.6g}" for value in values) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def log(message: str) -> None:
    """A line on standard output, above the bar if there is one."""
    tqdm.write(message)
    sys.stdout.flush()
