"""Starts `python train.py` as a user does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAST = (
    "--preset tiny --batch_tokens 512 --warmup_steps 100 --vocab_size 420 "
    "--d_model 32 --d_ff 64 --num_heads 2 --num_layers 1"
)


def train(*arguments, timeout=300):
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


def words(text):
    return text.split()


def data_flags(corpus):
    flags = []
    for name in ("train_source", "train_target", "test_source", "test_target"):
        flags += [f"--{name}", corpus[name]]
    # The test pairs double as validation pairs: this language is small.
    flags += ["--validation_source", corpus["test_source"]]
    return [*flags, "--validation_target", corpus["test_target"]]


def refused(result, code, *expected):
    """One line on standard error with these words, and the exit code."""
    assert result.returncode == code, result.stderr
    # TensorFlow greets on standard error where it is imported, before our line.
    lines = result.stderr.strip().splitlines()
    lines = [line for line in lines if not line.startswith(("I0000", "WARNING: All"))]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("train.py: ")
    for part in expected:
        assert part in lines[-1]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def read_until(process, text):
    """What a process prints up to a line that begins with the text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(text):
            return lines
    raise AssertionError("".join(lines) + process.stderr.read())
