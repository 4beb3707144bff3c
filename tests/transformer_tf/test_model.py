import dataclasses

import keras
import numpy as np
import pytest

from transformer_tf.attention import causal_mask
from transformer_tf.config import PRESETS
from transformer_tf.model import build_transformer

TINY = dataclasses.replace(PRESETS["tiny"].model, vocab_size=300, dropout_rate=0.0)


def make_model(**changes):
    return build_transformer(dataclasses.replace(TINY, **changes))


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    return make_model()


def tokens(*shape, seed=1):
    return np.random.default_rng(seed).integers(4, 300, shape).astype(np.int32)


def test_parameter_count_of_base_is_exact():
    base = dataclasses.replace(PRESETS["base"].model, vocab_size=37_000)
    model = build_transformer(base)
    assert model.count_params() == 63_082_496


def test_vocabulary_rows_are_padded_to_a_multiple_of_8():
    model = make_model(vocab_size=301)
    assert model((tokens(1, 2), tokens(1, 2))).shape == (1, 2, 304)
    assert model.vocab_size == 301


def test_one_matrix_serves_three_places(model):
    source, target = tokens(2, 6), tokens(2, 4)
    assert model.encoder.embedding is model.decoder.embedding is model.embedding
    names = [w.path for w in model.weights if "embedding" in w.path]
    assert len(names) == 1
    memory, mask = model.encode(source)
    x, _ = model.decoder(target, memory, memory_mask=mask)
    np.testing.assert_allclose(
        model.logits(x), np.matmul(x, model.embedding.embeddings.numpy().T), atol=1e-4
    )


def test_embedding_has_the_papers_spread():
    rows = make_model(vocab_size=4000)
    assert np.std(rows.embedding.embeddings) == pytest.approx(64**-0.5, rel=0.02)


@pytest.mark.parametrize("dropout_rate", [0.0, 0.3])
def test_no_token_sees_the_future(dropout_rate):
    model = make_model(dropout_rate=dropout_rate)
    source, target = tokens(2, 6), tokens(2, 7)
    changed = target.copy()
    changed[:, 4:] = tokens(2, 3, seed=9)
    before, after = model((source, target)), model((source, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert np.abs(before[:, 4:] - after[:, 4:]).max() > 1e-3


def test_every_token_sees_its_past_and_the_source(model):
    source, target = tokens(1, 6), tokens(1, 7)
    before = model((source, target))
    first = target.copy()
    first[:, 0] = 7
    assert np.abs(before - model((source, first))).max(-1).min() > 1e-5
    other = source.copy()
    other[:, 0] = 7
    assert np.abs(before - model((other, target))).max(-1).min() > 1e-5


def test_more_padding_changes_nothing(model):
    source, target = tokens(2, 6), tokens(2, 5)
    wide_source = np.pad(source, ((0, 0), (0, 9)))
    wide_target = np.pad(target, ((0, 0), (0, 4)))
    np.testing.assert_allclose(
        model((wide_source, wide_target))[:, :5], model((source, target)), atol=1e-5
    )


def test_a_batch_equals_its_sentences_one_by_one(model):
    lengths = [3, 6, 1, 5]  # as many rows as heads
    source, target = tokens(4, 6), tokens(4, 5)
    for row, length in enumerate(lengths):
        source[row, length:] = 0
    together = model((source, target))
    for row, length in enumerate(lengths):
        alone = model((source[row : row + 1, :length], target[row : row + 1]))
        np.testing.assert_allclose(together[row : row + 1], alone, atol=1e-5)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_decoding_equals_uncached(positions, beams):
    model = make_model(positions=positions)
    source, target = tokens(2, 6), tokens(2 * beams, 5)
    source[1, 4:] = 0
    memory, mask = model.encode(source)
    expected = model((np.repeat(source, beams, axis=0), target))
    cache = model.init_cache(memory, 2 * beams)
    for t in range(5):
        logits, cache = model.decode(target[:, t : t + 1], memory, mask, cache=cache)
        np.testing.assert_allclose(logits[:, 0], expected[:, t], atol=1e-5)


def test_gradient_reaches_every_weight():
    import tensorflow as tf

    model = make_model(positions="learned")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model((tokens(2, 6), tokens(2, 5)), training=True) ** 2)
    weights = model.trainable_weights
    gradients = tape.gradient(loss, [w.value for w in weights])
    for weight, gradient in zip(weights, gradients, strict=True):
        gradient = tf.convert_to_tensor(gradient)
        assert float(tf.reduce_max(tf.abs(gradient))) > 0, weight.path


def test_logits_of_bfloat16_are_not_rounded_to_it():
    reference = make_model()
    source, target = tokens(2, 6), tokens(2, 5)
    expected = reference((source, target))
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = make_model()
    finally:
        keras.config.set_dtype_policy("float32")
    model.set_weights(reference.get_weights())
    logits = model((source, target))
    assert logits.dtype == "float32"
    rounded = keras.ops.cast(keras.ops.cast(logits, "bfloat16"), "float32")
    assert np.mean(logits == rounded) < 0.1
    assert 0 < np.abs(logits - expected).max() < 0.3


def test_logits_of_a_bfloat16_model_are_computed_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = build_transformer(PRESETS["tiny"].model)
    finally:
        keras.config.set_dtype_policy("float32")
    source, target = (np.array([[5, 6, 7, 3]]), np.array([[2, 8, 9, 10]]))
    logits = model((source, target))
    memory, mask = model.encode(source)
    x, _ = model.decoder(
        target, memory, mask=causal_mask(target.shape[1]), memory_mask=mask
    )
    assert keras.backend.standardize_dtype(x.dtype) == "bfloat16"
    kernel = model.embedding.embeddings.numpy()
    np.testing.assert_allclose(logits, np.float32(x) @ kernel.T, atol=1e-5)
