import ast
import dataclasses
import inspect
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from commands import refused, train
from small_training import TINY, make_trainer

from data_pipeline.corpus import DataConfig
from data_pipeline.tokenizer import train_vocabulary
from transformer_tf.attention import MultiHeadAttention, scaled_dot_product_attention
from transformer_tf.config import PRESETS, DecodingConfig
from transformer_tf.decoding import length_penalty_divisor
from transformer_tf.dropout import Dropout
from transformer_tf.flags import settings_of
from transformer_tf.layers import positional_encoding
from transformer_tf.model import build_transformer
from transformer_tf.paper import CODE, PROOFS, RECIPE, WHY, compare, explain_config

TESTS = Path(__file__).parents[1]

# What no setting makes the paper's.
ALWAYS = {
    "score of what is hidden",
    "biases of Q, K, V, O",
    "decoder's first input",
    "pieces",
    "what is counted",
    "a rate is a multiple of",
    "ε_ls is spread over",
    "a checkpoint every",
    "exported",
    "tokens at most",
    "finished hypotheses",
}
BY_DEFAULT = {"sentence pairs", "computed in"}  # other pairs; bfloat16 where it is fast
OF_SMALL = {
    "layers a side, N",
    "width, d_model",
    "heads, h",
    "inner width, d_ff",
    "projections, of Glorot's",
    "shared vocabulary, about",
    "tokens an update, about",
    "factor on it",
    "warm-up, updates",
    "updates",
}


def settings_for(preset, **changes):
    parts = (PRESETS[preset].model, PRESETS[preset].training, DecodingConfig())
    return {**settings_of([DataConfig(), *parts]), **changes}


def rows_of(preset, **changes):
    """The rows by name, for a preset with some settings changed."""
    rows = compare(preset, settings_for(preset, **changes))
    named = {row.name: row for row in rows}
    assert len(named) == len(rows)
    return named


def differing(rows):
    return {name for name, row in rows.items() if row.why}


# What differs -------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["base", "big"])
def test_base_and_big_differ_in_no_number_that_can_be_set(preset):
    assert differing(rows_of(preset)) == ALWAYS | BY_DEFAULT


def test_what_small_and_tiny_make_smaller():
    assert differing(rows_of("small")) == ALWAYS | BY_DEFAULT | OF_SMALL
    narrow = {"width of a head, d_k"}
    assert differing(rows_of("tiny")) == ALWAYS | BY_DEFAULT | OF_SMALL | narrow


def test_nothing_but_the_statements_is_left_for_the_papers_own_run():
    flags = dict(
        dataset="wmt14_translate/de-en",
        source_lang="en",
        target_lang="de",
        precision="float32",
    )
    assert differing(rows_of("base", **flags)) == ALWAYS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_row_has_a_reason_if_and_only_if_it_differs(preset):
    for row in rows_of(preset).values():
        assert bool(row.why) == (row.ours != row.paper), row
        assert re.fullmatch(rf"\d\.\d(\.\d)?|{CODE}", row.section), row
        assert "chosen by you" not in row.why


def test_big_is_measured_by_the_big_model_and_the_others_by_base():
    columns = {
        preset: [rows_of(preset)[name].paper for name in ("updates", "dropout, P_drop")]
        for preset in PRESETS
    }
    base = ["100,000", "0.1"]
    assert columns == dict(tiny=base, small=base, base=base, big=["300,000", "0.3"])


# Settings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "changes", "name", "ours", "why"),
    [
        ("base", dict(dropout_rate=0.2), "dropout, P_drop", "0.2", "base has 0.1"),
        ("small", dict(warmup_steps=77), "warm-up, updates", "77", "small has 1,000"),
        ("big", dict(d_model=512), "width of a head, d_k", "32", "big has 64"),
        ("base", dict(positions="learned"), "positions", "a learned table", "2i + 1"),
        ("base", dict(max_minutes=5), "end before that", "after 5 minutes", "never"),
        ("base", dict(checkpoint_every=9), "a checkpoint every", "9 updates", "500"),
        ("base", dict(precision="float16"), "computed in", "float16", "base has auto"),
        ("base", dict(beam_size=1), "beam", "1", "base has 4"),
    ],
)
def test_what_you_chose_is_shown_as_yours(preset, changes, name, ours, why):
    row = rows_of(preset, **changes)[name]
    assert row.ours == ours
    assert row.why.startswith("chosen by you; ") and why in row.why


