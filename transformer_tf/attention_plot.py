"""`translate.py --attention out.png`: a picture of who looked at whom.

A row for each token that looks, a column for each that is looked at, and shares from 0
to 100 % as shading. It needs no display, and leaves the caller's settings of matplotlib
as they are.
"""

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from transformer_tf.config import chosen
from transformer_tf.fonts import INK, drawable, lettering, widest
from transformer_tf.run_directory import write_bytes
from transformer_tf.tables import WORDS as TABLE_WORDS

if TYPE_CHECKING:
    from transformer_tf.explain import Seen

WORDS = {
    "ja": {
        "encoder": "原文が原文を見る（Encoder）",
        "decoder": "訳文が訳文を見る（Decoder）",
        "cross": "訳文が原文を見る（Decoder → Encoder）",
        "title": "{what}　駅 {layer}・{heads}",
        "head": "ヘッド {head}",
        "heads": "すべてのヘッド",
        "queries": "見る側（Query）",
        "keys": "見られる側（Key）",
        "hidden": "灰色：マスク（見ない）",
    },
    "en": {
        "encoder": "The source looks at the source (encoder)",
        "decoder": "The translation looks at itself (decoder)",
        "cross": "The translation looks at the source (decoder → encoder)",
        "title": "{what}, layer {layer}, {heads}",
        "head": "head {head}",
        "heads": "all heads",
        "queries": "who looks (Query)",
        "keys": "who is looked at (Key)",
        "hidden": "grey: masked (hidden)",
    },
}

# Inches. No side of the picture passes 28 of them, 4,000 pixels, however many tokens
# and heads there are.
DPI = 144
CELL = 0.63  # the side of a share's cell, where there is room
PANEL, PANELS = 13.0, 18.5  # the longest side of one head, and of all
READABLE_CELL = 0.5  # from here on a share is also written
RULED_CELL = 0.1  # from here on there are lines between cells
GAP = 0.4  # between heads, for the name of the lower one
MARGIN = 0.2
SIDE = 0.55  # beside the names of tokens, for what they are
HEADING, SUBHEADING = 0.6, 0.2  # for the title, and for what grey means
SCALE, SCALE_WIDTH, SCALE_LENGTH = 1.1, 0.14, 1.6  # its room, and its size

TITLE, LABEL, NOTE, SMALLEST = 12, 10, 9, 5.5  # points

SHADES = LinearSegmentedColormap.from_list(
    # Steep at the start: of many tokens each gets a few per cent.
    "shares",
    [(0, "#f4f6f8"), (0.1, "#cbdff0"), (0.4, "#6ba3d2"), (1, "#0b3563")],
).with_extremes(bad="#e5e2dc")
FAINT = "#9aa5b1"


def plot_attention(
    seen: "Seen", path: Any, *, where: str, layer: int, head: int | None, lang: str
) -> None:
    """Writes one attention as a PNG, whole or not at all.

    Args:
        seen: a sentence and its translation.
        path: of the file, replaced if it is there.
        where: "encoder", "decoder" or "cross".
        layer: which station, from 1.
        head: which head, from 1; None = all of them, side by side.
        lang: of the words, ja or en.

    Raises:
        ConfigError: there is no such layer or head, or no font.
        OSError: the file cannot be written.
    """
    picture = io.BytesIO()
    # A matplotlibrc that asks for TeX or for a grid does not mean this picture.
    with style.context("default"):
        figure = attention_figure(seen, where=where, layer=layer, head=head, lang=lang)
        figure.savefig(picture, format="png")
    write_bytes(Path(path), picture.getvalue())


