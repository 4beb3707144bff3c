import keras
import numpy as np
import pytest
from keras import ops

from transformer_tf.attention import (
    Cache,
    MultiHeadAttention,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
)

# The first article: three tokens of two numbers, bare dot products.
X = np.array([[1, 0], [0, 1], [1, 1]], np.float32)

# The second article: 明日, 天気, は with queries, keys and values.
QUERY = np.array([[2, 1, 0, 0], [1, 2, 0, 0], [0, 0, 1, 1]], np.float32)
KEY = np.array([[1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 0, 1]], np.float32)
VALUE = 9 * np.eye(3, dtype=np.float32)


def assert_prints(actual, expected, digits):
    """Equal when rounded to the digits that the article prints."""
    np.testing.assert_allclose(np.round(actual, digits), expected, atol=1e-6)


def test_article_station_tomorrow_looks_at_weather():
    steps = scaled_dot_product_attention(QUERY, KEY, VALUE)
    assert_prints(steps.scores[0], [2, 5, 0], 0)
    assert_prints(steps.scaled[0], [1, 2.5, 0], 1)
    assert_prints(100 * np.array(steps.shares[0]), [17.1, 76.6, 6.3], 1)
    assert_prints(steps.output[0], [1.54, 6.90, 0.57], 2)


def test_article_three_vectors_by_hand():
    steps = scaled_dot_product_attention(X, X, X, scale=False)
    assert_prints(steps.scores, [[1, 0, 1], [0, 1, 1], [1, 1, 2]], 0)
    assert_prints(
        steps.shares,
        [[0.422, 0.155, 0.422], [0.155, 0.422, 0.422], [0.212, 0.212, 0.576]],
        3,
    )
    assert_prints(steps.output, [[0.845, 0.578], [0.578, 0.845], [0.788, 0.788]], 3)


def test_article_causal_mask():
    steps = scaled_dot_product_attention(X, X, X, causal_mask(3)[0, 0], scale=False)
    assert_prints(
        steps.shares, [[1, 0, 0], [0.269, 0.731, 0], [0.212, 0.212, 0.576]], 3
    )
    assert_prints(steps.output, [[1, 0], [0.269, 0.731], [0.788, 0.788]], 3)
    assert float(steps.shares[0, 2]) == 0.0


def test_article_exercise():
    x = np.array([[2, 0], [0, 1], [1, 1]], np.float32)
    steps = scaled_dot_product_attention(x, x, x, scale=False)
    assert_prints(steps.scores[2], [2, 1, 2], 0)
    assert_prints(steps.shares[2], [0.422, 0.155, 0.422], 3)
    assert_prints(steps.output[2], [1.267, 0.578], 3)
    masked = scaled_dot_product_attention(x, x, x, causal_mask(3)[0, 0], scale=False)
    assert_prints(masked.shares[1], [0.269, 0.731, 0], 3)
    assert_prints(masked.output[1], [0.538, 0.731], 3)


@pytest.mark.parametrize("d_k", [4, 64, 512])
def test_variance_of_a_dot_product_is_d_k(d_k):
    random = np.random.default_rng(1)
    query = random.standard_normal((200, d_k), np.float32)
    key = random.standard_normal((300, d_k), np.float32)
    steps = scaled_dot_product_attention(query, key, key)
    assert np.var(steps.scores) == pytest.approx(d_k, rel=0.1)
    assert np.var(steps.scaled) == pytest.approx(1, rel=0.1)


def test_row_with_nothing_to_look_at_is_uniform_not_nan():
    mask = np.zeros((3, 3), bool)
    steps = scaled_dot_product_attention(X, X, X, mask)
    np.testing.assert_allclose(steps.shares, np.full((3, 3), 1 / 3), rtol=1e-6)


def test_masks():
    tokens = np.array([[5, 6, 0], [7, 0, 0]])
    np.testing.assert_array_equal(
        padding_mask(tokens), [[[[True, True, False]]], [[[True, False, False]]]]
    )
    np.testing.assert_array_equal(
        causal_mask(3)[0, 0], [[True, False, False], [True, True, False], [True] * 3]
    )


def test_scores_and_shares_are_float32_in_bfloat16():
    x = ops.cast(X, "bfloat16")
    steps = scaled_dot_product_attention(x, x, x)
    assert steps.scores.dtype == steps.shares.dtype == "float32"
    assert steps.output.dtype == "bfloat16"


D_MODEL, NUM_HEADS, B, T, S = 24, 3, 3, 5, 7  # batch == heads, T != S: both have bitten


