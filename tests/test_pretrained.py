"""The model that comes along: what it says, what it is made of, how it looks."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import yaml

from export import load_run
from transformer_tf import attention
from transformer_tf.config import BOS_ID
from transformer_tf.explain import see
from transformer_tf.exports import BUNDLED, find_export
from transformer_tf.self_check import self_check
from transformer_tf.translator import best_translations, load

ROOT = Path(__file__).parents[1]

# Sixty sentences of everyday life that we wrote, none of them in the corpus; what the
# model made of them, and how good that is: right, understandable or wrong.
with open(Path(__file__).parent / "everyday.tsv", encoding="utf-8", newline="") as file:
    EVERYDAY = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@pytest.fixture(scope="module")
def parts():
    return load_run(find_export(BUNDLED))


def test_what_it_translates_well_it_goes_on_translating_well():
    assert len(EVERYDAY) == 60
    assert {row["judged"] for row in EVERYDAY} <= {"right", "understandable", "wrong"}
    rows = [row for row in EVERYDAY if row["judged"] == "right"]
    found = best_translations(load(find_export(BUNDLED)), [row["ja"] for row in rows])
    assert {row["ja"]: text for row, text in zip(rows, found, strict=True)} == {
        row["ja"]: row["en"] for row in rows
    }


def test_it_answers_where_nothing_was_trained(tmp_path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "translate.py"), "明日は天気"],
        capture_output=True,
        encoding="utf-8",
        cwd=tmp_path,
        timeout=120,
    )
    assert result.returncode == 0
    assert result.stderr == ""
    [expected] = [row["en"] for row in EVERYDAY if row["ja"] == "明日は天気"]
    assert result.stdout == expected + "\n"
    assert os.listdir(tmp_path) == []


def test_it_is_small_and_says_where_it_comes_from():
    files = [path for path in BUNDLED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 25e6
    config = yaml.safe_load((BUNDLED / "config.yaml").read_text("utf-8"))
    assert config["dataset"] == "tatoeba_ja_en"
    assert config["data_dir"] is config["manual_dir"] is None
    card = (BUNDLED / "MODEL_CARD.md").read_text("utf-8")
    scores = json.loads((BUNDLED / "run.json").read_text("utf-8"))["test"]
    for fact in (
        "CC BY 2.0 FR",
        "Tatoeba",
        f"BLEU {scores['bleu']:.1f}",
        f"chrF2 {scores['chrf']:.1f}",
        scores["bleu_signature"],
        scores["chrf_signature"],
    ):
        assert fact in card
    last = (BUNDLED / "metrics.csv").read_text().splitlines()[-1]
    assert f"{int(last.split(',')[0]):,} updates" in card


@pytest.mark.slow
def test_a_server_takes_it(parts):
    _, _, translator = parts
    checks = dict(self_check(find_export(BUNDLED), translator))
    assert len(checks) == 6
    assert set(checks.values()) == {""}


# --- What it looked at --------------------------------------------------------------


@pytest.fixture(scope="module", params=[row["ja"] for row in EVERYDAY[::3]])
def sentence(request, parts):
    """(source ids, target ids, what was seen) of a greedy translation."""
    model, tokenizer, translator = parts
    target = translator.best_ids(request.param, beam_size=1)
    seen = see(request.param, target, model, tokenizer)
    return [*tokenizer.tokenize([request.param]).to_list()[0], 3], target, seen


def test_the_walk_ends_in_the_logits_of_the_model(parts, sentence):
    source, target, seen = sentence
    fed = [BOS_ID, *target[:-1]]
    logits = parts[0]((np.array([source]), np.array([fed])))
    np.testing.assert_allclose(seen.logits, logits, atol=1e-5)
    assert np.argmax(np.asarray(seen.logits)[0, :, 3:], -1).tolist() == [
        piece - 3 for piece in target
    ]


def test_shares_sum_to_one_and_nobody_looks_ahead(sentence):
    for where, looks in sentence[2].looks.items():
        for look in looks:
            shares = np.asarray(look.steps.shares)
            np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-5)
            if where == "decoder":
                ahead = np.triu(np.ones(shares.shape[-2:], bool), 1)
                assert (shares[..., ahead] == 0).all()


def test_decoding_looked_where_the_walk_looks(parts, sentence, monkeypatch):
    """The search's own way through the model, token by token with its cache."""
    model, _, _ = parts
    source, target, seen = sentence
    memory, source_mask = model.encode(np.array([source]))
    cache = model.init_cache(memory, 1)
    inside, used = attention.scaled_dot_product_attention, []

    def watched(*arguments, **options):
        steps = inside(*arguments, **options)
        used.append(np.asarray(steps.shares)[0, :, 0])  # (H, S)
        return steps

    monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
    for step, piece in enumerate([BOS_ID, *target[:-1]]):
        used.clear()
        logits, cache = model.decode(
            tf.constant([[piece]]), None, source_mask, cache=cache
        )
        assert 3 + np.argmax(logits[0, 0, 3:]) == target[step]
        # Each station looks at the target, then across.
        for look, shares in zip(seen.looks["cross"], used[1::2], strict=True):
            walked = np.asarray(look.steps.shares)[0, :, step]
            np.testing.assert_allclose(shares, walked, atol=1e-5)


HOSTILE = (
    "</script><script>alert(1)</script> \"'`& \u202e\u2066逆さ\u2028 $x_1$ " + "雨" * 40
)


def test_a_hostile_sentence_is_only_text(tmp_path, capsysbinary):
    import translate

    path = tmp_path / "out.html"
    assert translate.main([HOSTILE, "--attention", str(path), "--beam_size", "1"]) == 0
    assert capsysbinary.readouterr().out.count(b"\n") == 1
    _, data, script = path.read_text("utf-8").split("<script")
    assert data.startswith(' type="application/json"')
    assert "alert(1)" in data and "alert" not in script
    assert not set("\u202e\u2066\u2028") & set(data)
