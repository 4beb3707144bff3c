"""The station as a page: what a model computed for a sentence, opened in a browser.

One file that asks for nothing else: `attention_page.html`, `.css` and `.js`, and the
numbers. The page computes no attention. Vectors are stored as `vector` prints them and
cells as counts of the smallest step that is shown, so its digits are those of
`translate.py --explain`. The numbers of each head are packed apart, and the browser
unpacks the one that is looked at.

A page of 30 and 30 tokens has about 1.5 MB with the paper's base model. Cells grow with
the square of the length: 256 and 256 tokens of `base` make 75 MB in half a minute, and
a browser opens them in two seconds.
"""

import base64
import hashlib
import json
import zlib
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_tf.tables import FEW_DIMS, NORMS, WORDS, OneHead, number, vector

if TYPE_CHECKING:
    from transformer_tf.explain import Look, Seen

PARTS = Path(__file__)  # the template, its style and its script lie beside this file
PAGE_WORDS = {
    "ja": {
        "title": "駅の中を開ける",
        "language": "言語",
        "source": "原文",
        "translation": "訳",
        "side": "どのアテンション",
        "encoder": "原文が原文を見る",
        "decoder": "訳が訳を見る",
        "cross": "訳が原文を見る",
        "layer": "駅（layer）",
        "head": "ヘッド（head）",
        "map": "だれがだれを見るか",
        "queries": "見るトークン",
        "keys": "見られるトークン",
        "most": "「{token}」がよく見ているのは {keys}",
        "next": "ここで選ばれた次のトークンは「{token}」",
        "hint": "トークンを指すか ↑ ↓ で選ぶと割合が、"
        "押す（Enter）と四つの手順が開きます。",
        "open": "四つの手順を開く",
        "close": "閉じる",
        "steps": "四つの手順",
        "step1": "Query と Key の内積をとる。どれだけ合うかの点数",
        "step2": "√{d} = {root} で割って、大きさをそろえる",
        "step3": "softmax にかけて、足すと 1 になる割合に直す",
        "step4": "その割合で Value を混ぜて受け取る",
        "vectors": "Query・Key・Value",
        "steps123": "①〜③ 点数から割合へ",
        "few": "ベクトルは {d} 個の数のうち、はじめの {few} 個です。",
        "joined": "attn_output は、全ヘッドの ④ を並べて出力の重みを掛けたものです。",
        "old": "このブラウザは古く、数を展開できません（DecompressionStream）。",
    },
    "en": {
        "title": "A station, opened",
        "language": "Language",
        "source": "Source",
        "translation": "Translation",
        "side": "Which attention",
        "encoder": "source looks at source",
        "decoder": "translation at itself",
        "cross": "translation at source",
        "layer": "Station (layer)",
        "head": "Head",
        "map": "Who looks at whom",
        "queries": "looks",
        "keys": "is looked at",
        "most": '"{token}" looks most at {keys}',
        "next": 'The next token, chosen here, is "{token}"',
        "hint": "Point at a token, or move with ↑ ↓, to see its shares; click or Enter "
        "opens the four steps.",
        "open": "Open the four steps",
        "close": "Close",
        "steps": "The four steps",
        "step1": "the dot product of Query and Key: how well they match",
        "step2": "divided by √{d} = {root}, to keep its size",
        "step3": "softmax turns it into shares that sum to 1",
        "step4": "the Values are mixed in these shares",
        "vectors": "Query, Key and Value",
        "steps123": "①–③ from score to share",
        "few": "Of the {d} numbers of a vector, the first {few} are shown.",
        "joined": "attn_output is ④ of all heads side by side, times output weights.",
        "old": "This browser is too old to unpack the numbers (DecompressionStream).",
    },
}


