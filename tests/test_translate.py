"""The command: its formats, its order, its mistakes; then with a real export."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from data_pipeline.tokenizer import Tokenizer, train_vocabulary
from transformer_tf.model import Transformer
from transformer_tf.translator import Translator, asker

SCRIPT = Path(__file__).parents[1] / "translate.py"
spec = importlib.util.spec_from_file_location("translate", SCRIPT)
command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command)


class Shouter:
    """Stands in for a model: translates into capitals, remembers what it was asked."""

    def __init__(self):
        self.batches = []
        self.options = None

    def translate(self, text, nbest=(1,), **options):
        lines = text.numpy().tolist()
        self.batches.append(lines)
        self.options = {name: float(value[0]) for name, value in options.items()}
        places = range(int(nbest[0]))
        return {
            "translation": tf.constant(
                [[line.upper() + b"!" * place for place in places] for line in lines]
            ),
            # It never finds more than three.
            "score": tf.constant(
                [[-0.5 - i if i < 3 else -np.inf for i in places] for _ in lines]
            ),
            "truncated": tf.constant([len(line) > 40 for line in lines]),
        }


@pytest.fixture
def shouter(monkeypatch):
    shouter = Shouter()
    monkeypatch.setattr(command, "find_export", Path)
    monkeypatch.setattr(command, "open_model", lambda model, hurry: asker(shouter))
    return shouter


@pytest.fixture
def translate(shouter, monkeypatch, capsysbinary):
    """Runs the command in this process: (arguments, stdin) -> its output."""

    def run(*arguments, stdin=b"", code=0):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        assert command.main(["--model", "m", *arguments]) == code
        out, error = capsysbinary.readouterr()
        return SimpleNamespace(out=out, error=error.decode())

    return run


# --- One line out for one line in --------------------------------------------------


def test_arguments_or_lines(translate, tmp_path):
    assert translate("tea", "a cat").out == b"TEA\nA CAT\n"
    assert translate(stdin=b"tea\na cat\n").out == b"TEA\nA CAT\n"
    (tmp_path / "in").write_bytes(b"tea\na cat")
    output = tmp_path / "out"
    found = translate("--input", str(tmp_path / "in"), "--output", str(output))
    assert found.out == b""
    assert output.read_bytes() == b"TEA\nA CAT\n"
    assert translate(stdin=b"").out == b""


def test_text_before_or_after_flags_or_like_a_flag(translate):
    assert translate("tea", "--scores").out == b"-0.5000\tTEA\n"
    assert translate("--scores", "tea").out == b"-0.5000\tTEA\n"
    assert translate("--scores", "--", "-a").out == b"-0.5000\t-A\n"


def test_only_a_line_feed_ends_a_line(translate):
    marks = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh".encode()
    assert translate(stdin=marks + b"\r\nlast").out == marks.upper() + b"\nLAST\n"


def test_empty_lines_stay_where_they_are(translate):
    assert translate(stdin=b"\n\na\n\nb\n\n").out == b"\n\nA\n\nB\n\n"


def test_order_is_kept_over_batches_and_windows(translate, shouter, monkeypatch):
    monkeypatch.setattr(command, "WINDOW_LINES", 50)
    rng = np.random.default_rng(1)
    lines = [b"x" * rng.integers(0, 30) + b"%d" % i for i in range(220)]
    found = translate(stdin=b"\n".join(lines))
    assert found.out == b"".join(line.upper() + b"\n" for line in lines)
    # Windows of 50 lines in batches of at most 32, of lines of similar length.
    assert [len(batch) for batch in shouter.batches] == [32, 18] * 4 + [20]
    assert max(map(len, shouter.batches[0])) <= min(map(len, shouter.batches[1]))


def test_a_long_input_is_read_bit_by_bit(shouter):
    asked = 0

    def lines():
        nonlocal asked
        for asked in range(10_000):  # noqa: B007
            yield b"a"

    options = command.parse_options([])
    translations = command.translate_stream(
        asker(shouter), lines(), io.BytesIO(), options, window=100
    )
    next(translations)
    assert asked == 99


# --- Formats ----------------------------------------------------------------------


def test_nbest(translate, shouter):
    assert translate("tea", "", "--nbest", "2").out == (
        b"0 ||| TEA ||| -0.5000\n0 ||| TEA! ||| -1.5000\n"
        b"1 |||  ||| -0.5000\n1 ||| ! ||| -1.5000\n"
    )
    assert "beam_size" not in shouter.options  # the export knows it
    # What the search did not find is not printed, and the beam is as wide as needed.
    assert translate("tea", "--nbest", "6").out.count(b"\n") == 3
    assert shouter.options["beam_size"] == 6


def test_json(translate):
    [line] = translate('猫 \\ "q"', "--json").out.splitlines()
    assert "猫".encode() in line
    assert json.loads(line) == {
        "source": '猫 \\ "q"',
        "translation": '猫 \\ "Q"',
        "score": -0.5,
        "truncated": False,
    }
    record = json.loads(translate("tea", "--json", "--nbest", "2").out)
    assert record["nbest"] == [
        {"translation": "TEA", "score": -0.5},
        {"translation": "TEA!", "score": -1.5},
    ]
    broken = translate("--json", stdin=b"\xff\n").out
    assert json.loads(broken)["source"] == "\ufffd"


def test_options_reach_the_model_only_when_given(translate, shouter):
    translate("tea")
    assert shouter.options == {}
    translate(
        "tea", "--beam_size", "2", "--length_penalty", "-1", "--extra_length", "0"
    )
    assert shouter.options == {
        "beam_size": 2.0,
        "length_penalty": -1.0,
        "extra_length": 0.0,
    }


def test_what_the_model_could_not_read_is_reported(translate):
    found = translate(stdin=b"short\n" + b"long" * 20 + b"\n")
    assert found.error == (
        "translate.py: line 2 is longer than the model reads; its end is lost\n"
    )
    assert found.out.count(b"\n") == 2


# --- Scores -----------------------------------------------------------------------


def test_reference(translate, tmp_path):
    text = b"the cat sits on the mat\nit is raining again today\n"
    (tmp_path / "ref").write_bytes(text.upper())
    found = translate("--reference", str(tmp_path / "ref"), stdin=text)
    assert found.out == text.upper()
    [line] = found.error.splitlines()
    assert line.startswith("BLEU 100.0 (nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|")
    assert " chrF2 100.0 (nrefs:1|" in line


def test_japanese_references_are_not_split_at_spaces(translate, tmp_path):
    text = "今日はいい天気です\n".encode()
    (tmp_path / "ref").write_bytes(text)
    found = translate(
        "--reference", str(tmp_path / "ref"), "--target_lang", "ja", stdin=text
    )
    assert "|tok:char|" in found.error or "|tok:ja-mecab" in found.error
    assert found.error.startswith("BLEU 100.0 (")


def test_a_reference_of_another_length(translate, tmp_path):
    (tmp_path / "ref").write_bytes(b"A\nB\nC\n")
    found = translate("a", "b", "--reference", str(tmp_path / "ref"), code=2)
    assert "2 translations but 3 lines in the --reference" in found.error
    assert found.out == b"A\nB\n"
    (tmp_path / "ref").write_bytes(b"")
    found = translate("--reference", str(tmp_path / "ref"), code=2)
    assert "there is nothing to score" in found.error


# --- Mistakes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beam_size", "9"], "--beam_size is 9, expected a number from 1 to 8"),
        (["--beam_size", "x"], "argument --beam_size: invalid int value: 'x'"),
        (["--length_penalty", "nan"], "--length_penalty is nan, expected"),
        (["--nbest", "0"], "--nbest is 0, expected 1 to 4"),
        (["--nbest", "9"], "--nbest is 9, expected 1 to 8"),
        (["--nbest", "3", "--beam_size", "2"], "--nbest is 3, expected 1 to 2"),
        (["--extra_length", "-1"], "--extra_length is -1, expected"),
        (["--beam", "4"], "unrecognized arguments: --beam"),
        (["text", "--input", "file"], "TEXT and --input exclude each other"),
    ],
)
def test_wrong_flags_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("translate.py: ") and message in error
    assert error.count("\n") == 1


def test_missing_files(translate, tmp_path):
    missing = str(tmp_path / "none" / "file")
    for flag, action in [
        ("--input", "read"),
        ("--reference", "read"),
        ("--output", "write"),
    ]:
        found = translate(flag, missing, code=2)
        assert found.error.startswith(f"translate.py: cannot {action} {missing}: No")
        assert found.error.count("\n") == 1


def test_the_output_may_not_be_the_input(translate, tmp_path):
    (tmp_path / "text").write_bytes(b"keep me\n")
    same = str(tmp_path / "." / "text")
    found = translate("--input", same, "--output", str(tmp_path / "text"), code=2)
    assert "--output is the file of --input" in found.error
    assert (tmp_path / "text").read_bytes() == b"keep me\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(translate):
    found = translate("tea", "--output", "/dev/full", code=5)
    assert found.error == (
        "translate.py: cannot read or write: No space left on device\n"
    )


def test_a_model_that_fails(translate, shouter, monkeypatch):
    def fail(text, **options):
        raise tf.errors.ResourceExhaustedError(None, None, "out of\nmemory")

    monkeypatch.setattr(shouter, "translate", fail)
    found = translate("tea", code=5)
    assert found.error == "translate.py: the model failed: out of memory\n"


# --- The real thing ---------------------------------------------------------------


def run_command(*arguments, stdin=b"", **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    keras.utils.set_random_seed(3)
    sentences = ["明日は晴れるといい", "I hope the sun shines tomorrow.", "猫"] * 20
    tokenizer = Tokenizer(train_vocabulary(sentences, 340))
    model = Transformer(
        tokenizer.vocab_size, 1, 32, num_heads=2, d_ff=32, max_length=32
    )
    model((np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32)))
    # Sharper than at the start of training, so that there is something to say.
    model.embedding.embeddings.assign(3 * model.embedding.embeddings)
    path = tmp_path_factory.mktemp("run") / "export" / "1"
    translator = Translator(model, tokenizer)
    translator.save(path)
    return path.parent, translator


def test_it_prints_what_the_export_says_whatever_the_locale(export):
    path, translator = export
    lines = ["明日は晴れ", "", "猫", "sun", "明日は猫の日であるといいと思う", "\u3000"]
    found = translator.translate(tf.constant(lines), beam_size=[2])
    expected = b"".join(line + b"\n" for line in found["translation"].numpy()[:, 0])
    assert len(set(expected.split(b"\n"))) > 2
    result = run_command(
        *("--model", str(path), "--beam_size", "2"),
        stdin="\n".join(lines).encode(),
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert result.returncode == 0
    assert result.stdout == expected
    assert result.stderr == b""


def test_a_hurried_answer_is_the_same(export):
    path, translator = export
    texts = ["明日は晴れ", "猫"]
    found = translator.translate(tf.constant(texts))["translation"].numpy()[:, 0]
    result = run_command("--model", str(path), *texts)
    assert result.stdout.splitlines() == found.tolist()


def test_a_reader_that_has_seen_enough(export):
    path, _ = export
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--model", str(path), "--beam_size", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    process.stdin.write("猫\n".encode() * 100)
    process.stdin.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_no_model_yet_is_said_before_tensorflow_is_imported(tmp_path):
    started = time.monotonic()
    result = run_command("猫", "--model", str(tmp_path))
    assert result.returncode == 2
    assert b"python train.py" in result.stderr and result.stderr.count(b"\n") == 1
    assert result.stdout == b""
    assert time.monotonic() - started < 1.5


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--no_such_flag", 2)])
def test_flags_are_answered_without_tensorflow(flag, code):
    assert run_command(flag).returncode == code
    watch = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    sys.exit("tensorflow" in sys.modules or "keras" in sys.modules)
"""
    process = subprocess.run(
        [sys.executable, "-c", watch, str(SCRIPT), flag],
        capture_output=True,
        cwd=SCRIPT.parent,
    )
    assert process.returncode == 0


def test_a_damaged_model_is_one_line(export, tmp_path):
    path, _ = export
    (tmp_path / "saved_model.pb").write_bytes(b"not a model")
    result = run_command("猫", "--model", str(tmp_path))
    assert result.returncode == 5
    assert result.stderr.startswith(b"translate.py: cannot read the export")
    assert result.stderr.count(b"\n") == 1
