import numpy as np
import pytest

from transformer_tf.tables import number, table, vector, width


@pytest.mark.parametrize(
    "values, text",
    [
        ([1.5385, 6.8954, 0.5665], "[1.54, 6.90, 0.57]"),
        ([1.2671, 0.5777], "[1.267, 0.578]"),
        ([0.7881, 0.7881], "[0.788, 0.788]"),
        ([9, 0, 0], "[9, 0, 0]"),
        ([-0.01234, 0.004], "[-0.01234, 0.00400]"),
        ([0.0, -0.0], "[0, 0]"),
        ([123.456, 1.0], "[123.5, 1.0]"),
    ],
)
def test_vectors_have_the_decimals_that_matter(values, text):
    assert vector(np.array(values)) == text


def test_long_vectors_are_cut():
    assert vector(np.arange(9), 4) == "[0, 1, 2, 3, …]"
    assert vector(np.arange(4), 4) == "[0, 1, 2, 3]"


@pytest.mark.parametrize(
    "value, text", [(2.5, "2.5"), (5, "5"), (-0.0001, "0"), (-1 / 3, "-0.333")]
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_full_width_characters_take_two_columns():
    assert [width(text) for text in ("abc", "明日", "ｱ", "か\u3099", "（a）")] == [
        3,
        4,
        1,
        2,
        5,
    ]
    lines = table([["", "x"], ["明日", "1"], ["ab", "22"]]).splitlines()
    assert lines == ["      x", "明日  1", "ab    22"]
