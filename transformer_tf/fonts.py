"""Which letters can be drawn? Japanese on any machine, and a box for what nobody has.

IPAexGothic comes with matplotlib-fontja: 12,000 characters, all of JIS X 0208 and what
everyday Japanese needs beyond it, in 4 MB, with no dependency but matplotlib, under the
IPA font licence. What it lacks is taken from DejaVu Sans, which matplotlib brings.
Packages with Noto Sans CJK know more of Chinese and Korean, and are 14 to 85 MB.
"""

import functools
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font

from transformer_tf.config import ConfigError
from transformer_tf.tables import width

FAMILIES = ("IPAexGothic", "DejaVu Sans")  # asked in this order for each character
BOX = "□"
INK = "#22303c"
LONGEST = 20  # columns of a name that are shown


@functools.cache
def font_files() -> tuple[str, ...]:
    """A file for each family, after making the first one known to matplotlib.

    The package is found and not imported: at its import it makes its font the default
    of every figure.

    Raises:
        ConfigError: matplotlib-fontja is not installed.
    """
    spec = find_spec("matplotlib_fontja")
    if spec is None:
        raise ConfigError(
            "no Japanese font to draw with, expected the package matplotlib-fontja: "
            "run `pip install -e .`"
        )
    [package] = spec.submodule_search_locations
    fontManager.addfont(Path(package, "fonts", "ipaexg.ttf"))
    return tuple(findfont(FontProperties(family=name)) for name in FAMILIES)


def lettering(points: float, color: str = INK) -> dict[str, Any]:
    """How matplotlib is to set a text: as it stands, a $ is no mathematics."""
    look = {"family": list(FAMILIES), "size": points, "color": color}
    return look | {"parse_math": False, "usetex": False}


def drawable(text: str) -> str:
    """The text on one line, as long as there is room.

    A box stands for what no font has, and for what is no letter: a line feed, or a mark
    that turns the text around.
    """
    fonts = [get_font(file) for file in font_files()]
    drawn = ""
    for char in text:
        known = any(font.get_char_index(ord(char)) for font in fonts)
        drawn += char if known and char.isprintable() else BOX
        if width(drawn) > LONGEST:
            return drawn[:-1] + "…"
    return drawn


def widest(texts: Iterable[str], points: float) -> float:
    """Inches that the longest of some drawable texts takes."""
    font = get_font(font_files())
    font.set_size(points, 72)
    pixels = [0.0]
    for text in texts:
        font.set_text(text)
        pixels.append(font.get_width_height()[0] / 64)
    return max(pixels) / 72
