"""What does the paper say, and where do we differ? `train.py --explain_config`.

"Attention Is All You Need" (2017), item by item. What is ours comes from the settings
and from the constants that the acting modules use, and is not typed in twice. What no
number says is a statement, and PROOFS names the test that holds it.
"""

import textwrap
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from transformer_tf.config import (
    ADAM,
    BOS_ID,
    GNMT_OFFSET,
    LAYERNORM_EPSILON,
    MASKED_SCORE,
    POSITION_BASE,
    PRESETS,
    DecodingConfig,
    embedding_stddev,
)
from transformer_tf.flags import settings_of
from transformer_tf.tables import table

Settings = dict[str, Any]  # every field of a configuration by its name

CODE = "code"  # in place of a section: the paper is silent, and its code decides
WIDTHS = (26, 7, 22, 22, 32)  # of the columns; a longer cell is broken into lines


@dataclass(frozen=True)
class Item:
    """A line of the recipe."""

    name: str
    section: str  # of the paper, or CODE
    paper: Any  # its value; (base, big) where its two models differ
    ours: Any = None  # a value, or a function from the settings to it; None = the same


class Row(NamedTuple):
    """An item for one configuration; without a `why` it is as in the paper."""

    group: str
    name: str
    section: str
    paper: str
    ours: str
    why: str


# What is ours -------------------------------------------------------------------------

setting = itemgetter


def _head_width(s: Settings) -> int:
    return s["d_model"] // s["num_heads"]


def _unless_learned(value: Any):
    return lambda s: value if s["positions"] == "sinusoidal" else "a learned table"


def _embedding_spread(s: Settings) -> float:
    return round(embedding_stddev(s["d_model"]) * s["d_model"] ** 0.5, 6)


def _pairs(s: Settings) -> str:
    source = s["pairs"] or s["train_source"] or s["dataset"]
    name = "WMT 2014" if source == "wmt14_translate/de-en" else source
    return f"{name}, {s['source_lang']} to {s['target_lang']}"


def _early_end(s: Settings) -> str:
    ends = [f"after {s['max_minutes']:g} minutes"] if s["max_minutes"] else []
    ends += [f"{s['patience']} validations without gain"] if s["patience"] else []
    return " or ".join(ends) or "never"


def _spacing(s: Settings) -> str:
    return f"{s['checkpoint_every']:,} updates"


SINES = "sine at 2i, cosine at 2i + 1"
DIVISOR = f"(({GNMT_OFFSET:g} + n) / {GNMT_OFFSET + 1:g})^α"
RATE = "d_model^-0.5 · min(step^-0.5, step · warmup^-1.5)"

