import warnings

import keras
import numpy as np
import pytest
from keras import ops

from transformer_tf.attention import causal_mask
from transformer_tf.layers import (
    DecoderLayer,
    Encoder,
    EncoderLayer,
    positional_encoding,
)


def normed(x):
    """LayerNorm with gain 1 and bias 0, in numpy."""
    x = np.asarray(x)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6)


def test_positions_interleave_sine_and_cosine_from_position_zero():
    encoding = positional_encoding(3, 4)[0]
    np.testing.assert_allclose(encoding[0], [0, 1, 0, 1], atol=1e-7)
    np.testing.assert_allclose(
        encoding[1], [np.sin(1), np.cos(1), np.sin(0.01), np.cos(0.01)], atol=1e-6
    )
    np.testing.assert_allclose(
        encoding[2], [np.sin(2), np.cos(2), np.sin(0.02), np.cos(0.02)], atol=1e-6
    )


def test_encoder_layer_is_the_articles_four_lines(random_x):
    layer = EncoderLayer(d_model=8, num_heads=2, d_ff=16)
    output = layer(random_x)
    attn_output = layer.mha(query=random_x, key=random_x, value=random_x)
    out1 = normed(random_x + attn_output)
    inner, outer = layer.ffn.inner, layer.ffn.outer
    ffn_output = np.maximum(out1 @ inner.kernel + inner.bias, 0) @ outer.kernel
    np.testing.assert_allclose(output, normed(out1 + ffn_output), atol=1e-5)


def test_decoder_layer_asks_target_then_source(random_x):
    layer = DecoderLayer(d_model=8, num_heads=2, d_ff=16)
    memory = random_x[:, ::-1]
    output, cache = layer(random_x, memory, mask=causal_mask(5))
    out1 = normed(
        random_x
        + layer.mha(
            query=random_x, key=random_x, value=random_x, attention_mask=causal_mask(5)
        )
    )
    out2 = normed(out1 + layer.cross_mha(query=out1, key=memory, value=memory))
    np.testing.assert_allclose(output, normed(out2 + layer.ffn(out2)), atol=1e-5)
    assert cache is None


def test_output_is_normalised(random_x):
    output = EncoderLayer(d_model=8, num_heads=2, d_ff=16)(random_x)
    np.testing.assert_allclose(np.mean(output, -1), np.zeros((2, 5)), atol=1e-5)
    np.testing.assert_allclose(np.std(output, -1), np.ones((2, 5)), atol=1e-3)


def test_dropout_changes_training_only(random_x):
    layer = EncoderLayer(d_model=8, num_heads=2, d_ff=16, dropout_rate=0.5)
    still = layer(random_x)
    np.testing.assert_array_equal(still, layer(random_x, training=False))
    assert np.abs(still - layer(random_x, training=True)).max() > 0.1


def test_encoder_embeds_scales_adds_positions(random_x):
    embedding = keras.layers.Embedding(10, 8)
    encoder = Encoder(embedding, num_layers=0, d_model=8, num_heads=2, d_ff=16)
    tokens = np.array([[1, 2, 3]])
    expected = embedding(tokens) * np.sqrt(8) + positional_encoding(3, 8)
    np.testing.assert_allclose(encoder(tokens), expected, atol=1e-6)


def test_learned_positions_are_weights():
    embedding = keras.layers.Embedding(10, 8)
    encoder = Encoder(embedding, 0, 8, 2, 16, positions="learned", max_length=6)
    tokens = np.array([[1, 2, 3]])
    output = encoder(tokens)
    expected = embedding(tokens) * np.sqrt(8) + encoder.pos_encoding[:, :3]
    np.testing.assert_allclose(output, expected, atol=1e-6)
    assert encoder.pos_encoding.shape == (1, 6, 8)


def test_keras_neither_warns_of_masks_nor_hands_them_on(random_x):
    layer = EncoderLayer(d_model=8, num_heads=2, d_ff=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = layer(random_x, mask=np.ones((2, 1, 1, 5), bool))
    assert getattr(output, "_keras_mask", None) is None


@pytest.mark.parametrize(
    ("field", "arguments"),
    [("num_heads", (8, 3, 16, 0.1)), ("dropout_rate", (8, 2, 16, 1.0))],
)
@pytest.mark.parametrize("layer", [EncoderLayer, DecoderLayer])
def test_wrong_sizes_are_named(layer, field, arguments):
    with pytest.raises(ValueError, match=field):
        layer(*arguments)


@pytest.fixture
def random_x():
    return ops.convert_to_tensor(
        np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    )
