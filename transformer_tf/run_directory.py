"""Where does a run keep what? Its directory, its settings, its metrics, its log."""

import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from transformer_tf.config import ConfigError

# What may change between two sittings of a run: it does not alter the past.
FREE_FIELDS = {
    "strategy",
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

    Made, it only looks and locks; `begin` writes.

    Args:
        path: the directory; made if it does not exist.
        settings: every field by name, as config.yaml keeps them.
        fresh: whether `begin` removes the run that is there.
        writes: False for the workers beside the chief: they only read, and what would
            write does nothing.

    Raises:
        ConfigError: the directory cannot be written to, is in use by another process,
            or holds a run that has learnt something with other settings.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        fresh: bool = False,
        writes: bool = True,
    ):
        self.path = path
        self.settings = settings
        self.writes = writes
        self.config = path / "config.yaml"
        self.facts = path / "run.json"
        self.vocabulary = path / "vocab.model"
        self.checkpoints = path / "checkpoints"
        self.ids = path / "ids"
        self.log = path / "log"
        self.test = path / "test"
        self.export = path / "export" / "1"
        self.metrics = Metrics(path / "metrics.csv")
        if not writes:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / "lock", "w")  # noqa: SIM115  held while we live
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path} is in use by another train.py; wait for it to end, or name "
                "another --output_dir"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot write to --output_dir {path}: {error.strerror}; "
                "name a directory that you may write to"
            ) from error
        difference = self._difference()
        # A run without a checkpoint has nothing to lose: its settings may be mended.
        self._begin_anew = fresh or bool(difference)
        if difference and not fresh and self.has_checkpoint():
            raise ConfigError(
                f"{path} holds a run with another configuration "
                f"({'; '.join(difference)}); give the same flags to go on, another "
                "--output_dir, or --fresh to remove it"
            )

    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("*.index"))

    def begin(self) -> None:
        """Removes the run that was there if it is not to go on; keeps the settings."""
        if not self.writes:
            return
        if self._begin_anew:
            for path in (self.checkpoints, self.ids, self.log, self.test):
                shutil.rmtree(path, ignore_errors=True)
            shutil.rmtree(self.export.parent, ignore_errors=True)
            for path in (self.facts, self.vocabulary, self.metrics.path):
                path.unlink(missing_ok=True)
        write_settings(self.config, self.settings)

    def known_facts(self) -> dict[str, Any]:
        """What run.json holds; nothing if it cannot be read."""
        try:
            facts = json.loads(self.facts.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def note(self, **facts: Any) -> None:
        """Adds facts about the run to run.json."""
        if not self.writes:
            return
        facts = {**self.known_facts(), **facts}
        write_text(self.facts, json.dumps(facts, indent=1, ensure_ascii=False))

    def check_unchanged(self, **facts: Any) -> None:
        """Raises ConfigError if run.json says otherwise and something was learnt."""
        known = self.known_facts()
        for name, value in facts.items():
            if self.has_checkpoint() and known.get(name, value) != value:
                raise ConfigError(
                    f"{name} of {self.path} has changed ({known[name]} there, {value} "
                    "now); bring back what it was, or --fresh to begin anew"
                )

    def _difference(self) -> list[str]:
        try:
            saved = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            return [f"{self.config} cannot be read: {error}"]
        if not isinstance(saved, dict):
            return [f"{self.config} holds no settings"]
        return [
            f"{key} {saved.get(key)!r} there, {value!r} now"
            for key, value in self.settings.items()
            if key not in FREE_FIELDS and saved.get(key) != value
        ]


class Metrics:
    """metrics.csv: one line for each validation."""

    HEADER = "step,minutes,learning_rate,train_loss,validation_loss,bleu,chrf"

    def __init__(self, path: Path):
        self.path = path

    def rewind(self, step: int) -> None:
        """Forgets the lines after `step`, which will be written again."""
        old = self.path.read_text().splitlines()[1:] if self.path.exists() else []
        kept = [line for line in old if int(line.split(",")[0]) <= step]
        write_text(self.path, "\n".join([self.HEADER, *kept]) + "\n")

    def add(self, step: int, *values: float) -> None:
        with open(self.path, "a") as file:
            file.write(",".join([str(step), *(f"{v:.6g}" for v in values)]) + "\n")


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    """As config.yaml, in the order given."""
    write_text(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def log(message: str) -> None:
    """A line on standard output, above the bar if there is one."""
    tqdm.write(message)
    sys.stdout.flush()
