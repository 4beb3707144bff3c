"""The article's tables: an attention in four steps, as a reader follows it by hand."""

import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

FEW_DIMS = 4  # numbers of a vector that are shown unless all are asked for
NORMS = {"encoder": "layernorm1", "decoder": "layernorm1", "cross": "layernorm2"}
WORDS = {
    "ja": {
        "looks": "「{token}」が見る（{d} 個の数、√{d} = {root}）",
        "query": "Query（探している）",
        "key": "Key（探されうる）",
        "value": "Value（渡す中身）",
        "scores": "① 内積（生スコア）",
        "scaled": "② ÷ {root}",
        "masked": "マスク",
        "hidden": "見ない（−∞）",
        "shares": "③ 割合（softmax）",
        "mixed": "④ 受け取る新しい中身（重みつき平均）",
        "added": "元の自分に足して、そろえる：x + attn_output → {norm}",
    },
    "en": {
        "looks": '"{token}" looks ({d} numbers, √{d} = {root})',
        "query": "Query",
        "key": "Key",
        "value": "Value",
        "scores": "① dot product",
        "scaled": "② ÷ {root}",
        "masked": "mask",
        "hidden": "hidden (−∞)",
        "shares": "③ share (softmax)",
        "mixed": "④ what it receives (weighted mean)",
        "added": "added back to itself and normalised: x + attn_output → {norm}",
    },
}


class OneHead(NamedTuple):
    """One attention of one head, as numpy arrays."""

    query: np.ndarray  # (T, K)
    key: np.ndarray  # (S, K)
    value: np.ndarray  # (S, V)
    mask: np.ndarray | None  # (T, S), True = may look; None = all may
    scores: np.ndarray  # (T, S) ①
    scaled: np.ndarray  # (T, S) ②; equal to ① if nothing was divided
    shares: np.ndarray  # (T, S) ③
    output: np.ndarray  # (T, V) ④

    @classmethod
    def of(cls, look: Any, head: int, masked: bool) -> "OneHead":
        """One head, from 0, of a `Look` at one sentence; `masked` keeps the mask."""
        query, key, value, *steps = (
            np.asarray(array)[0, head]
            for array in (look.query, look.key, look.value, *look.steps)
        )
        mask = np.asarray(look.mask)[0, 0] if masked else None
        return cls(query, key, value, mask, *steps)


def explain_token(
    head: OneHead,
    token: int,
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    lang: str,
    scale: bool = True,
    dims: int | None = None,
) -> str:
    """The tables of one token.

    Args:
        head: what was computed.
        token: which row, from 0.
        queries: the names of the T tokens that look.
        keys: the names of the S tokens that are looked at.
        lang: of the words, ja or en.
        scale: whether step ② divides.
        dims: numbers shown of each vector; None = all.
    """
    words = WORDS[lang]
    d = head.query.shape[1]
    root = number(d**0.5)
    name = queries[token]
    vectors = [["", words["query"], words["key"], words["value"]]]
    for i, key in enumerate(keys):
        asked = vector(head.query[token], dims) if i == 0 else ""
        vectors.append(
            [key, asked, vector(head.key[i], dims), vector(head.value[i], dims)]
        )
    steps = [["", words["scores"]]]
    steps[0] += [words["scaled"].format(root=root)] if scale else []
    steps[0] += [words["masked"]] if head.mask is not None else []
    steps[0] += [words["shares"]]
    for i, key in enumerate(keys):
        row = [f"{name} → {key}", number(head.scores[token, i])]
        row += [number(head.scaled[token, i])] if scale else []
        if head.mask is not None:
            row.append("" if head.mask[token, i] else words["hidden"])
        share = head.shares[token, i]
        steps.append([*row, f"{share:.3f} = {100 * share:.1f} %"])
    mixed = [f"{words['mixed']}"]
    for i, key in enumerate(keys):
        sign = " " if i == 0 else "+"
        share = head.shares[token, i]
        mixed.append(f"  {sign} {share:.3f} × {key} {vector(head.value[i], dims)}")
    mixed.append(f"  = {vector(head.output[token], dims)}")
    parts = [
        words["looks"].format(token=name, d=d, root=root),
        table(vectors),
        table(steps),
        "\n".join(mixed),
    ]
    return "\n\n".join(parts)


def table(rows: list[list[str]]) -> str:
    """Columns side by side, as wide as they look: a full-width character takes two."""
    widths = [max(width(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell + " " * (size - width(cell))
            for cell, size in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def width(text: str) -> int:
    """Columns that a terminal needs for the text."""
    return sum(
        0
        if unicodedata.combining(char)
        else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in text
    )


def number(value: float) -> str:
    """2.5, 5, -0.333: three decimals at most."""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def vector(values: np.ndarray, dims: int | None = None) -> str:
    """[1.54, 6.90, 0.57]: whole numbers as such, others with as many decimals as keep
    the error below a thousandth of the largest."""
    shown = np.asarray(values, np.float64)[:dims] + 0.0  # no -0
    more = ", …" if dims is not None and len(values) > dims else ""
    if np.allclose(shown, np.round(shown), atol=1e-9):
        return "[" + ", ".join(f"{value:.0f}" for value in shown) + more + "]"
    largest = max(np.abs(shown).max(), 1e-9)
    decimals = int(np.clip(np.ceil(np.log10(500 / largest)), 0, 6))
    return "[" + ", ".join(f"{value:.{decimals}f}" for value in shown) + more + "]"