def attention_figure(
    seen: "Seen", *, where: str, layer: int, head: int | None, lang: str
) -> Figure:
    """The picture that `plot_attention` writes."""
    view = View.of(seen, where, layer, head, lang)
    sheet = Sheet.of(view)
    figure = Figure(figsize=sheet.size, dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    for place in range(len(view.heads)):
        axes = figure.add_axes(sheet.panel(place))
        image = draw_shares(axes, view.shares[place], sheet.cell)
        name_tokens(axes, view, sheet, place)
        if len(view.heads) > 1:
            name = view.heads[place]
            axes.set_title(name, loc="left", pad=4, **lettering(LABEL))
    draw_scale(figure, sheet, image, TABLE_WORDS[lang]["shares"])
    write_words(figure, view, sheet)
    return figure


class View(NamedTuple):
    """What is shown."""

    shares: np.ma.MaskedArray  # (H, T, S) of the chosen heads; masked = may not look
    heads: list[str]  # H names
    queries: list[str]  # T
    keys: list[str]  # S
    title: str
    note: str
    words: dict[str, str]

    @classmethod
    def of(
        cls, seen: "Seen", where: str, layer: int, head: int | None, lang: str
    ) -> "View":
        """One attention; the arguments are those of `plot_attention`."""
        look = seen.looks[where][chosen("layer", layer, len(seen.looks[where]))]
        shares = np.asarray(look.steps.shares)[0].astype(np.float32)
        hidden = np.broadcast_to(~np.asarray(look.mask)[0], shares.shape)
        some = list(range(len(shares)))
        if head is not None:
            some = [chosen("head", head, len(shares))]
        words = WORDS[lang]
        heads = [words["head"].format(head=number + 1) for number in some]
        title = words["title"].format(
            what=words[where],
            layer=layer,
            heads=words["heads"] if head is None else heads[0],
        )
        note = words["hidden"] if hidden.any() else ""
        queries, keys = ([drawable(n) for n in names] for names in seen.names(where))
        shares = np.ma.masked_array(shares, hidden)[some]
        return cls(shares, heads, queries, keys, title, note, words)


class Sheet(NamedTuple):
    """Where it is shown, in inches from the lower left corner."""

    size: tuple[float, float]
    left: float  # of the first head
    top: float
    bottom: float  # of what columns are, under the names of tokens
    head: tuple[float, float]  # width and height of each
    span: tuple[float, float]  # of all, and at least of what rows and columns are
    columns: int  # of heads
    cell: float
    points: float  # of the names of tokens
    step: int  # every how many tokens one is named
    upright: bool  # the names of columns stand on their side

    @classmethod
    def of(cls, view: View) -> "Sheet":
        """As small as can be read, and never larger than a screen or two."""
        heads, down, across = view.shares.shape
        columns = 1 << ((heads - 1).bit_length() + 1) // 2  # 8 heads: 2 rows of 4
        rows = math.ceil(heads / columns)
        longest = max(rows * down, columns * across)
        cell = min(CELL, PANEL / max(down, across), PANELS / longest)
        points = min(LABEL, max(SMALLEST, 72 * cell * 0.75))
        step = math.ceil(points / 72 / cell)
        key_width = widest(view.keys, points)
        upright = step > 1 or key_width > 0.9 * cell

        head = (across * cell, down * cell)
        heads_down = rows * (head[1] + GAP) - GAP
        span = (
            max(columns * (head[0] + GAP) - GAP, widest([view.words["keys"]], LABEL)),
            max(heads_down, widest([view.words["queries"]], LABEL)),
        )
        left = SIDE + widest(view.queries, points)
        above = HEADING + (SUBHEADING if view.note else 0)
        above += GAP / 2 if heads > 1 else 0
        below = SIDE + (key_width if upright else points / 72)
        wide = max(left + span[0] + SCALE, widest([view.title], TITLE) + 2 * MARGIN)
        high = above + max(heads_down + below, SCALE_LENGTH + MARGIN)
        return cls(
            size=(wide, high),
            left=left,
            top=high - above,
            bottom=high - above - heads_down - below + MARGIN,
            head=head,
            span=span,
            columns=columns,
            cell=cell,
            points=points,
            step=step,
            upright=upright,
        )

    def panel(self, place: int) -> tuple[float, float, float, float]:
        """Of a head: left, bottom, width and height, as parts of the whole."""
        row, column = divmod(place, self.columns)
        x = self.left + column * (self.head[0] + GAP)
        y = self.top - self.head[1] - row * (self.head[1] + GAP)
        return self.part(x, y, *self.head)

    def part(
        self, x: float, y: float, across: float, up: float
    ) -> tuple[float, float, float, float]:
        wide, high = self.size
        return x / wide, y / high, across / wide, up / high


def draw_shares(axes: Axes, shares: np.ma.MaskedArray, cell: float) -> Any:
    """(T, S) as shading, and as numbers where they can be read."""
    image = axes.imshow(shares, cmap=SHADES, vmin=0, vmax=1, aspect="auto")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    down, across = shares.shape
    if cell >= RULED_CELL:
        lines = {"colors": "white", "linewidth": min(1.5, 4 * cell)}
        axes.vlines(np.arange(1, across) - 0.5, -0.5, down - 0.5, **lines)
        axes.hlines(np.arange(1, down) - 0.5, -0.5, across - 0.5, **lines)
    if cell >= READABLE_CELL:
        for (row, column), share in np.ndenumerate(shares.filled(np.nan)):
            if np.isnan(share):
                continue
            color = "white" if share > 0.53 else INK if share >= 0.0005 else FAINT
            look = lettering(72 * cell / 4.6, color)
            text = f"{100 * share:.1f} %"
            axes.text(column, row, text, ha="center", va="center", **look)
    return image


def name_tokens(axes: Axes, view: View, sheet: Sheet, place: int) -> None:
    """Beside the first head of each row, and under the last of each column."""
    rows = range(0, len(view.queries), sheet.step)
    columns = range(0, len(view.keys), sheet.step)
    if place % sheet.columns:
        rows = range(0)
    if place + sheet.columns < len(view.heads):
        columns = range(0)
    look = lettering(sheet.points)
    axes.set_yticks(rows, [view.queries[i] for i in rows], **look)
    turned = {"rotation": 90} if sheet.upright else {}
    axes.set_xticks(columns, [view.keys[i] for i in columns], **look, **turned)


def draw_scale(figure: Figure, sheet: Sheet, image: Any, name: str) -> None:
    """What the shades mean, beside the heads."""
    x = sheet.left + sheet.span[0] + MARGIN
    y = sheet.top - SCALE_LENGTH
    axes = figure.add_axes(sheet.part(x, y, SCALE_WIDTH, SCALE_LENGTH))
    bar = figure.colorbar(image, cax=axes)
    bar.outline.set_visible(False)
    marks = [0, 0.25, 0.5, 0.75, 1]
    bar.set_ticks(marks, labels=[f"{100 * m:.0f} %" for m in marks], **lettering(NOTE))
    axes.tick_params(length=0)
    axes.set_ylabel(name, **lettering(NOTE))


def write_words(figure: Figure, view: View, sheet: Sheet) -> None:
    """The title, and what rows and columns are."""
    wide, high = sheet.size
    across, down = sheet.span

    def write(x: float, y: float, text: str, points: float, **how: Any) -> None:
        figure.text(x / wide, y / high, text, **lettering(points), **how)

    write(MARGIN, high - MARGIN, view.title, TITLE, va="top")
    write(MARGIN, high - MARGIN - 1.6 * TITLE / 72, view.note, NOTE, va="top")
    middle = sheet.top - down / 2
    write(MARGIN, middle, view.words["queries"], LABEL, rotation=90, va="center")
    middle = sheet.left + across / 2
    write(middle, sheet.bottom, view.words["keys"], LABEL, ha="center", va="bottom")
