"""The command as a user runs it: every test here starts `python train.py`."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import made_up_corpus
import pytest

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


def refused(result, code, *expected):
    """One line on standard error with these words, nothing else, and the exit code."""
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len([line for line in lines if line.startswith("train.py: ")]) == 1, lines
    assert "Traceback" not in result.stderr
    for part in expected:
        assert part in lines[-1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return made_up_corpus.write(tmp_path_factory.mktemp("corpus"))


def data_flags(corpus):
    flags = []
    for name in ("train_source", "train_target", "test_source", "test_target"):
        flags += [f"--{name}", corpus[name]]
    # The test pairs double as validation pairs: this language is small.
    flags += ["--validation_source", corpus["test_source"]]
    return [*flags, "--validation_target", corpus["test_target"]]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A finished run of 20 updates, the command that made it, and what it printed."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    flags = [*data_flags(corpus), *words(FAST), "--output_dir", directory]
    flags += words("--max_steps 20 --log_every 5 --validate_every 10")
    flags += words("--checkpoint_every 5 --validation_sentences 8")
    result = train(*flags)
    assert result.returncode == 0, result.stderr
    return directory, flags, result.stdout


def test_help_answers_at_once():
    times = []
    for _ in range(3):
        start = time.monotonic()
        result = train("--help")
        times.append(time.monotonic() - start)
    assert result.returncode == 0
    assert "--batch_tokens" in result.stdout
    assert "target tokens of one update" in result.stdout
    assert min(times) < 1  # 0.2 s on a quiet machine: TensorFlow was not imported


def test_leaves_what_the_readme_says(run):
    directory, _, printed = run
    names = {path.name for path in directory.iterdir()}
    assert {"config.yaml", "run.json", "vocab.model", "checkpoints", "log"} <= names
    assert (directory / "export" / "1" / "saved_model.pb").exists()
    with open(directory / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["10", "20"]
    assert float(rows[1]["validation_loss"]) < float(rows[0]["validation_loss"])
    facts = json.loads((directory / "run.json").read_text("utf-8"))
    assert facts["pairs"]["kept"] == 360
    assert "tok:13a" in facts["test"]["bleu_signature"]
    assert facts["test"]["sentences"] == 40
    assert any((directory / "log").iterdir())


def test_says_once_what_it_runs_on_and_then_how_it_goes(run):
    _, _, printed = run
    for word in ("tensorflow: 2.21", "seed: 1", "parameters: ", "360 kept", "padding"):
        assert printed.count(word) == 1, word
    assert "update 5 loss" in printed
    assert "target tokens/s" in printed
    assert "validation after update 10: loss" in printed
    assert "test, 40 sentences: BLEU" in printed


def test_the_same_command_goes_on_where_it_was(run):
    directory, flags, _ = run
    result = train(*flags)
    assert result.returncode == 0, result.stderr
    assert "going on after update 20" in result.stdout
    assert "update 5 loss" not in result.stdout


def test_another_configuration_is_refused_with_the_difference(run):
    directory, flags, _ = run
    refused(
        train(*flags, "--dropout_rate", "0.3"), 2, "dropout_rate 0.1 there, 0.3 now"
    )


def test_a_file_sets_what_no_flag_sets(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("d_model: 48\nnum_heads: 5\n")
    refused(
        train("--config_path", file), 2, "num_heads is 5", "divisor of d_model = 48"
    )
    file.write_text("d_modle: 48\n")
    refused(train("--config_path", file), 2, "'d_modle'", "no field")
    file.write_text("d_model: wide\n")
    refused(train("--config_path", file), 2, "d_model to 'wide'", "expected int")


@pytest.mark.parametrize(
    "flags", [["--no_such_flag"], ["--d_model", "wide"], ["--preset", "huge"]]
)
def test_wrong_flags_are_one_line(flags):
    refused(train(*flags), 2, flags[0], "see --help")


def test_a_missing_file_is_named(tmp_path):
    missing = tmp_path / "none.ja"
    flags = ["--train_source", missing, "--train_target", missing]
    refused(train(*flags, "--output_dir", tmp_path / "r"), 3, str(missing))


def test_files_of_unequal_length_are_refused(corpus, tmp_path):
    flags = ["--train_source", corpus["train_source"]]
    flags += ["--train_target", corpus["test_target"], "--output_dir", tmp_path / "r"]
    refused(train(*flags), 3, "has 360 lines", "has 40", "line 41")


def test_an_empty_corpus_is_refused(tmp_path):
    empty = tmp_path / "empty.tsv"
    empty.write_text("")
    refused(train("--pairs", empty, "--output_dir", tmp_path / "r"), 3, str(empty))


def test_an_output_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    flags = [*data_flags(corpus), "--output_dir", tmp_path / "file" / "run"]
    refused(train(*flags), 2, "--output_dir", "file/run")


@pytest.mark.slow
def test_learns_the_made_up_language(corpus, tmp_path):
    """Two minutes: the whole way, on pairs that training never saw."""
    flags = [*data_flags(corpus), *words(FAST), "--output_dir", tmp_path / "run"]
    flags += words("--max_steps 600 --validate_every 200 --checkpoint_every 20")
    result = train(*flags, "--learning_rate_scale", "0.5", timeout=900)
    assert result.returncode == 0, result.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert facts["test"]["bleu"] > 90