@pytest.fixture
def tensors():
    random = np.random.default_rng(2)
    return [
        random.standard_normal((B, length, D_MODEL)).astype(np.float32)
        for length in (T, S, S)
    ]


@pytest.fixture
def mask():
    mask = np.random.default_rng(3).random((B, 1, T, S)) < 0.6
    mask[..., 0] = True
    return mask


@pytest.fixture(params=[False, True], ids=["self", "cross"])
def mha(request):
    layer = MultiHeadAttention(D_MODEL, NUM_HEADS, cross=request.param)
    layer.build((None, None, D_MODEL))
    for weight in layer.weights:  # biases that are not zero
        weight.assign(keras.random.normal(weight.shape, stddev=0.3))
    return layer


def keras_twin(mha):
    """Keras's own layer with the same weights."""
    twin = keras.layers.MultiHeadAttention(NUM_HEADS, D_MODEL // NUM_HEADS)
    twin.build((B, T, D_MODEL), (B, S, D_MODEL), (B, S, D_MODEL))
    head_shape = (NUM_HEADS, D_MODEL // NUM_HEADS)
    weights = []
    stored = [
        np.concatenate(list(x.values()), axis=-1) for x in (mha.kernels, mha.biases)
    ]
    kernels, biases = (np.split(x, 3, axis=-1) for x in stored)
    for kernel, bias in zip(kernels, biases, strict=True):
        weights += [kernel.reshape(D_MODEL, *head_shape), bias.reshape(head_shape)]
    weights.append(mha.output_kernel.numpy().reshape(*head_shape, D_MODEL))
    weights.append(mha.output_bias.numpy())
    twin.set_weights(weights)
    return twin


@pytest.mark.parametrize("masked", [False, True])
def test_equals_keras_layer(mha, tensors, mask, masked):
    query, key, value = tensors
    output, shares = mha(
        query=query,
        key=key,
        value=value,
        attention_mask=mask[:, 0] if masked else None,
        return_attention_scores=True,
    )
    expected_output, expected_shares = keras_twin(mha)(
        query=query,
        key=key,
        value=value,
        attention_mask=mask[:, 0] if masked else None,
        return_attention_scores=True,
    )
    np.testing.assert_allclose(output, expected_output, atol=1e-5)
    np.testing.assert_allclose(shares, expected_shares, atol=1e-5)


def test_one_tensor_is_projected_like_three_equal_ones(mha, tensors):
    x = ops.convert_to_tensor(tensors[1])
    fused = mha(query=x, key=x, value=x)
    cross = mha(query=ops.copy(x), key=x, value=x)
    apart = mha(query=ops.copy(x), key=ops.copy(x), value=x)
    np.testing.assert_allclose(fused, cross, atol=1e-5)
    np.testing.assert_allclose(fused, apart, atol=1e-5)


def test_cache_gives_what_the_whole_prefix_gives(mha, tensors):
    x = ops.convert_to_tensor(tensors[1])
    whole = mha(query=x, key=x, value=x, attention_mask=causal_mask(S))
    empty = ops.zeros((B, NUM_HEADS, 0, D_MODEL // NUM_HEADS))
    cache = Cache(empty, empty)
    for t in range(S):
        token = x[:, t : t + 1]
        output, cache = mha(query=token, key=token, value=token, cache=cache)
        np.testing.assert_allclose(output, whole[:, t : t + 1], atol=1e-5)


def test_projected_memory_gives_what_the_memory_gives(mha, tensors, mask):
    query, memory, _ = map(ops.convert_to_tensor, tensors)
    expected = mha(query=query, key=memory, value=memory, attention_mask=mask)
    output, _ = mha(query=query, attention_mask=mask, cache=mha.project_memory(memory))
    np.testing.assert_allclose(output, expected, atol=1e-5)


def test_each_projection_starts_with_the_spread_of_its_own_shape():
    layer = MultiHeadAttention(128, 4, projection_gain=0.4)
    layer.build((None, None, 128))
    limit = 0.4 * (6 / (128 + 128)) ** 0.5
    kernels = np.split(layer.kernels["qkv"].numpy(), 3, axis=1)
    for kernel, other in zip(kernels, [*kernels[1:], kernels[0]], strict=True):
        assert np.abs(kernel).max() == pytest.approx(limit, rel=0.01)
        assert abs(np.corrcoef(kernel.ravel(), other.ravel())[0, 1]) < 0.05


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="num_heads.*divisor of d_model = 24"):
        MultiHeadAttention(24, 5)