def test_what_you_chose_as_in_the_paper_needs_no_reason():
    assert rows_of("small", warmup_steps=4000)["warm-up, updates"].why == ""
    assert rows_of("tiny", d_model=256)["width of a head, d_k"].why == ""


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, "tatoeba_ja_en, ja to en"),
        (dict(pairs="my.tsv"), "my.tsv, ja to en"),
        (dict(train_source="a.ja", train_target="a.en"), "a.ja, ja to en"),
        (dict(pairs="p.tsv", dataset="wmt14_translate/de-en"), "p.tsv, ja to en"),
    ],
)
def test_the_pairs_are_those_that_are_read(changes, ours):
    assert rows_of("small", **changes)["sentence pairs"].ours == ours


def test_every_setting_that_the_report_reads_moves_its_row():
    """A row that a setting decides must follow it: each is changed in turn."""
    changed = dict(
        num_layers=3, d_model=320, num_heads=2, d_ff=99, dropout_rate=0.25,
        positions="learned", projection_gain=0.7, max_length=99, vocab_size=999,
        batch_tokens=999, max_steps=99, max_minutes=9.0, patience=9, warmup_steps=99,
        learning_rate_scale=0.9, label_smoothing=0.2, precision="bfloat16",
        checkpoint_every=99, average_checkpoints=3, beam_size=2, length_penalty=0.9,
        extra_length=9, dataset="other", pairs="other", train_source="other",
        source_lang="fr", target_lang="fr",
    )  # fmt: skip
    before = rows_of("base")
    for field, value in changed.items():
        after = rows_of("base", **{field: value})
        assert any(after[name].ours != row.ours for name, row in before.items()), field
    silent = set(settings_for("base")) - set(changed)
    for field in silent:
        after = rows_of("base", **{field: "changed"})
        assert after == before, field


# The report and what acts -------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer():
    return make_trainer(model=dataclasses.replace(TINY, num_layers=2, dropout_rate=0.1))


@pytest.fixture(scope="module")
def base():
    return rows_of("base")


def test_the_optimizer_is_that_of_the_report(trainer, base):
    optimizer = trainer.optimizer
    assert optimizer.beta_1 == float(base["Adam, β1"].ours)
    assert optimizer.beta_2 == float(base["Adam, β2"].ours)
    assert optimizer.epsilon == float(base["Adam, ε"].ours)
    for name in ("clipnorm", "global_clipnorm", "clipvalue", "weight_decay"):
        assert getattr(optimizer, name) is None, name  # clipping, weight decay: none


def stations_of(model):
    return [*model.encoder.enc_layers, *model.decoder.dec_layers]


def layers_in(station, kind):
    return [part for part in vars(station).values() if isinstance(part, kind)]


def test_norms_and_biases_change_nothing_at_first(trainer, base):
    norms = [
        getattr(station, name)
        for station in stations_of(trainer.model)
        for name in ("layernorm1", "layernorm2", "layernorm3")
        if hasattr(station, name)
    ]
    assert len(norms) == 2 * 2 + 2 * 3
    assert {norm.epsilon for norm in norms} == {
        float(base["epsilon of the norms"].ours)
    }
    fresh = build_transformer(TINY)
    for weight in fresh.weights:
        if weight.path.endswith(("beta", "bias")):
            assert not np.any(weight), weight.path
        if weight.path.endswith("gamma"):
            assert np.all(np.equal(weight, 1)), weight.path


def test_dropout_is_where_the_paper_has_it(trainer):
    """Every dropout of a model has a state of its own, so that none can hide."""
    model = trainer.model
    dropouts = [model.encoder.dropout, model.decoder.dropout]  # embeddings + positions
    for station in stations_of(model):
        behind = layers_in(station, Dropout)
        # One behind each attention, one behind the feed-forward network.
        assert len(behind) == len(layers_in(station, MultiHeadAttention)) + 1
        dropouts += behind
    assert len(trainer.update.dropout_states()) == len(dropouts) == 2 + 2 * 2 + 2 * 3
    assert {layer.rate for layer in dropouts} == {0.1}


