from dataclasses import dataclass

import pytest

from transformer_tf.config import ConfigError
from transformer_tf.flags import file_flags, make_parser, settings_of


@dataclass(frozen=True)
class Tea:
    """How to make tea."""

    minutes: int = 3  # how long it stands
    sugar: float = 0.5  # spoons
    kind: str = "green"  # which leaves
    pot: str | None = None  # in which pot


@dataclass(frozen=True)
class Table:
    """Where to drink it."""

    guests: int = 2  # how many come


GROUPS = {"tea": Tea(), "table": Table(guests=4)}


def write(tmp_path, text):
    (tmp_path / "tea.yaml").write_text(text, encoding="utf-8")
    return str(tmp_path / "tea.yaml")


def test_each_field_is_a_flag_with_the_given_default():
    parsed = make_parser("Tea.", GROUPS).parse_args(["--minutes", "5"])
    assert parsed.tea == Tea(minutes=5)
    assert parsed.table == Table(guests=4)


def test_help_says_what_the_comment_of_a_field_says(capsys):
    with pytest.raises(SystemExit):
        make_parser("Tea.", GROUPS).parse_args(["--help"])
    assert "how long it stands" in capsys.readouterr().out


def test_a_mistake_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        make_parser("Tea.", GROUPS).parse_args(["--minutes", "long"])
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_is_flags_of_any_group(tmp_path):
    path = write(tmp_path, "minutes: 4\nsugar: 1e-4\nkind: 煎茶\npot: iron\nguests: 1")
    flags = file_flags(path, GROUPS.values())
    parsed = make_parser("Tea.", GROUPS).parse_args([*flags, "--minutes", "9"])
    assert parsed.tea == Tea(9, 1e-4, "煎茶", "iron")
    assert parsed.table == Table(1)


def test_an_empty_value_leaves_the_default(tmp_path):
    assert file_flags(write(tmp_path, "pot:\nkind: black"), GROUPS.values()) == [
        "--kind=black"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("minuets: 4", "sets 'minuets', which is no field"),
        ("- minutes", "holds no `field: value` lines"),
        ("minutes: [", "is no YAML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        file_flags(write(tmp_path, text), GROUPS.values())


@pytest.mark.parametrize("value", ["long", "3.5", ".inf", "[1]"])
def test_a_value_of_the_wrong_type_is_one_line(tmp_path, capsys, value):
    flags = file_flags(write(tmp_path, f"minutes: {value}"), GROUPS.values())
    with pytest.raises(SystemExit, match="2"):
        make_parser("Tea.", GROUPS).parse_args(flags)
    assert "--minutes" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*none.yaml"):
        file_flags(str(tmp_path / "none.yaml"), GROUPS.values())


def test_settings_are_flat():
    assert settings_of([Table(), Tea()])["guests"] == 2
