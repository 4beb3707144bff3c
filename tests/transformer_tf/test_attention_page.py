"""The page holds what the model computed, and nothing else can get into it."""

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_up_seen import make_seen

from transformer_tf import attention_page as module
from transformer_tf.attention import AttentionSteps
from transformer_tf.attention_page import PAGE_WORDS, attention_page
from transformer_tf.explain import Look, Seen
from transformer_tf.tables import WORDS, OneHead, number, vector

BLOCK = re.compile(r'(<script type="application/json" id="data">)(.*?)(</script>)')
HOSTILE = [
    "<script>alert(1)</script>",
    "</script>",
    "<!--<script>",
    "\"'&amp;<b onclick=x>",
    "\u202eevil\u2066",
    "\u0301",
    "e" + "\u0301" * 60,
    "\u2028",
    "$data ${state}",
    "\x00\ud800",
    "",
]


def data_of(html):
    """What the page knows, its heads unpacked."""
    data = json.loads(BLOCK.search(html)[2])
    for side in data["sides"]:
        for station in side["stations"]:
            station["heads"] = [unpack(head) for head in station["heads"]]
    return data


def unpack(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def cells(rows, spell):
    return [[spell(cell) for cell in row] for row in rows]


def test_the_station_of_the_article():
    query, key = [[2, 1, 0, 0]], [[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 0, 1]]
    value = 9 * np.eye(3)
    shares = np.exp([1, 2.5, 0]) / np.exp([1, 2.5, 0]).sum()
    steps = AttentionSteps([[2, 5, 0]], [[1, 2.5, 0]], [shares], [shares @ value])
    steps = AttentionSteps(*(np.array([[step]], np.float32) for step in steps))
    parts = (np.array([[part]], np.float32) for part in (query, key, value))
    x = np.array([query], np.float32)
    look = Look(x, *parts, np.ones((1, 1, 1, 3), bool), steps, x, 2 * x)
    seen = Seen(["明日", "天気", "は"], ["<s>"], ["</s>"], {}, None)
    looks = {"encoder": [look], "decoder": [look], "cross": [look]}
    data = data_of(attention_page(seen._replace(looks=looks), "明日", "x", "ja"))
    station = data["sides"][2]["stations"][0]
    assert station["heads"] == [
        {
            "query": ["[2, 1, 0, 0]"],
            "key": ["[1, 0, 0, 0]", "[2, 1, 0, 0]", "[0, 0, 0, 1]"],
            "value": ["[9, 0, 0]", "[0, 9, 0]", "[0, 0, 9]"],
            "mask": None,
            "scores": [[2000, 5000, 0]],
            "scaled": [[1000, 2500, 0]],
            "shares": [[171, 766, 63]],
            "percents": [[171, 766, 63]],
            "output": ["[1.54, 6.90, 0.57]"],
        }
    ]
    assert station["added"]["out"] == ["[4, 2, 0, 0]"]
    assert (data["d"], data["root"], data["lang"]) == (4, "2", "ja")


def test_it_has_the_digits_of_the_command_line():
    seen = make_seen("abcd", "vwxyz")
    data = data_of(attention_page(seen, "abc", "vwx", "en"))
    for side in data["sides"]:
        name = side["name"]
        assert [side["queries"], side["keys"]] == list(seen.names(name))
        for station, look in zip(side["stations"], seen.looks[name], strict=True):
            added = {"x": look.x, "attn_output": look.attn_output, "out": look.out}
            assert station["added"] == {
                part: [vector(row, 4) for row in rows[0]]
                for part, rows in added.items()
            }
            for i, stored in enumerate(station["heads"]):
                head = OneHead.of(look, i, masked=name == "decoder")
                check_digits(stored, head)


def check_digits(stored, head):
    for name in ("query", "key", "value", "output"):
        assert stored[name] == [vector(row, 4) for row in getattr(head, name)]
    for name in ("scores", "scaled"):
        said = cells(stored[name], lambda count: number(count / 1000))
        assert said == cells(getattr(head, name), number)
    said = cells(stored["shares"], lambda count: f"{count / 1000:.3f}")
    assert said == cells(head.shares, lambda share: f"{share:.3f}")
    said = cells(stored["percents"], lambda count: f"{count / 10:.1f} %")
    assert said == cells(head.shares, lambda share: f"{100 * share:.1f} %")
    if head.mask is None:
        assert stored["mask"] is None
    else:
        assert stored["mask"] == head.mask.astype(int).tolist()
        assert 0 in stored["mask"][0]


def test_ties_are_rounded_as_python_prints_them():
    random = np.random.default_rng(1)
    ties = np.arange(-4096, 4096, dtype=np.float32) / 16384  # 0.0625 -> 0.062
    values = [*ties, *random.normal(scale=50, size=4000).astype(np.float32)]
    [counts] = module._counts([values], 1000)
    assert [number(n / 1000) for n in counts] == [number(value) for value in values]
    shares = np.abs(ties)
    [counts] = module._counts(100 * shares[None], 10)
    said = [f"{n / 10:.1f}" for n in counts]
    assert said == [f"{100 * share:.1f}" for share in shares]


@pytest.mark.parametrize("what", ["query", "scores"])
def test_numbers_that_are_none_are_refused(what):
    seen = make_seen("ab", "xy", layers=1)
    [look] = seen.looks["cross"]
    array = look.query if what == "query" else look.steps.scores
    array[0, 0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="numbers that are not finite"):
        attention_page(seen, "ab", "xy", "en")


def test_a_sentence_of_thirty_tokens_in_base_is_small():
    tokens = [f"▁token{i}" for i in range(30)]
    sizes = dict(layers=6, heads=8, head_width=64)
    html = attention_page(make_seen(tokens, tokens, **sizes), "text", "text", "ja")
    assert len(html.encode()) < 2_000_000


# --- What a sentence cannot do ------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


def test_a_hostile_sentence_changes_nothing_but_its_own_text():
    text = " ".join(HOSTILE)
    hostile = attention_page(make_seen(HOSTILE, HOSTILE), text, text, "en")
    plain = attention_page(make_seen("ab", "xy"), "ab", "xy", "en")
    assert BLOCK.sub(r"\1\3", hostile) == BLOCK.sub(r"\1\3", plain)
    assert Tags(hostile).found == Tags(plain).found
    assert BLOCK.search(hostile)[2].isascii()
    hostile.encode()  # a lone surrogate cannot keep it from being written
    data = data_of(hostile)
    assert data["text"] == data["translation"] == text
    assert data["sides"][0]["queries"] == data["target"] == HOSTILE


def test_nothing_is_asked_of_anyone():
    html = attention_page(make_seen("ab", "xy"), "ab", "xy", "en")
    assert "://" not in html
    assert "url(" not in html
    assert "@import" not in html
    for tag, attributes in Tags(html).found:
        assert tag not in ("link", "img", "iframe", "base", "object")
        assert not {"src", "href", "action", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)


def test_only_our_own_script_and_style_may_run():
    html = attention_page(make_seen("ab", "xy"), "ab", "xy", "en")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', html)
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    assert rules == {
        "default-src": "'none'",
        "style-src": allowed(style),
        "script-src": allowed(script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def allowed(text):
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def test_every_word_is_there_in_both_languages():
    assert set(PAGE_WORDS["ja"]) == set(PAGE_WORDS["en"])
    assert not set(PAGE_WORDS["ja"]) & set(WORDS["ja"])
    known = set(PAGE_WORDS["ja"]) | set(WORDS["ja"])
    folder = Path(module.__file__).parent
    template = (folder / "attention_page.html").read_text("utf-8")
    used = set(re.findall(r'data-(?:word|label)="(\w+)"', template))
    script = (folder / "attention_page.js").read_text("utf-8")
    used |= set(re.findall(r'(?:phrase|remark)\("(\w+)"', script))
    assert used <= known
    assert used > {"title", "step4", "few", "looks"}


@pytest.mark.parametrize("lang", ["ja", "en"])
def test_it_opens_in_the_language_asked_for(lang):
    html = attention_page(make_seen("ab", "xy"), "ab", "xy", lang)
    assert Tags(html).found[0] == ("html", {"lang": lang})
    assert data_of(html)["lang"] == lang
