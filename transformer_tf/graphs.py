"""The graphs of an export: from text to translations, and to where they looked.

Each is a `tf.function` that tokenizes, encodes, searches, and spells; a `Translator`
saves them, and they need nothing of this package to run.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from transformer_tf.config import (
    BOS_ID,
    EOS_ID,
    MAX_BEAM_SIZE,
    PAD_ID,
    DecodingConfig,
)
from transformer_tf.decoding import Hypotheses, beam_search, widest

# Whoever may ask may ask for anything, and an error would fail all the sentences that a
# server has batched together. So what is out of bounds is brought to the nearest bound.
MAX_LENGTH_PENALTY = 10.0

TEXT = tf.TensorSpec([None], tf.string, name="text")
OPTIONS = [
    tf.TensorSpec([None], tf.int32, name="beam_size"),
    tf.TensorSpec([None], tf.float32, name="length_penalty"),
    tf.TensorSpec([None], tf.int32, name="extra_length"),
    tf.TensorSpec([None], tf.int32, name="nbest"),
]


def kept_weights(model: Any, weights: list[tf.Variable]) -> Any:
    """In this scope `model` computes with the values of `weights`.

    A `Translator` may keep them in fewer bits than the model computes with. They are
    read and widened here, once a call and not at each step of a loop.
    """
    # Not above: who loads an export needs neither the layers nor Keras.
    from keras import StatelessScope

    pairs = zip(model.weights, weights, strict=True)
    return StatelessScope([(mine, tf.cast(kept, mine.dtype)) for mine, kept in pairs])


def reading_graph(model: Any, tokenizer: Any) -> Callable:
    """The `tf.function` from text to source ids; the other graphs call it, so that an
    export does not hold the vocabulary once more."""

    @tf.function(input_signature=[TEXT])
    def read(text):
        return read_source(text, tokenizer, model.max_length)

    return read


def search_graph(model: Any, weights: list[tf.Variable], vocab_size: int) -> Callable:
    """The `tf.function` from source ids and options to `Hypotheses`; the other graphs
    call it, so that an export has one loop."""

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32), *OPTIONS])
    def find(source, beam_size, length_penalty, extra_length, nbest):
        beam_size = tf.clip_by_value(beam_size, 1, MAX_BEAM_SIZE)
        nbest = tf.minimum(tf.maximum(nbest, 1), beam_size)
        length_penalty = tf.where(tf.math.is_nan(length_penalty), 0.0, length_penalty)
        length_penalty = tf.clip_by_value(
            length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        extra_length = tf.clip_by_value(extra_length, 0, model.max_length)
        with kept_weights(model, weights):
            return search(
                source,
                model,
                vocab_size,
                beam_size=beam_size,
                length_penalty=length_penalty,
                extra_length=extra_length,
                nbest=nbest,
            )

    return find


def translation_graph(
    read: Callable, find: Callable, tokenizer: Any, config: DecodingConfig
) -> Callable:
    """The `tf.function` from text to translations."""
    # As tensors, these become defaults in the signature of the SavedModel. There is one
    # for all sentences; a server that batches requests needs one for each.
    default_beam_size = tf.constant([config.beam_size])
    default_length_penalty = tf.constant([config.length_penalty], tf.float32)
    default_extra_length = tf.constant([config.extra_length])
    default_nbest = tf.constant([1])

    @tf.function(input_signature=[TEXT, *OPTIONS])
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
        source, truncated = read(text)
        found = find(source, beam_size, length_penalty, extra_length, nbest)
        rows = tf.size(found.scores)  # B * F
        ids = tf.reshape(found.ids, [rows, tf.shape(found.ids)[2]])
        return {
            "translation": tf.reshape(spell(ids, tokenizer), tf.shape(found.scores)),
            "score": found.scores,
            "truncated": truncated,
        }

    return translate


def attention_graph(
    read: Callable,
    find: Callable,
    model: Any,
    weights: list[tf.Variable],
    tokenizer: Any,
    config: DecodingConfig,
) -> Callable:
    """The `tf.function` from text to where its best translation looked."""
    from transformer_tf.explain import walk_decoder

    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    pieces[PAD_ID] = ""
    options = (
        tf.constant([config.beam_size]),
        tf.constant([config.length_penalty], tf.float32),
        tf.constant([config.extra_length]),
        tf.constant([1]),
    )

    @tf.function(input_signature=[TEXT])
    def attention(text):
        """What each token of the best translation saw of the source, as it was chosen.

        Args:
            text: (B,) UTF-8 strings.

        Returns:
            source_tokens (B, S) and target_tokens (B, T) string, "" after the end;
            attention (B, L, H, T, S) float32: the shares of the cross-attention of each
            layer and head, rows that sum to 1, and 0 where there is no token.
        """
        source, _ = read(text)
        target = find(source, *options).ids[:, 0]  # (B, T)
        begins = tf.fill([tf.shape(target)[0], 1], BOS_ID)
        fed = tf.concat([begins, target[:, :-1]], axis=1)
        with kept_weights(model, weights):
            memory, source_mask = model.encode(source)
            walk = walk_decoder(model, fed, memory, source_mask)
        shares = tf.stack([look.steps.shares for look in walk.cross_looks], axis=1)
        is_token = tf.cast(target != PAD_ID, shares.dtype)[:, None, None, :, None]
        spelled = tf.constant(pieces)
        return {
            "source_tokens": tf.gather(spelled, source),
            "target_tokens": tf.gather(spelled, target),
            "attention": shares * is_token,
        }

    return attention


def spell(ids: tf.Tensor, tokenizer: Any) -> tf.Tensor:
    """Ids (B, T) -> text (B,), one line each.

    The vocabulary can spell any byte, line ends too.
    """
    text = tokenizer.detokenize(tf.convert_to_tensor(ids))
    return tf.strings.regex_replace(text, "[[:cntrl:]]+", " ")


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
