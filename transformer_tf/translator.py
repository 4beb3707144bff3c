"""Text in, text out: the one path that `translate.py` and TensorFlow Serving use.

A `Translator` joins a tokenizer, a model and a beam search in one graph. Saved, it is a
SavedModel that needs nothing of this package: TensorFlow and the SentencePiece ops of
TensorFlow Text run it.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
import tensorflow_text  # noqa: F401  registers the ops that an export is loaded with

from transformer_tf.config import (
    EOS_ID,
    MAX_BEAM_SIZE,
    PAD_ID,
    ConfigError,
    DecodingConfig,
)
from transformer_tf.decoding import Hypotheses, beam_search, widest
from transformer_tf.export_check import find_faults
from transformer_tf.lines import Answer
from transformer_tf.serving import write_warmup

# Whoever may ask may ask for anything, and an error would fail all the sentences that a
# server has batched together. So what is out of bounds is brought to the nearest bound.
MAX_LENGTH_PENALTY = 10.0

_TEXT = tf.TensorSpec([None], tf.string, name="text")


class ExportError(OSError):
    """A SavedModel that cannot be written, or one that is damaged."""

    exit_code = 5


class Translator(tf.Module):
    """Translates sentences; `save` makes a SavedModel of it.

    `translate` is described at `translation_graph`. The signatures of the SavedModel:

        serving_default  text (B,) -> translation (B,), score (B,): the best, found with
                         the configured options
        greedy           the same with beam 1
        nbest            `translate` itself, with its options

    Args:
        model: a built `Transformer`. The graph computes in the type that it was built
            with: float32 for an export that every machine can run.
        tokenizer: a `tf.Module` with `tokenize`, `detokenize` and `vocab_size`.
        config: the defaults of the options.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: DecodingConfig | None = None
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
        self.weights = [variable.value for variable in model.weights]
        self.translate = translation_graph(model, tokenizer, config or DecodingConfig())

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
            @tf.function(input_signature=[_TEXT])
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
        }


def translation_graph(model: Any, tokenizer: Any, config: DecodingConfig) -> Callable:
    """The `tf.function` from text to translations."""
    # As tensors, these become defaults in the signature of the SavedModel. There is one
    # for all sentences; a server that batches requests needs one for each.
    default_beam_size = tf.constant([config.beam_size])
    default_length_penalty = tf.constant([config.length_penalty], tf.float32)
    default_extra_length = tf.constant([config.extra_length])
    default_nbest = tf.constant([1])

    @tf.function(
        input_signature=[
            _TEXT,
            tf.TensorSpec([None], tf.int32, name="beam_size"),
            tf.TensorSpec([None], tf.float32, name="length_penalty"),
            tf.TensorSpec([None], tf.int32, name="extra_length"),
            tf.TensorSpec([None], tf.int32, name="nbest"),
        ]
    )
    def translate(
        text,
        beam_size=default_beam_size,
        length_penalty=default_length_penalty,
        extra_length=default_extra_length,
        nbest=default_nbest,
    ):
        """The `nbest` best translations of each sentence.

        Args:
            text: (B,) UTF-8 strings. What is longer than the model reads is cut.
            beam_size: W, 1 = greedy. This and the others: (B,), or (1,) for all.
            length_penalty: alpha of the GNMT penalty.
            extra_length: a translation ends at source length + this many tokens.
            nbest: F, at most W.

        Returns:
            translation (B, F) string and score (B, F) float32, best first, with the
            largest F; a place that no hypothesis fills has "" and minus infinity.
            truncated (B,) boolean: the sentence was cut.
        """
        beam_size = tf.clip_by_value(beam_size, 1, MAX_BEAM_SIZE)
        nbest = tf.minimum(tf.maximum(nbest, 1), beam_size)
        length_penalty = tf.where(tf.math.is_nan(length_penalty), 0.0, length_penalty)
        length_penalty = tf.clip_by_value(
            length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        extra_length = tf.clip_by_value(extra_length, 0, model.max_length)
        source, truncated = read_source(text, tokenizer, model.max_length)
        found = search(
            source,
            model,
            tokenizer.vocab_size,
            beam_size=beam_size,
            length_penalty=length_penalty,
            extra_length=extra_length,
            nbest=nbest,
        )
        rows = tf.size(found.scores)  # B * F
        ids = tf.reshape(found.ids, [rows, tf.shape(found.ids)[2]])
        translation = tokenizer.detokenize(ids)
        # The vocabulary can spell any byte, line ends too; a translation is one line.
        translation = tf.strings.regex_replace(translation, "[[:cntrl:]]+", " ")
        return {
            "translation": tf.reshape(translation, tf.shape(found.scores)),
            "score": found.scores,
            "truncated": truncated,
        }

    return translate


def read_source(
    text: tf.Tensor, tokenizer: Any, max_length: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Text (B,) -> ids (B, S), rows ended by EOS and padded; (B,) which were cut."""
    room = max_length - 1  # for EOS
    ids = tokenizer.tokenize(text)
    truncated = ids.row_lengths() > room
    ends = tf.fill([tf.size(text), 1], EOS_ID)
    source = tf.concat([ids[:, :room], ends], axis=1).to_tensor(PAD_ID)
    return source, truncated


def search(
    source: tf.Tensor,
    model: Any,
    vocab_size: int,
    *,
    beam_size: tf.Tensor,
    extra_length: tf.Tensor,
    **options: tf.Tensor,
) -> Hypotheses:
    """Source ids (B, S) -> target ids: encodes once, then decodes token by token."""
    batch_size = tf.shape(source)[0]
    memory, source_mask = model.encode(source)
    cache = model.init_cache(memory, batch_size * widest(beam_size))

    def step_fn(tokens, target, memory, step):
        # Only the cache of the target follows the beams; the source's is shared.
        projected, source_mask = memory
        logits, new_cache = model.decode(
            tokens[:, None],
            None,
            source_mask,
            cache=cache._replace(memory=projected, target=target),
        )
        return logits[:, 0], new_cache.target

    length = tf.math.count_nonzero(source != PAD_ID, axis=1, dtype=tf.int32)
    max_lengths = tf.minimum(length + extra_length, model.max_length)
    piece = tf.range(model.embedding.input_dim)  # the last rows are no pieces
    return beam_search(
        step_fn,
        cache.target,
        (cache.memory, source_mask),
        batch_size=batch_size,
        beam_size=beam_size,
        # Nothing but EOS came in: nothing but EOS goes out.
        max_lengths=tf.where(length > 1, max_lengths, 1),
        # PAD, UNK and BOS are the ids below EOS.
        allowed=(piece >= EOS_ID) & (piece < vocab_size),
        **options,
    )


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


def _put_in_place(temporary: Path, path: Path) -> None:
    """Renames; a directory that is there has to be moved out of the way first."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def one_line(error: Exception) -> str:
    return " ".join(str(getattr(error, "message", error)).split())
