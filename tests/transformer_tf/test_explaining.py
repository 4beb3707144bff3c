"""Every number of both articles comes out of the command line."""

import importlib.util
from pathlib import Path

import pytest

from transformer_tf.config import ConfigError

SCRIPT = Path(__file__).parents[2] / "translate.py"
spec = importlib.util.spec_from_file_location("translate_command", SCRIPT)
command = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command)

STATION = [
    *("--q", "2,1,0,0", "--k", "1,0,0,0;2,1,0,0;0,0,0,1"),
    *("--v", "9,0,0;0,9,0;0,0,9", "--tokens", "明日,天気,は"),
]


def explain(*arguments, lang="en"):
    options = command.parse_options(["--explain", "--lang", lang, *arguments])
    return command.explain(options)


def rows_of(text):
    """The table of the four steps, as {who: [cells]}."""
    lines = [line for line in text.splitlines() if " → " in line]
    return {line.split("  ")[0]: line.split()[3:] for line in lines}


def test_the_station_of_the_article():
    text = explain(*STATION, lang="ja")
    assert text.splitlines()[0] == "「明日」が見る（4 個の数、√4 = 2）"
    assert rows_of(text) == {
        "明日 → 明日": ["2", "1", "0.171", "=", "17.1", "%"],
        "明日 → 天気": ["5", "2.5", "0.766", "=", "76.6", "%"],
        "明日 → は": ["0", "0", "0.063", "=", "6.3", "%"],
    }
    assert text.endswith("  = [1.54, 6.90, 0.57]")
    for words in ("Query（探している）", "③ 割合（softmax）", "0.766 × 天気 [0, 9, 0]"):
        assert words in text


def test_the_station_in_english():
    text = explain(*STATION)
    assert text.startswith('"明日" looks (4 numbers, √4 = 2)')
    assert "③ share (softmax)" in text


def results(*arguments):
    """(shares, mixed vector) of each token."""
    parts = explain(*arguments).split("\n\n\n")
    return [
        ([row[-4] for row in rows_of(part).values()], part.splitlines()[-1].strip())
        for part in parts
    ]


def test_three_vectors_by_hand():
    assert results("--q", "1,0;0,1;1,1", "--no-scale") == [
        (["0.422", "0.155", "0.422"], "= [0.845, 0.578]"),
        (["0.155", "0.422", "0.422"], "= [0.578, 0.845]"),
        (["0.212", "0.212", "0.576"], "= [0.788, 0.788]"),
    ]


def test_three_vectors_that_do_not_look_ahead():
    assert results("--q", "1,0;0,1;1,1", "--no-scale", "--causal") == [
        (["1.000", "0.000", "0.000"], "= [1, 0]"),
        (["0.269", "0.731", "0.000"], "= [0.269, 0.731]"),
        (["0.212", "0.212", "0.576"], "= [0.788, 0.788]"),
    ]
    text = explain("--q", "1,0;0,1;1,1", "--no-scale", "--causal", "--token", "2")
    assert "hidden (−∞)" in text
    assert text.count("looks") == 1


def test_the_exercise():
    third = explain("--q", "2,0;0,1;1,1", "--no-scale", "--token", "3")
    assert [row[0] for row in rows_of(third).values()] == ["2", "1", "2"]
    assert third.endswith("= [1.267, 0.578]")
    second = explain("--q", "2,0;0,1;1,1", "--no-scale", "--causal", "--token", "2")
    assert second.endswith("= [0.538, 0.731]")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--q", "1,x"], "--q is '1,x', expected rows of as many numbers"),
        (["--q", "1,2;3"], "--q is '1,2;3', expected rows"),
        (["--q", "nan,1"], "--q is 'nan,1', expected rows"),
        (["--q", "1,2", "--k", "1"], "--k has 1 numbers in a row, expected the 2"),
        (["--q", "1", "--k", "1;2", "--v", "1"], "--v has 1 rows, expected the 2"),
        (["--q", "1;2", "--tokens", "a"], "--tokens has 1, expected 2"),
        (["--q", "1;2", "--k", "1", "--causal"], "--q has 2 rows, expected at most"),
        (["--q", "1;2", "--token", "3"], "--token is 3, expected 1 to 2"),
    ],
)
def test_numbers_that_do_not_fit_are_one_line(arguments, message):
    with pytest.raises(ConfigError) as caught:
        explain(*arguments)
    assert str(caught.value).startswith(message)


def test_something_to_explain_is_wanted(capsys):
    with pytest.raises(SystemExit):
        command.parse_options(["--explain"])
    assert "--explain wants one TEXT, or numbers in --q" in capsys.readouterr().err