RECIPE = {
    "model": [
        Item("layers a side, N", "3.1", 6, setting("num_layers")),
        Item("width, d_model", "3.1", (512, 1024), setting("d_model")),
        Item("heads, h", "3.2.2", (8, 16), setting("num_heads")),
        Item("width of a head, d_k", "3.2.2", 64, _head_width),
        Item("inner width, d_ff", "3.3", (2048, 4096), setting("d_ff")),
        Item("sub-layer", "3.1", "LayerNorm(x + Dropout(Sublayer(x)))"),
        Item("attention", "3.2.1", "softmax(Q Kᵀ / √d_k) V"),
        Item("score of what is hidden", "3.2.3", float("-inf"), MASKED_SCORE),
        Item("biases of Q, K, V, O", "3.2.2", "none", "yes"),
        Item("feed-forward", "3.3", "max(0, x W1 + b1) W2 + b2"),
        Item("embeddings", "3.4", "one matrix for source, target and softmax"),
        Item("on the way in", "3.4", "times √d_model"),
        Item("bias before the softmax", CODE, "none"),
        Item("positions", "3.5", SINES, _unless_learned(SINES)),
        Item("base of wavelengths", "3.5", 10_000, _unless_learned(POSITION_BASE)),
        Item("decoder's input", "3.1", "the output, one position later"),
        Item("decoder's first input", CODE, "a zero vector", f"id {BOS_ID}, embedded"),
        Item("longest sentence, tokens", CODE, 256, setting("max_length")),
    ],
    "initialization": [
        Item("projections, of Glorot's", CODE, 1.0, setting("projection_gain")),
        Item("embedding × √d_model, σ", CODE, 1.0, _embedding_spread),
        Item("norms and biases", CODE, "change nothing"),
        Item("epsilon of the norms", CODE, 1e-6, LAYERNORM_EPSILON),
    ],
    "data": [
        Item("sentence pairs", "5.1", "WMT 2014, en to de", _pairs),
        Item("pieces", "5.1", "byte-pair encoding", "SentencePiece unigram"),
        Item("shared vocabulary, about", "5.1", 37_000, setting("vocab_size")),
        Item("tokens an update, about", "5.1", 25_000, setting("batch_tokens")),
        Item("what is counted", "5.1", "source, and target", "target with padding"),
        Item("a batch has", "5.1", "sentences of similar length"),
    ],
    "optimizer": [
        Item("Adam, β1", "5.3", 0.9, ADAM["beta_1"]),
        Item("Adam, β2", "5.3", 0.98, ADAM["beta_2"]),
        Item("Adam, ε", "5.3", 1e-9, ADAM["epsilon"]),
        Item("clipping, weight decay", CODE, "none"),
        Item("learning rate", "5.3", RATE),
        Item("factor on it", "5.3", 1.0, setting("learning_rate_scale")),
        Item("warm-up, updates", "5.3", 4000, setting("warmup_steps")),
        Item("updates", "5.2", (100_000, 300_000), setting("max_steps")),
        Item("end before that", "5.2", "never", _early_end),
        Item("computed in", CODE, "float32", setting("precision")),
    ],
    "regularization": [
        Item("dropout, P_drop", "5.4", (0.1, 0.3), setting("dropout_rate")),
        Item("dropped from", "5.4", "sub-layer outputs, embeddings + positions"),
        Item("a rate is a multiple of", CODE, "2^-23", "2^-16"),
        Item("label smoothing, ε_ls", "5.4", 0.1, setting("label_smoothing")),
        Item("ε_ls is spread over", CODE, "the V - 1 other pieces", "all V pieces"),
    ],
    "averaging": [
        Item("checkpoints averaged", "6.1", (5, 20), setting("average_checkpoints")),
        Item("a checkpoint every", "6.1", "10 minutes", _spacing),
        Item("exported", "6.1", "the average", "it or the last weights"),
    ],
    "decoding": [
        Item("beam", "6.1", 4, setting("beam_size")),
        Item("length penalty, α", "6.1", 0.6, setting("length_penalty")),
        Item("divisor of log p", "6.1", "((5 + n) / 6)^α", DIVISOR),
        Item("tokens beyond the source", "6.1", 50, setting("extra_length")),
        Item("tokens at most", "6.1", "no other limit", setting("max_length")),
        Item("search ends", "6.1", "early where possible"),
        Item("finished hypotheses", CODE, "among the 2 × beam best", "every live one"),
    ],
}

# Why ours differs, where you have not chosen it; by preset where it depends on that.
SIZE = {"tiny": "a size for first steps", "small": "a size for a laptop"}
WHY = {
    "layers a side, N": SIZE,
    "width, d_model": SIZE,
    "heads, h": SIZE,
    "width of a head, d_k": SIZE,
    "inner width, d_ff": SIZE,
    "score of what is hidden": (
        "its share is 0 as well, and a row with nothing to see stays a number"
    ),
    "biases of Q, K, V, O": (
        "as in Keras's layer, which ours equals; 0.06 % of the weights of base"
    ),
    "decoder's first input": "it learns what a start is, and is no padding",
    "projections, of Glorot's": (
        "the norm follows the sum: what is added at the start drowns the token; with "
        "small updates this learns faster (README)"
    ),
    "sentence pairs": "any will do; scores compare only on the same ones",
    "pieces": "learns from bare text (Japanese has no spaces) and runs in the export",
    "shared vocabulary, about": "a small corpus has no use for more",
    "tokens an update, about": "at this size many small updates beat few large ones",
    "what is counted": (
        "cells are what takes time and memory; the source may have twice as many"
    ),
    "factor on it": "small updates are noisier and bear less",
    "warm-up, updates": {
        "tiny": "it is to have learnt something within minutes",
        "small": "an hour on two cores is 3,000 updates",
    },
    "updates": "hours on two cores, not days on eight GPUs",
    "computed in": (
        "bfloat16 only where it is fast; weights, norms, softmax, logits and loss stay "
        "float32"
    ),
    "a rate is a multiple of": "16 random bits a number take half the time",
    "ε_ls is spread over": "needs no table of targets; differs by less than 1e-3",
    "a checkpoint every": (
        "the same on every machine; 10 minutes were 1,500 updates of the paper's base, "
        "600 of its big model"
    ),
    "exported": (
        "whichever has the lower validation loss: in short runs the average reaches "
        "back to a worse model"
    ),
    "tokens at most": "no request can cost a server more",
    "finished hypotheses": "a score is that of a whole sentence, end token included",
}