def test_a_dropout_rate_has_16_bits():
    for rate in (0.1, 0.3, 0.5):
        kept = Dropout(rate)(np.ones(2**18, np.float32), training=True)
        levels = 2**16 * (1 - 1 / np.max(kept))  # of what was kept, enlarged
        assert levels == pytest.approx(round(rate * 2**16), abs=0.02)


def test_the_numbers_nobody_sets_are_those_that_act(base):
    hidden = scaled_dot_product_attention(
        np.ones((1, 1), np.float32),
        np.zeros((2, 1), np.float32),
        np.zeros((2, 1), np.float32),
        np.array([[True, False]]),
    )
    assert np.array(hidden.shares).tolist() == [[1, 0]]
    assert math.isinf(float(base["score of what is hidden"].paper))

    longest = positional_encoding(2, 512)[0, 1, -2]  # sin(1 / base^(510 / 512))
    wavelengths = float(base["base of wavelengths"].ours.replace(",", ""))
    assert longest == pytest.approx(math.sin(wavelengths ** (-510 / 512)))

    formula = base["divisor of log p"].ours.replace("^", "**")
    for n, alpha in ((1, 0.6), (7, 0.6), (20, 1.0)):
        value = eval(formula, {"n": n, "α": alpha})
        assert float(length_penalty_divisor(n, alpha)) == pytest.approx(value)


def test_pieces_are_unigram(base):
    default = inspect.signature(train_vocabulary).parameters["model_type"].default
    assert base["pieces"].ours == f"SentencePiece {default}"


def test_every_statement_has_a_test_that_holds_it():
    tests = {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert set(PROOFS.values()) <= tests
    items = [item for group in RECIPE.values() for item in group]
    assert {*PROOFS, *WHY} <= {item.name for item in items}
    for item in items:
        typed_in = item.ours is None or isinstance(item.ours, str)
        if typed_in and item.name != "divisor of log p":
            assert item.name in PROOFS, item.name


# The command --------------------------------------------------------------------------


def test_the_report_fits_a_screen_and_counts_itself():
    for preset in PRESETS:
        report = explain_config(preset, settings_for(preset))
        lines = report.split("\n")
        assert max(map(len, lines)) <= 120
        rows = rows_of(preset)
        same = len(rows) - len(differing(rows))
        assert f"\n{same} of {len(rows)} as in the paper" in report
        assert sum(re.search(r"  =$", line) is not None for line in lines) == same
        assert [line for line in lines if line in RECIPE] == list(RECIPE)


def test_the_command_prints_it_at_once_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seconds = []
    for _ in range(2):
        before = os.times()
        start = time.monotonic()
        result = train("--explain_config", "--preset", "base")
        assert time.monotonic() - start < 20  # no training
        seconds.append(os.times().children_user - before.children_user)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout == explain_config("base", settings_for("base")) + "\n"
    assert min(seconds) < 0.8  # of the processor: TensorFlow was not imported
    assert list(tmp_path.iterdir()) == []


def test_the_command_explains_a_file_and_leaves_a_run_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("another: run\n")
    file = tmp_path / "c.yaml"
    file.write_text("dropout_rate: 0.2\nwarmup_steps: 4000\n")
    flags = ["--explain_config", "--fresh", "--output_dir", run]
    result = train(*flags, "--config_path", file, "--beam_size", "2")
    assert result.returncode == 0, result.stderr
    lines = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    named = {line[0]: line[1:] for line in lines}
    yours = "chosen by you; small has "
    assert named["dropout, P_drop"] == ["5.4", "0.1", "0.2", yours + "0.1"]
    assert named["warm-up, updates"] == ["5.3", "4,000", "="]
    assert named["beam"] == ["6.1", "4", "2", yours + "4"]
    assert [path.name for path in run.iterdir()] == ["config.yaml"]
    assert (run / "config.yaml").read_text() == "another: run\n"


def test_a_wrong_setting_is_refused_before_it_is_explained():
    refused(train("--explain_config", "--num_heads", "3"), 2, "num_heads is 3")
