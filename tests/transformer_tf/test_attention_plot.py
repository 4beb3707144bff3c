"""The picture shows the shares as they are, in letters that are really drawn."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text

from transformer_tf import fonts
from transformer_tf.attention import causal_mask, scaled_dot_product_attention
from transformer_tf.attention_plot import (
    DPI,
    Sheet,
    View,
    attention_figure,
    plot_attention,
)
from transformer_tf.config import PRESETS, ConfigError
from transformer_tf.explain import Look, Seen, see
from transformer_tf.model import build_transformer

ROOT = Path(__file__).parents[2]
# A missing glyph is a warning.
pytestmark = pytest.mark.filterwarnings("error")

HOSTILE = [
    *("$x_1$", "$", "\\frac{1}{2}", "a_b^c", "<script>", "<0xF0>", "", " ", "▁", "▁は"),
    *("a\u202eb", "\u2066", "a\nb", "a\r\n\tb", "\0", "\ud800", "か\u3099", "☀\ufe0f"),
    *(
        "😀",
        "👨‍👩‍👧",
        "𠮷野家",
        "한국",
        "汉语",
        "مرحبا",
        "שלום",
        "ไทย",
        "\ue000",
        "語" * 300,
    ),
]


@pytest.fixture(autouse=True)
def no_font_is_looked_for_in_vain(caplog):
    yield
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def seen_as(shares, queries, keys, mask=None):
    """Tokens that looked at each other: (H, T, S) shares, in two stations."""
    shares = np.asarray(shares)[None]
    mask = np.ones((1, 1, 1, 1), bool) if mask is None else mask
    nothing = dict.fromkeys(Look._fields)
    look = Look(**nothing | {"mask": mask, "steps": SimpleNamespace(shares=shares)})
    places = {"encoder": [look] * 2, "decoder": [look] * 2, "cross": [look] * 2}
    return Seen(source=keys, fed=queries, target=queries, looks=places, logits=None)


def made_up(heads, queries, keys, mask=None):
    """With any shares; `queries` and `keys` are names, or how many there are."""
    names = [
        [f"▁天{i}" for i in range(side)] if isinstance(side, int) else side
        for side in (queries, keys)
    ]
    scores = np.random.default_rng(1).normal(size=(heads, *map(len, names)), scale=3)
    scores = np.exp(scores if mask is None else np.where(mask[0], scores, -np.inf))
    return seen_as(scores / scores.sum(-1, keepdims=True), *names, mask)


def figure_of(seen, where="cross", layer=1, head=None, lang="ja"):
    return attention_figure(seen, where=where, layer=layer, head=head, lang=lang)


def plot(seen, path, where="cross", layer=1, head=None, lang="ja"):
    plot_attention(seen, path, where=where, layer=layer, head=head, lang=lang)


def texts_of(artist):
    return [text.get_text() for text in artist.findobj(Text) if text.get_text()]


def panels_of(figure):
    """The axes of the heads; the scale comes last."""
    return figure.axes[:-1]


def pixels_of(figure):
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba()).copy()


def size_of(png):
    """Width and height, as the head of the file says."""
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


# --- The article -------------------------------------------------------------------


@pytest.fixture(scope="module")
def station():
    """「明日」が「明日」「天気」「は」を見る。"""
    query = np.array([[2, 1, 0, 0]], np.float32)
    key = np.array([[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 0, 1]], np.float32)
    steps = scaled_dot_product_attention(query, key, np.eye(3, dtype=np.float32), None)
    return seen_as([np.asarray(steps.shares)], ["明日"], ["明日", "天気", "は"])


def test_the_station_of_the_article(station):
    figure = figure_of(station, layer=2, head=1)
    [panel] = panels_of(figure)
    assert [text.get_text() for text in panel.texts] == ["17.1 %", "76.6 %", "6.3 %"]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["明日"]
    names = [text.get_text() for text in panel.get_xticklabels()]
    assert names == ["明日", "天気", "は"]
    words = texts_of(figure)
    assert "訳文が原文を見る（Decoder → Encoder）　駅 2・ヘッド 1" in words
    assert {"見る側（Query）", "見られる側（Key）", "③ 割合（softmax）"} <= set(words)
    assert {"0 %", "50 %", "100 %"} <= set(words)


def test_the_station_in_english(station):
    words = texts_of(figure_of(station, layer=2, head=1, lang="en"))
    title = "The translation looks at the source (decoder → encoder), layer 2, head 1"
    assert {title, "who looks (Query)", "who is looked at (Key)"} <= set(words)


# --- The shares --------------------------------------------------------------------


def test_all_heads_or_a_large_one():
    seen = made_up(8, 4, 5)
    shares = seen.looks["cross"][0].steps.shares[0]
    figure = figure_of(seen)
    assert [panel.get_title("left") for panel in panels_of(figure)] == [
        f"ヘッド {number}" for number in range(1, 9)
    ]
    for panel, expected in zip(panels_of(figure), shares, strict=True):
        np.testing.assert_allclose(panel.images[0].get_array(), expected, rtol=1e-6)
        assert panel.images[0].get_clim() == (0, 1)
    [panel] = panels_of(figure_of(seen, head=3))
    np.testing.assert_allclose(panel.images[0].get_array(), shares[2], rtol=1e-6)


def test_the_shares_are_those_of_a_model():
    model = build_transformer(PRESETS["tiny"].model, 304)
    tokenizer = SimpleNamespace(
        tokenize=lambda texts: tf.ragged.constant([[5, 6, 7]]),
        pieces=lambda ids: [f"#{number}" for number in ids],
    )
    seen = see("明日は天気", [8, 9, 3], model, tokenizer)
    for where, names in {"encoder": 4, "decoder": 3, "cross": 4}.items():
        figure = figure_of(seen, where, layer=2)
        expected = np.asarray(seen.looks[where][1].steps.shares)[0]
        for panel, shares in zip(panels_of(figure), expected, strict=True):
            shown = panel.images[0].get_array()
            np.testing.assert_allclose(shown.filled(0), shares, rtol=1e-6)
            assert shown.mask.any() == (where == "decoder")
            assert shown.shape[1] == names


def test_what_may_not_be_looked_at_is_grey_and_has_no_number():
    mask = np.asarray(causal_mask(3))
    figure = figure_of(made_up(1, 3, 3, mask), where="decoder", head=1)
    [panel] = panels_of(figure)
    assert (panel.images[0].get_array().mask == ~mask[0, 0]).all()
    places = {text.get_position()[::-1] for text in panel.texts}
    assert places == {(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)}
    assert "灰色：マスク（見ない）" in texts_of(figure)
    assert "灰色：マスク（見ない）" not in texts_of(figure_of(made_up(1, 3, 3)))


def test_a_darker_cell_is_a_larger_share():
    [panel] = panels_of(figure_of(made_up(1, 2, 2), head=1))
    image = panel.images[0]
    colors = image.cmap(image.norm(np.linspace(0, 1, 101)))[:, :3]
    assert (np.diff(colors @ [0.2126, 0.7152, 0.0722]) < 0).all()


def test_numbers_are_written_where_there_is_room():
    for count, expected in {5: 25, 20: 400, 60: 0}.items():
        [panel] = panels_of(figure_of(made_up(1, count, count), head=1))
        assert len(panel.texts) == expected


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 0}, "--layer is 0, expected 1 to 2"),
        ({"layer": 3}, "--layer is 3, expected 1 to 2"),
        ({"head": 0}, "--head is 0, expected 1 to 4"),
        ({"head": 5}, "--head is 5, expected 1 to 4"),
    ],
)
def test_what_is_not_there_is_one_line(choice, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        plot(made_up(4, 2, 2), tmp_path / "a.png", **choice)
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


# --- The letters -------------------------------------------------------------------


def pixels_with(name):
    return pixels_of(figure_of(seen_as([[[1.0]]], [name], ["x"]), head=1))


def test_japanese_is_drawn():
    """Boxes in place of letters would look the same."""
    tomorrow, other = pixels_with("明日"), pixels_with("日明")
    assert tomorrow.shape == other.shape
    assert (tomorrow != other).any()
    assert (pixels_with("\ue000\ue001") == pixels_with("\ue001\ue000")).all()


def test_every_letter_of_a_picture_is_in_a_font():
    files = [findfont(FontProperties(family=name)) for name in fonts.FAMILIES]
    known = [get_font(file) for file in files]
    assert [font.family_name for font in known] == list(fonts.FAMILIES)
    masked = made_up(2, 2, 2, np.asarray(causal_mask(2)))
    figures = [
        figure_of(masked, where, head=head, lang=lang)
        for lang in ("ja", "en")
        for where in ("encoder", "decoder", "cross")
        for head in (None, 1)
    ]
    figures.append(figure_of(made_up(1, HOSTILE, HOSTILE)))
    letters = {c for figure in figures for text in texts_of(figure) for c in text}
    assert {"見", "割", "灰", "→", "□", "😀"} <= letters
    assert all(any(f.get_char_index(ord(c)) for f in known) for c in letters)


def test_awkward_names_are_on_one_line_and_no_mathematics():
    figure = figure_of(made_up(1, HOSTILE, HOSTILE), head=1)
    names = [text.get_text() for text in panels_of(figure)[0].get_yticklabels()]
    shown = dict(zip(HOSTILE, names, strict=True))
    for same in ("$x_1$", "\\frac{1}{2}", "<script>", "▁は", "😀", "", " "):
        assert shown[same] == same
    assert shown["a\u202eb"] == "a□b"
    assert shown["a\r\n\tb"] == "a□□□b"
    assert shown["𠮷野家"] == "□野家"
    assert shown["語" * 300] == "語" * 10 + "…"
    assert not any(t.get_parse_math() for t in figure.findobj(Text) if t.get_text())
    pixels_of(figure)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30))
def test_any_name_can_be_drawn(text):
    drawn = fonts.drawable(text)
    assert drawn.isprintable()
    assert fonts.drawable(drawn) == drawn
    assert 0 <= fonts.widest([drawn], 10) < 25 * 10 / 72


@settings(max_examples=3, deadline=None)
@given(st.lists(st.text(max_size=8), min_size=20, max_size=20))
def test_any_names_make_a_picture(names):
    pixels_of(figure_of(made_up(1, names, names[:3]), head=1))


def test_without_the_font_it_says_what_to_install(monkeypatch):
    fonts.font_files.cache_clear()
    monkeypatch.setattr(fonts, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib-fontja.*pip install"):
        fonts.font_files()


# --- The sheet ---------------------------------------------------------------------


def boxes_of(figure):
    """(N, 2, 2): lower left and upper right corner of each text, in pixels."""
    figure.draw_without_rendering()
    texts = figure.findobj(lambda artist: isinstance(artist, Text))
    texts = [text for text in texts if text.get_visible() and text.get_text().strip()]
    return np.array([text.get_window_extent().get_points() for text in texts])


@pytest.mark.parametrize("where", ["cross", "decoder"])
@pytest.mark.parametrize(
    ("heads", "tokens", "head"),
    [(1, 1, 1), (1, 2, 1), (3, 1, None), (4, 5, None), (8, 20, None), (1, 60, 1)],
)
def test_nothing_is_cut_and_nothing_overlaps(heads, tokens, head, where):
    mask = np.asarray(causal_mask(tokens)) if where == "decoder" else None
    lang = "en" if where == "decoder" else "ja"
    seen = made_up(heads, tokens, tokens, mask)
    figure = figure_of(seen, where, head=head, lang=lang)
    boxes = boxes_of(figure)
    assert (boxes >= 0).all()
    assert (boxes <= figure.bbox.size).all()
    # Letters need not fill their line: a tenth of a box may lie on the next.
    size = boxes[:, 1] - boxes[:, 0]
    low, high = boxes[:, 0] + size / 20, boxes[:, 1] - size / 20
    apart = (high[:, None] <= low[None]) | (high[None] <= low[:, None])
    assert (apart.any(-1) | np.eye(len(boxes), dtype=bool)).all()


@pytest.mark.parametrize("tokens", [5, 60])
def test_each_token_of_a_sentence_is_named(tokens):
    for head in (None, 1):
        figure = figure_of(made_up(4, tokens, tokens), head=head)
        left, below = panels_of(figure)[0], panels_of(figure)[-1]
        assert len(left.get_yticklabels()) == len(below.get_xticklabels()) == tokens
        assert left.get_yticklabels()[0].get_fontsize() >= 5.5


@pytest.mark.parametrize(
    ("heads", "down", "across"),
    [(1, 256, 256), (16, 256, 256), (256, 2, 2), (7, 60, 9), (2, 4096, 1)],
)
def test_a_sheet_stays_small(heads, down, across):
    seen = made_up(heads, down, across)
    size = np.array(Sheet.of(View.of(seen, "cross", 1, None, "ja")).size) * DPI
    assert (size > 300).all() and (size < 4000).all()


def test_names_that_would_be_too_small_are_left_out(tmp_path):
    seen = made_up(1, 256, 256)
    [panel] = panels_of(figure_of(seen))
    names = [text.get_text() for text in panel.get_xticklabels()]
    assert names == [f"▁天{i}" for i in range(0, 256, 2)]
    plot(seen, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size < 1_000_000


# --- The file ----------------------------------------------------------------------


def test_the_file_is_a_png_and_settings_stay(tmp_path, station):
    before = dict(matplotlib.rcParams)
    plot(station, tmp_path / "a.png", head=1)
    assert dict(matplotlib.rcParams) == before
    figure = figure_of(station, head=1)
    assert size_of(tmp_path / "a.png") == tuple(int(n) for n in figure.bbox.size)
    assert os.listdir(tmp_path) == ["a.png"]


def test_neither_a_display_nor_settings_matter(tmp_path, station):
    """The same bytes where somebody wants TeX, grids and windows."""
    np.save(tmp_path / "shares.npy", station.looks["cross"][0].steps.shares[0])
    (tmp_path / "matplotlibrc").write_text(
        "text.usetex: True\naxes.grid: True\nfont.size: 40\nsavefig.dpi: 10\n"
        "savefig.bbox: tight\nbackend: TkAgg\nimage.cmap: jet\n"
    )
    script = """
import sys
from types import SimpleNamespace
import numpy as np
from transformer_tf.attention_plot import plot_attention
look = SimpleNamespace(
    steps=SimpleNamespace(shares=np.load("shares.npy")[None]),
    mask=np.ones((1, 1, 1, 1), bool),
)
names = ["明日"], ["明日", "天気", "は"]
seen = SimpleNamespace(looks={"cross": [look]}, names=lambda where: names)
plot_attention(seen, "there.png", where="cross", layer=1, head=1, lang="ja")
assert "matplotlib.pyplot" not in sys.modules
assert "matplotlib_fontja" not in sys.modules
"""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND")
    }
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    plot(station, tmp_path / "here.png", head=1)
    here, there = (
        (tmp_path / f"{name}.png").read_bytes() for name in ("here", "there")
    )
    assert here == there


@pytest.mark.parametrize(
    ("name", "error"), [("no/a.png", FileNotFoundError), ("folder", IsADirectoryError)]
)
def test_what_cannot_be_written_leaves_nothing(name, error, tmp_path, station):
    (tmp_path / "folder").mkdir()
    with pytest.raises(error):
        plot(station, tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
