"""What it looked at: a walk through the stations that keeps what each one computed.

The walk visits the layers of a model as they stand and calls the same functions with
the same weights, so what it shows is what the model computes; its tests end in the same
logits. The forward path itself knows nothing of it.
"""

from typing import Any, NamedTuple

import numpy as np
from keras import ops

from transformer_tf.attention import (
    AttentionSteps,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
)
from transformer_tf.config import BOS_ID, EOS_ID


class Look(NamedTuple):
    """One attention of one station: who looked at whom, in the article's four steps."""

    x: object  # (B, T, D) what came in; queries are made of it
    query: object  # (B, H, T, K)
    key: object  # (B, H, S, K)
    value: object  # (B, H, S, K)
    mask: object  # boolean, broadcast to (B, H, T, S); True = may look
    steps: AttentionSteps  # ① … ④, (B, H, T, …)
    attn_output: object  # (B, T, D) the heads side by side, times the output kernel
    out: object  # (B, T, D) added back to x and normalised


def look(mha, layernorm, x, memory, mask) -> Look:
    """What `layernorm(x + mha(query=x, key=memory, value=memory))` computes (3.1)."""
    query, key, value = mha.project(x, memory, memory)
    steps = scaled_dot_product_attention(query, key, value, mask)
    attn_output = mha.combine(steps.output)
    out = layernorm(x + attn_output)
    return Look(x, query, key, value, mask, steps, attn_output, out)


class EncoderWalk(NamedTuple):
    """The way up on the source side."""

    looks: list[Look]  # one for each station
    memory: object  # (B, S, D)


class DecoderWalk(NamedTuple):
    """The way up on the target side."""

    looks: list[Look]  # at the target, one for each station
    cross_looks: list[Look]  # at the source
    logits: object  # (B, T, V)


def walk_encoder(model, source, source_mask) -> EncoderWalk:
    """(B, S) ids and their mask, as in `Transformer.encode`."""
    x, looks = model.encoder.embed(source), []
    for layer in model.encoder.enc_layers:
        found = look(layer.mha, layer.layernorm1, x, x, source_mask)
        x = layer.layernorm2(found.out + layer.ffn(found.out))
        looks.append(found)
    return EncoderWalk(looks, x)


def walk_decoder(model, target, memory, source_mask) -> DecoderWalk:
    """(B, T) ids from BOS on and the encoder's output, as in `Transformer.decode`."""
    x, looks, cross_looks = model.decoder.embed(target), [], []
    mask = causal_mask(ops.shape(target)[1])
    for layer in model.decoder.dec_layers:
        found = look(layer.mha, layer.layernorm1, x, x, mask)
        cross = look(layer.cross_mha, layer.layernorm2, found.out, memory, source_mask)
        x = layer.layernorm3(cross.out + layer.ffn(cross.out))
        looks.append(found)
        cross_looks.append(cross)
    return DecoderWalk(looks, cross_looks, model.logits(x))


class Seen(NamedTuple):
    """A sentence and its translation: the tokens by name, and every attention."""

    source: list[str]  # S pieces, the end token included
    fed: list[str]  # T pieces that went into the decoder, the start token first
    target: list[str]  # T pieces that came out, the end token last
    looks: dict[str, list[Look]]  # "encoder", "decoder", "cross": one for each station
    logits: object  # (1, T, V)

    def names(self, where: str) -> tuple[list[str], list[str]]:
        """The tokens that look, and those that are looked at."""
        queries = self.source if where == "encoder" else self.fed
        keys = self.fed if where == "decoder" else self.source
        return queries, keys


def see(text: str, target: list[int], model: Any, tokenizer: Any) -> Seen:
    """Walks one sentence and its translation.

    Args:
        text: what is translated; what is longer than the model reads is cut.
        target: ids of the translation, EOS included.
        model: a `Transformer`.
        tokenizer: its vocabulary.
    """
    ids = tokenizer.tokenize([text]).to_list()[0][: model.max_length - 1]
    source, fed = [*ids, EOS_ID], [BOS_ID, *target[:-1]]
    source_ids, fed_ids = (np.array([ids], np.int32) for ids in (source, fed))
    source_mask = padding_mask(source_ids)
    encoder = walk_encoder(model, source_ids, source_mask)
    decoder = walk_decoder(model, fed_ids, encoder.memory, source_mask)
    looks = {
        "encoder": encoder.looks,
        "decoder": decoder.looks,
        "cross": decoder.cross_looks,
    }
    spelled = (tokenizer.pieces(ids) for ids in (source, fed, target))
    return Seen(*spelled, looks, decoder.logits)