# Statements, and the tests that hold them.
PROOFS = {
    "sub-layer": "test_encoder_layer_is_the_articles_four_lines",
    "attention": "test_article_station_tomorrow_looks_at_weather",
    "biases of Q, K, V, O": "test_parameter_count_of_base_is_exact",
    "feed-forward": "test_encoder_layer_is_the_articles_four_lines",
    "embeddings": "test_one_matrix_serves_three_places",
    "on the way in": "test_encoder_embeds_scales_adds_positions",
    "bias before the softmax": "test_one_matrix_serves_three_places",
    "positions": "test_positions_interleave_sine_and_cosine_from_position_zero",
    "decoder's input": "test_five_rows_by_hand",
    "decoder's first input": "test_five_rows_by_hand",
    "norms and biases": "test_norms_and_biases_change_nothing_at_first",
    "pieces": "test_pieces_are_unigram",
    "what is counted": "test_budget",
    "a batch has": "test_little_padding",
    "clipping, weight decay": "test_the_optimizer_is_that_of_the_report",
    "learning rate": "test_rate_is_the_papers",
    "dropped from": "test_dropout_is_where_the_paper_has_it",
    "a rate is a multiple of": "test_a_dropout_rate_has_16_bits",
    "ε_ls is spread over": "test_loss_equals_a_calculation_by_hand",
    "exported": "test_the_better_of_average_and_last_weights_is_exported",
    "search ends": "test_it_stops_as_soon_as_nothing_better_can_come",
    "finished hypotheses": "test_a_beam_wide_enough_equals_brute_force",
}

# The report ---------------------------------------------------------------------------


def explain_config(preset: str, settings: Settings) -> str:
    """The report for a configuration.

    Args:
        preset: the name of the preset that it began with.
        settings: every field by name, those of the data too.
    """
    rows = compare(preset, settings)
    model = _model_of(preset)
    cells = [["", "section", f"paper, {model}", f"ours, {preset}", "why"]]
    for group in RECIPE:
        cells += [[""] * 5, [group, "", "", "", ""]]
        for row in (row for row in rows if row.group == group):
            ours = row.ours if row.why else "="
            cells += _lines(f"  {row.name}", row.section, row.paper, ours, row.why)
    same = sum(not row.why for row in rows)
    return (
        f"{table(cells)}\n\n{same} of {len(rows)} as in the paper ({model} model, "
        f"English to German).\n{CODE}: the paper is silent; what its code does "
        "(tensor2tensor, transformer_base_v1)."
    )


def compare(preset: str, settings: Settings) -> list[Row]:
    """Every item of the recipe for a configuration; arguments as `explain_config`."""
    groups = (PRESETS[preset].model, PRESETS[preset].training, DecodingConfig())
    defaults = {**settings, **settings_of(groups)}
    column = ("base", "big").index(_model_of(preset))
    rows = []
    for group, items in RECIPE.items():
        for item in items:
            paper = item.paper[column] if isinstance(item.paper, tuple) else item.paper
            ours, default = (_ours(item, paper, s) for s in (settings, defaults))
            if ours == paper:
                why = ""
            elif ours != default:
                why = f"chosen by you; {preset} has {_text(default)}"
            else:
                why = _reason(item.name, preset)
            texts = (_text(paper), _text(ours))
            rows.append(Row(group, item.name, item.section, *texts, why))
    return rows


def _model_of(preset: str) -> str:
    """Which of the paper's models a preset is measured by."""
    return "big" if preset == "big" else "base"


def _reason(name: str, preset: str) -> str:
    why = WHY[name]
    return why if isinstance(why, str) else why[preset]


def _ours(item: Item, paper: Any, settings: Settings) -> Any:
    if item.ours is None:
        return paper
    return item.ours(settings) if callable(item.ours) else item.ours


def _text(value: Any) -> str:
    """4,000, 0.1, 1e-09, or the words themselves."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _lines(*row: str) -> list[list[str]]:
    """The lines that the cells of a row need."""
    cells = [
        textwrap.wrap(cell, width) or [""]
        for cell, width in zip(row, WIDTHS, strict=True)
    ]
    return [list(line) for line in zip_longest(*cells, fillvalue="")]
