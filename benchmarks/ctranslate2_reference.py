"""The decoding yardstick: our weights in CTranslate2, an engine written in C++.

Not a dependency: `pip install ctranslate2` where the comparison is wanted.
"""

from pathlib import Path

import numpy as np

from transformer_tf.config import LAYERNORM_EPSILON
from transformer_tf.layers import positional_encoding


def convert(model, pieces: list[str], num_heads: int, directory: Path) -> None:
    """Writes a `Transformer` as a CTranslate2 model, float32.

    Args:
        model: with sinusoidal positions.
        pieces: the vocabulary, by id.
        num_heads: of the model.
        directory: is made.
    """
    from ctranslate2.specs import TransformerSpec

    layers = (len(model.encoder.enc_layers), len(model.decoder.dec_layers))
    spec = TransformerSpec.from_config(layers, num_heads, pre_norm=False)
    embeddings = model.embedding.embeddings.numpy()[: len(pieces)]
    positions = positional_encoding(model.max_length, embeddings.shape[1])[0]
    for side in (spec.encoder, spec.decoder):
        table = side.embeddings
        (table[0] if isinstance(table, list) else table).weight = embeddings
        side.position_encodings.encodings = positions
    spec.decoder.projection.weight = embeddings
    for ours, theirs in zip(model.encoder.enc_layers, spec.encoder.layer, strict=True):
        _self_attention(ours.mha, ours.layernorm1, theirs.self_attention)
        _feed_forward(ours.ffn, ours.layernorm2, theirs.ffn)
    for ours, theirs in zip(model.decoder.dec_layers, spec.decoder.layer, strict=True):
        _self_attention(ours.mha, ours.layernorm1, theirs.self_attention)
        _cross_attention(ours.cross_mha, ours.layernorm2, theirs.attention)
        _feed_forward(ours.ffn, ours.layernorm3, theirs.ffn)
    spec.register_source_vocabulary(pieces)
    spec.register_target_vocabulary(pieces)
    spec.config.bos_token, spec.config.eos_token = "<s>", "</s>"
    spec.config.unk_token = "<unk>"
    spec.config.layer_norm_epsilon = LAYERNORM_EPSILON
    spec.validate()
    spec.optimize()
    directory.mkdir(parents=True)
    spec.save(str(directory))


def _linear(spec, kernel, bias) -> None:
    spec.weight = np.ascontiguousarray(np.transpose(kernel))
    spec.bias = np.asarray(bias)


def _norm(spec, norm) -> None:
    spec.gamma, spec.beta = norm.gamma.numpy(), norm.beta.numpy()


def _self_attention(mha, norm, spec) -> None:
    _linear(spec.linear[0], mha.kernels["qkv"], mha.biases["qkv"])
    _linear(spec.linear[1], mha.output_kernel, mha.output_bias)
    _norm(spec.layer_norm, norm)


def _cross_attention(mha, norm, spec) -> None:
    _linear(spec.linear[0], mha.kernels["q"], mha.biases["q"])
    _linear(spec.linear[1], mha.kernels["kv"], mha.biases["kv"])
    _linear(spec.linear[2], mha.output_kernel, mha.output_bias)
    _norm(spec.layer_norm, norm)


def _feed_forward(ffn, norm, spec) -> None:
    inner, outer = ffn.inner, ffn.outer
    _linear(spec.linear_0, inner.kernel, inner.bias)
    _linear(spec.linear_1, outer.kernel, outer.bias)
    _norm(spec.layer_norm, norm)
