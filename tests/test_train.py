"""The command as a user runs it: every test here starts `python train.py`."""

import csv
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import made_up_corpus
import pytest
import yaml
from commands import FAST, ROOT, data_flags, read_until, refused, start, train, words

from transformer_tf.checkpoints import CheckpointError
from transformer_tf.training import DivergedError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return made_up_corpus.write(tmp_path_factory.mktemp("corpus"))


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
    seconds = []
    for _ in range(3):
        before = os.times()
        result = train("--help")
        after = os.times()
        # Of the processor, so that busy neighbours do not matter.
        seconds.append(after.children_user - before.children_user)
    assert result.returncode == 0
    assert "--batch_tokens" in result.stdout
    assert "target tokens of one update" in result.stdout
    assert min(seconds) < 0.5  # TensorFlow was not imported


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


def test_the_better_of_average_and_last_weights_is_exported(run):
    _, _, printed = run
    what, average, last = re.search(
        r"exporting (.*) \(validation loss of average (\S+), of last (\S+)\)", printed
    ).groups()
    losses = {"the average of 4 checkpoints": average, "the last weights": last}
    assert float(losses[what]) == min(map(float, losses.values()))


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


def test_flags_win_over_a_file_and_a_file_over_the_preset(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("d_model: 48\nnum_heads: 5\n")
    refused(
        train("--config_path", file), 2, "num_heads is 5", "divisor of d_model = 48"
    )
    file.write_text("d_modle: 48\n")
    refused(train("--config_path", file), 2, "'d_modle'", "no field")
    file.write_text("d_model: wide\n")
    refused(train("--config_path", file), 2, "--d_model", "'wide'")
    file.write_text("d_model: 48\nnum_heads: 5\n")
    flags = ["--config_path", file, "--d_model", "50", "--pairs", tmp_path / "none"]
    refused(train(*flags, "--output_dir", tmp_path / "r"), 3, "none")


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


def export_again(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "export.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


def test_an_export_is_looked_at_as_a_server_would(run):
    _, _, printed = run
    for what in ("operations", "size of the variables", "loading as a server"):
        assert f"  {what}: ok\n" in printed
    for signature in ("serving_default", "greedy", "nbest"):
        assert f"  signature {signature}: ok\n" in printed


def test_another_version_is_exported_from_the_checkpoints(run, tmp_path):
    directory, _, _ = run
    shutil.copytree(directory, tmp_path / "my_run")
    result = export_again(tmp_path / "my_run", "--average_checkpoints", "1")
    assert result.returncode == 0, result.stderr
    assert "exporting the average of 1 checkpoints" in result.stdout
    assert "  signature nbest: ok\n" in result.stdout
    exports = tmp_path / "my_run" / "export"
    assert {path.name for path in exports.iterdir() if path.is_dir()} == {"1", "2"}
    assert "/models/my_run" in (exports / "README.txt").read_text("utf-8")


def test_a_bundle_is_a_run_in_miniature(run, tmp_path):
    directory, _, _ = run
    bundle = tmp_path / "given" / "away"
    result = export_again(directory, "--bundle", bundle)
    assert result.returncode == 0, result.stderr
    assert "  signature nbest: ok\n" in result.stdout
    kept = {path.name for path in bundle.iterdir()}
    assert kept == {"config.yaml", "vocab.model", "metrics.csv", "run.json", "export"}
    settings = yaml.safe_load((bundle / "config.yaml").read_text("utf-8"))
    assert settings == {
        **yaml.safe_load((directory / "config.yaml").read_text("utf-8")),
        **{"data_dir": None, "manual_dir": None},
    }
    weights = [path / "export" / "1" / "variables" for path in (bundle, directory)]
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in weights]
    assert sizes[0] == pytest.approx(sizes[1] / 2, rel=0.1)
    source = (directory / "test" / "source.txt").read_text("utf-8").splitlines()[0]
    result = subprocess.run(
        [
            *(sys.executable, str(ROOT / "translate.py")),
            *(source, "--model", str(bundle), "--explain"),
        ],
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert result.returncode == 0 and "layernorm1" in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "no run in nowhere, expected its config.yaml"),
        (["RUN", "--version", "0"], "--version is 0, expected a number from 1 on"),
        (["RUN", "--average_checkpoints", "0"], "--average_checkpoints is 0"),
    ],
)
def test_what_cannot_be_exported_is_one_line(run, arguments, message):
    given = [run[0] if argument == "RUN" else argument for argument in arguments]
    result = export_again(*given)
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"export.py: {message}")


def test_translate_prints_what_training_exported(run, corpus):
    """The test set's translations, as train.py kept them, come out of translate.py."""
    directory, _, _ = run
    result = subprocess.run(
        [sys.executable, str(ROOT / "translate.py"), "--model", str(directory)],
        input=(directory / "test" / "source.txt").read_bytes(),
        capture_output=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == (directory / "test" / "translation.txt").read_bytes()


@pytest.mark.parametrize(
    ("where", "norm"),
    [("encoder", "layernorm1"), ("cross", "layernorm2")],
)
def test_a_station_of_the_model_is_opened(run, where, norm):
    directory, _, _ = run
    result = subprocess.run(
        [
            *(sys.executable, str(ROOT / "translate.py"), "--model", str(directory)),
            *("--explain", "--where", where, "--lang", "en", "--all_dims"),
            (directory / "test" / "source.txt").read_text("utf-8").split("\n")[0],
        ],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if " → " in line]
    shares = [
        float(line.split(" = ")[0].split()[-1]) for line in lines if " % " in line + " "
    ]
    assert sum(shares) == pytest.approx(1, abs=0.01)
    assert f"x + attn_output → {norm}\n" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.count(",") == 31  # all 32 numbers of a token


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_exports_and_tells(run, tmp_path, number, code):
    _, flags, _ = run
    flags = [*flags, "--output_dir", tmp_path / "run", "--max_steps", "100000"]
    process = start(*flags)
    read_until(process, "update 5 ")
    process.send_signal(number)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert "the same command goes on" in printed
    assert list((tmp_path / "run" / "checkpoints").glob("*.index"))
    assert (tmp_path / "run" / "export" / "1" / "saved_model.pb").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DivergedError("the loss is nan"), 4),
        (CheckpointError("cannot write a checkpoint"), 5),
        (OSError(28, "No space left on device"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_stops_a_run_decides_the_exit_code(
    tmp_path, monkeypatch, capsys, error, code
):
    spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)

    def stop(options, run):
        raise error

    monkeypatch.setattr(command, "train", stop)
    assert command.main(["--output_dir", str(tmp_path)]) == code
    assert capsys.readouterr().err.count("\n") == (code != 130)


@pytest.mark.slow
def test_learns_the_made_up_language(corpus, tmp_path):
    """Two minutes: the whole way, on pairs that training never saw."""
    flags = [*data_flags(corpus), *words(FAST), "--output_dir", tmp_path / "run"]
    flags += words("--max_steps 600 --validate_every 200 --checkpoint_every 20")
    result = train(*flags, "--learning_rate_scale", "0.5", timeout=900)
    assert result.returncode == 0, result.stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text("utf-8"))
    assert facts["test"]["bleu"] > 90
