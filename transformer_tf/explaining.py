"""`--explain` and `--attention`: what a token looked at, as tables, picture or page.

The tables are of numbers of your own or of a model; both run the function that the
model uses, `scaled_dot_product_attention`.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from transformer_tf.config import ConfigError, chosen
from transformer_tf.run_directory import write_text
from transformer_tf.tables import (
    FEW_DIMS,
    NORMS,
    WORDS,
    OneHead,
    explain_token,
    table,
    vector,
)

if TYPE_CHECKING:
    from transformer_tf.explain import Seen

WHERE = ("encoder", "decoder", "cross")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of --explain and --attention, in a group of their own."""
    group = parser.add_argument_group(
        "explain", "show how a token looked at the others, in the article's four steps"
    )
    add = group.add_argument
    add("--explain", action="store_true", help="print it, of TEXT or of --q --k --v")
    add(
        "--attention",
        metavar="OUT.png|OUT.html",
        help="draw it, of TEXT: a picture of a station, or a page of all of them",
    )
    add("--where", choices=WHERE, default="encoder", help="which attention")
    add("--layer", type=int, default=1, metavar="N", help="which station, from 1")
    add("--head", type=int, metavar="N", help="which head (default: 1; picture: all)")
    add("--token", type=int, metavar="N", help="which token looks (default: 1, or all)")
    add("--all_dims", action="store_true", help="all numbers of each vector")
    add("--lang", choices=("ja", "en"), help="of the words (default: the locale's)")
    add("--q", metavar="ROWS", help='queries of your own, as "2,1,0,0;1,2,0,0"')
    add("--k", metavar="ROWS", help="keys (default: the queries)")
    add("--v", metavar="ROWS", help="values (default: the keys)")
    add("--tokens", metavar="A,B,…", help="names of the keys")
    add("--causal", action="store_true", help="nobody looks at what comes later")
    add("--no-scale", action="store_true", help="without step ②")


def language(options: argparse.Namespace) -> str:
    """That of the words: asked for, or the locale's."""
    locale = next(
        (os.environ[n] for n in ("LC_ALL", "LC_MESSAGES", "LANG") if os.environ.get(n)),
        "",
    )
    return options.lang or ("ja" if locale.startswith("ja") else "en")


# --- Numbers of your own ------------------------------------------------------------


def explain_numbers(options: argparse.Namespace) -> str:
    """The tables of --q, --k and --v.

    Raises:
        ConfigError: they do not fit together.
    """
    query = read_rows("q", options.q)
    key = read_rows("k", options.k) if options.k else query
    value = read_rows("v", options.v) if options.v else key
    if query.shape[1] != key.shape[1]:
        raise ConfigError(
            f"--k has {key.shape[1]} numbers in a row, expected the "
            f"{query.shape[1]} of --q"
        )
    if len(key) != len(value):
        raise ConfigError(f"--v has {len(value)} rows, expected the {len(key)} of --k")
    if options.causal and len(query) > len(key):
        raise ConfigError(
            f"--q has {len(query)} rows, expected at most the {len(key)} of --k"
        )
    names = (options.tokens or "").split(",") if options.tokens else None
    if names is not None and len(names) != len(key):
        raise ConfigError(f"--tokens has {len(names)}, expected {len(key)}")
    names = names or [str(n + 1) for n in range(len(key))]
    queries = names[: len(query)] + [str(n + 1) for n in range(len(names), len(query))]
    head = compute(query, key, value, options.causal, not options.no_scale)
    return "\n\n\n".join(
        explain_token(
            head,
            row,
            queries,
            names,
            lang=language(options),
            scale=not options.no_scale,
        )
        for row in chosen_rows(options, len(query), default=None)
    )


def read_rows(name: str, text: str) -> np.ndarray:
    """ "1,0;0,1" -> [[1, 0], [0, 1]]."""
    try:
        rows = [[float(x) for x in row.split(",")] for row in text.split(";")]
        array = np.array(rows, np.float32)
        if array.ndim != 2 or not np.isfinite(array).all():
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--{name} is {text!r}, expected rows of as many numbers each, as "
            '"2,1,0,0;1,2,0,0"'
        ) from None
    return array


def compute(query, key, value, causal: bool, scale: bool) -> OneHead:
    """(T, K), (S, K), (S, V) through the function that the model uses."""
    from transformer_tf.attention import causal_mask, scaled_dot_product_attention

    mask = None
    if causal:
        mask = np.asarray(causal_mask(len(key)))[0, 0, : len(query)]
    steps = scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return OneHead(query, key, value, mask, *(np.asarray(step) for step in steps))


def chosen_rows(options: argparse.Namespace, count: int, default: int | None) -> range:
    """The rows that --token asks for, from 0; all if there is no default."""
    token = default if options.token is None else options.token
    if token is None:
        return range(count)
    row = chosen("token", token, count)
    return range(row, row + 1)


# --- A model ------------------------------------------------------------------------


def check_flags(options: argparse.Namespace) -> None:
    """What can be said without a model.

    Raises:
        ConfigError: there is nothing to explain or draw, or no such kind of file.
    """
    if options.explain and not (options.q or len(options.text) == 1):
        raise ConfigError("--explain wants one TEXT, or numbers in --q")
    if options.attention is None:
        return
    if len(options.text) != 1 or options.q:
        raise ConfigError("--attention wants one TEXT")
    if Path(options.attention).suffix not in (".png", ".html"):
        raise ConfigError(
            f"--attention is {options.attention!r}, expected a name that ends in .png "
            "or .html"
        )


def draw(
    options: argparse.Namespace, seen: "Seen", text: str, translation: str
) -> None:
    """Writes the picture or the page of --attention.

    Raises:
        ConfigError: there is no such layer or head.
        OSError: it cannot be written.
    """
    path, lang = Path(options.attention), language(options)
    if path.suffix == ".html":
        from transformer_tf.attention_page import attention_page

        page = attention_page(seen, text, translation, lang)
        write_text(path, page)
    else:
        from transformer_tf.attention_plot import plot_attention

        chosen = {name: getattr(options, name) for name in ("where", "layer", "head")}
        plot_attention(seen, path, **chosen, lang=lang)


def explain_text(options: argparse.Namespace, seen: "Seen") -> str:
    """The tables of one token's attention; which one, the options say.

    Raises:
        ConfigError: there is no such layer, head or token.
    """
    where = options.where
    look = seen.looks[where][chosen("layer", options.layer, len(seen.looks[where]))]
    head = 1 if options.head is None else options.head
    head = chosen("head", head, look.query.shape[1])
    queries, keys = seen.names(where)
    [row] = chosen_rows(options, len(queries), default=1)
    dims = None if options.all_dims else FEW_DIMS
    lang = language(options)
    one_head = OneHead.of(look, head, masked=where == "decoder")
    shown = explain_token(one_head, row, queries, keys, lang=lang, dims=dims)
    return shown + "\n\n" + _added(look, where, row, lang, dims)


def _added(look: Any, where: str, row: int, lang: str, dims: int | None) -> str:
    added = WORDS[lang]["added"].format(norm=NORMS[where])
    names = {"x": look.x, "attn_output": look.attn_output, "out": look.out}
    rows = [["  " + n, vector(np.asarray(x)[0, row], dims)] for n, x in names.items()]
    return added + "\n" + table(rows)
