"""Text in, text out: the one path that `translate.py` and TensorFlow Serving use.

A `Translator` joins a tokenizer, a model and a beam search in one graph. Saved, it is a
SavedModel that needs nothing of this package: TensorFlow and the SentencePiece ops of
TensorFlow Text run it.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
import tensorflow_text  # noqa: F401  registers the ops that an export is loaded with

from transformer_tf import flags
from transformer_tf.config import PAD_ID, ConfigError, DecodingConfig
from transformer_tf.export_check import find_faults
from transformer_tf.graphs import (
    TEXT,
    attention_graph,
    reading_graph,
    search_graph,
    translation_graph,
)
from transformer_tf.lines import Answer, translate_lines
from transformer_tf.serving import write_warmup


class ExportError(OSError):
    """A SavedModel that cannot be written, or one that is damaged."""

    exit_code = 5


class Translator(tf.Module):
    """Translates sentences; `save` makes a SavedModel of it.

    `translate` is described at `translation_graph`, `attention` at `attention_graph`.
    The signatures of the SavedModel:

        serving_default  text (B,) -> translation (B,), score (B,): the best, found with
                         the configured options
        greedy           the same with beam 1
        nbest            `translate` itself, with its options
        attention        `attention` itself: where the best translation looked

    Args:
        model: a built `Transformer`. The graph computes in the type that it was built
            with: float32 for an export that every machine can run.
        tokenizer: a `tf.Module` with `tokenize`, `detokenize` and `vocab_size`.
        config: the defaults of the options.
        dtype: what the weights are kept in. float32 are those of the model, live;
            float16 are a copy of half the size, computed with in the model's type.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: DecodingConfig | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(name="translator")
        if tokenizer.vocab_size > model.vocab_size:
            raise ConfigError(
                f"vocab_size is {model.vocab_size}, expected at least the "
                f"{tokenizer.vocab_size} pieces of the vocabulary"
            )
        self.tokenizer = tokenizer
        # The Keras model hides in the graph's closure. Tracked as an attribute it would
        # bring variables of its own along, which TF Serving does not find; these are
        # the ones that the graph reads, once.
        self.weights = [
            variable.value
            if variable.dtype == dtype
            else tf.Variable(tf.cast(variable.value, dtype), trainable=False)
            for variable in model.weights
        ]
        config = config or DecodingConfig()
        read = reading_graph(model, tokenizer)
        find = search_graph(model, self.weights, tokenizer.vocab_size)
        self.translate = translation_graph(read, find, tokenizer, config)
        self.attention = attention_graph(
            read, find, model, self.weights, tokenizer, config
        )

        def best_ids(text: str, **options: float) -> list[int]:
            """Ids of the best translation, EOS included; options as in the config."""
            chosen = dataclasses.replace(config, **options)
            source, _ = read(tf.constant([text]))
            searched = (chosen.beam_size, chosen.length_penalty, chosen.extra_length, 1)
            found = find(source, *([option] for option in searched))
            return [int(i) for i in found.ids[0, 0] if i != PAD_ID]

        self.best_ids = best_ids

    def save(self, path: str | os.PathLike) -> None:
        """Writes the SavedModel, or replaces the one that is there.

        It is written beside `path` and renamed: a server that watches sees it whole or
        not at all.

        Raises:
            ConfigError: something else than a SavedModel is in the way.
            ExportError: it cannot be written.
        """
        path = Path(path)
        if path.exists() and not is_export(path):
            raise ConfigError(
                f"{path} is in the way of the export, expected a SavedModel or "
                "nothing; move it away or choose another directory"
            )
        temporary = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tf.saved_model.save(self, str(temporary), signatures=self._signatures())
            write_warmup(temporary)
            _put_in_place(temporary, path)
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ExportError(
                f"cannot write the export {path}, expected a writable disk with room: "
                f"{one_line(error)}"
            ) from error

    def _signatures(self) -> dict[str, Callable]:
        """All of them call the graph of `translate`, which is saved only once."""

        def best(**options: tf.Tensor) -> Callable:
            @tf.function(input_signature=[TEXT])
            def signature(text):
                found = self.translate(text, **options)
                return {
                    "translation": found["translation"][:, 0],
                    "score": found["score"][:, 0],
                }

            return signature

        return {
            "serving_default": best(),
            "greedy": best(beam_size=tf.constant([1])),
            "nbest": self.translate,
            "attention": self.attention,
        }


def is_export(path: str | os.PathLike) -> bool:
    """Whether there is a SavedModel at `path`."""
    return (Path(path) / "saved_model.pb").is_file()


def load(path: str | os.PathLike) -> Any:
    """Loads what `Translator.save` wrote.

    Returns:
        An object with `translate` as in `translation_graph`, and `signatures`.

    Raises:
        ConfigError: there is no SavedModel, or one that does something else than
            translate; nothing of it is run.
        ExportError: it is damaged.
    """
    if not is_export(path):
        raise ConfigError(
            f"no model at {path}, expected a directory with saved_model.pb; "
            "`python train.py` makes one"
        )
    try:
        faults = find_faults(path)
        if faults:
            raise ConfigError(
                f"{path} is refused: it has {faults[0]} (of {len(faults)} such faults),"
                " expected an export that `python train.py` made"
            )
        loaded = tf.saved_model.load(str(path))
    except ConfigError:
        raise
    except (OSError, ValueError, IndexError, tf.errors.OpError) as error:
        raise ExportError(
            f"cannot read the export {path}, `python train.py` writes it again: "
            f"{one_line(error)}"
        ) from error
    if not hasattr(loaded, "translate"):
        raise ConfigError(
            f"{path} is a SavedModel without `translate`, expected one that "
            "`python train.py` made"
        )
    return loaded


def asker(translator: Any) -> Callable[..., Answer]:
    """The way to ask a `Translator`, or what `load` returned, about sentences.

    Returns:
        (sentences as bytes, **options of `translate`, each a number for all) -> Answer.
        It raises ExportError if the model fails.
    """

    def ask(sentences: list[bytes], **options: float) -> Answer:
        given = {name: tf.constant([value]) for name, value in options.items()}
        try:
            found = translator.translate(tf.constant(sentences, tf.string), **given)
        except tf.errors.OpError as error:
            raise ExportError(f"the model failed: {one_line(error)}") from error
        names = ("translation", "score", "truncated")
        return Answer(*(found[name].numpy().tolist() for name in names))

    return ask


def best_translations(
    translator: Any, lines: Sequence[str], **options: float
) -> list[str]:
    """The best translation of each line, as `asker` and `translate_lines` find it."""
    ask = asker(translator)
    sentences = translate_lines(ask, [line.encode() for line in lines], **options)
    return [sentence.nbest[0][0].decode(errors="replace") for sentence in sentences]


def _put_in_place(temporary: Path, path: Path) -> None:
    """Renames; a directory that is there has to be moved out of the way first."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def one_line(error: Exception) -> str:
    """TensorFlow's errors say more than their message: where each node was made."""
    return flags.one_line(getattr(error, "message", error))