def attention_page(seen: "Seen", text: str, translation: str, lang: str) -> str:
    """A whole HTML document.

    Args:
        seen: what `see` saw of one sentence.
        text: the sentence; whatever it contains is shown as text.
        translation: what `seen.target` says.
        lang: in which language the page opens, ja or en; it can be switched.

    Raises:
        ValueError: a number is not finite, as when training diverged.
    """
    html, style, script = (
        PARTS.with_suffix(suffix).read_text("utf-8")
        for suffix in (".html", ".css", ".js")
    )
    return Template(html).substitute(
        lang=lang,
        policy=_policy(style, script),
        style=style,
        script=script,
        data=_json_block(_page(seen, text, translation, lang)),
    )


def _policy(style: str, script: str) -> str:
    """Nothing may be fetched, and nothing run but our own style and script."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for part in (style, script)
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style_hash}'; "
        f"script-src 'sha256-{script_hash}'; base-uri 'none'; form-action 'none'"
    )


def _json_block(record: dict[str, Any]) -> str:
    """JSON in ASCII that can end no element: U+2028 and the like are escaped too."""
    text = json.dumps(record, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _page(seen: "Seen", text: str, translation: str, lang: str) -> dict[str, Any]:
    """All that the script knows."""
    d = np.shape(seen.looks["encoder"][0].query)[-1]
    return {
        "lang": lang,
        "words": {name: WORDS[name] | PAGE_WORDS[name] for name in WORDS},
        "text": text,
        "translation": translation,
        "target": seen.target,
        "d": d,
        "root": number(d**0.5),
        "few": min(d, FEW_DIMS),
        "sides": [_side(seen, where) for where in seen.looks],
    }


def _side(seen: "Seen", where: str) -> dict[str, Any]:
    """The encoder, the decoder, or the decoder's look across."""
    queries, keys = seen.names(where)
    stations = [_station(look, where == "decoder") for look in seen.looks[where]]
    return {
        "name": where,
        "norm": NORMS[where],
        "queries": queries,
        "keys": keys,
        "stations": stations,
    }


def _station(look: "Look", masked: bool) -> dict[str, Any]:
    """Its heads, each packed, and what becomes of them all for each of the T tokens."""
    heads = range(np.shape(look.query)[1])
    added = {"x": look.x, "attn_output": look.attn_output, "out": look.out}
    return {
        "heads": [_packed(_numbers(OneHead.of(look, i, masked))) for i in heads],
        "added": {name: _vectors(np.asarray(x)[0]) for name, x in added.items()},
    }


def _numbers(head: OneHead) -> dict[str, Any]:
    """What is shown of one head; (T, S) cells as rows of whole numbers."""
    shares = np.asarray(head.shares, np.float32)
    return {
        "query": _vectors(head.query),
        "key": _vectors(head.key),
        "value": _vectors(head.value),
        "mask": None if head.mask is None else head.mask.astype(int).tolist(),
        "scores": _counts(head.scores, 1000),
        "scaled": _counts(head.scaled, 1000),
        "shares": _counts(shares, 1000),
        "percents": _counts(100 * shares, 10),  # rounded apart from the share
        "output": _vectors(head.output),
    }


def _vectors(rows: np.ndarray) -> list[str]:
    if not np.isfinite(np.asarray(rows, np.float32)).all():
        raise ValueError("the model computed numbers that are not finite")
    return [vector(row, FEW_DIMS) for row in rows]


def _counts(values: np.ndarray, per_unit: int) -> list[list[int]]:
    """How many thousandths (or tenths) each value has, rounded as `format` rounds.

    A float32 times 1000 is exact in float64, and both round a tie to the even digit.
    """
    counts = np.rint(np.asarray(values, np.float32).astype(np.float64) * per_unit)
    if not (np.abs(counts) < 2**53).all():
        raise ValueError("the model computed numbers that are not finite")
    return counts.astype(np.int64).tolist()


def _packed(record: dict[str, Any]) -> str:
    """zlib, which a browser calls "deflate", in base64."""
    text = json.dumps(record, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode())).decode()
