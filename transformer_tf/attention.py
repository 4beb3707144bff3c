"""What happens inside a station: every token asks the others and mixes what they give.

Paper, section 3.2. `scaled_dot_product_attention` is the article's four steps, one line
each; `MultiHeadAttention` projects, splits into heads, and calls it.
"""

from typing import NamedTuple

import keras
from keras import ops

from transformer_tf.config import PAD_ID, check_heads

# Added to the score of a position that may not be looked at. exp(-1e9) is exactly 0 in
# float32, and a row with nothing to look at becomes uniform instead of NaN, which
# minus infinity would give.
MASKED = -1e9


def padding_mask(tokens):
    """Which positions hold a real token: (B, S) ids -> (B, 1, 1, S), True = look."""
    return ops.not_equal(tokens, PAD_ID)[:, None, None, :]


def causal_mask(length):
    """Position t may look at positions <= t (3.2.3): -> (1, 1, length, length)."""
    position = ops.arange(length)
    return (position[None, :] <= position[:, None])[None, None]


def projection_initializer(gain: float) -> keras.initializers.Initializer:
    """Glorot-uniform times `gain`, for the projections of a station."""
    return keras.initializers.VarianceScaling(
        scale=gain**2, mode="fan_avg", distribution="uniform"
    )


class AttentionSteps(NamedTuple):
    """What scaled dot-product attention computed, step by step.

    Nobody pays for the steps that he does not read: a graph drops them.
    """

    scores: object  # (..., T, S) ① the dot products
    scaled: object  # (..., T, S) ② divided by sqrt(d_k)
    shares: object  # (..., T, S) ③ each row sums to 1; masked cells are 0
    output: object  # (..., T, width of the values) ④ the mixed values


def scaled_dot_product_attention(query, key, value, mask=None, scale=True):
    """softmax(Q K^T / sqrt(d_k)) V (3.2.1) in the article's four steps.

    Args:
        query: (..., T, K).
        key: (..., S, K).
        value: (..., S, any width).
        mask: boolean, broadcast to (..., T, S); True = may look.
        scale: False leaves step ② out, as in the article that works with bare dot
            products.

    Returns:
        AttentionSteps. Scores and shares are float32 whatever the type of the inputs.
    """
    scores = ops.matmul(query, ops.swapaxes(key, -1, -2))  # ① (..., T, S)
    scores = ops.cast(scores, "float32")
    scaled = scores / query.shape[-1] ** 0.5 if scale else scores  # ②
    masked = scaled
    if mask is not None:
        masked = scaled + ops.where(mask, 0.0, MASKED)
    shares = ops.softmax(masked, axis=-1)  # ③
    output = ops.matmul(ops.cast(shares, value.dtype), value)  # ④ (..., T, V)
    return AttentionSteps(scores, scaled, shares, output)


class Cache(NamedTuple):
    """Keys and values that were projected before; axis 2 is time."""

    key: object  # (B, H, S, K)
    value: object  # (B, H, S, K)


class MultiHeadAttention(keras.layers.Layer):
    """Several attentions side by side, each in its own small space (3.2.2).

    Called with the keywords of `keras.layers.MultiHeadAttention`, to which it is equal
    on equal weights. The three input projections are one kernel, so that
    self-attention projects with one matrix product.

    Args:
        d_model: width D of what comes in and goes out.
        num_heads: H; each head works in K = D / H dimensions.
        projection_gain: size of the first kernels, in units of Glorot's.

    Raises:
        ValueError: num_heads does not divide d_model.
    """

    def __init__(
        self, d_model: int, num_heads: int, projection_gain: float = 1.0, **kwargs
    ):
        super().__init__(**kwargs)
        check_heads(d_model, num_heads)
        self.d_model = d_model
        self.num_heads = num_heads
        self.projection_gain = projection_gain

    def build(self, query_shape):
        d_model = self.d_model
        self.qkv_kernel = self.add_weight(
            name="qkv_kernel",
            shape=(d_model, 3 * d_model),
            initializer=self._three_kernels,
        )
        self.qkv_bias = self.add_weight(
            name="qkv_bias", shape=(3 * d_model,), initializer="zeros"
        )
        self.output_kernel = self.add_weight(
            name="output_kernel",
            shape=(d_model, d_model),
            initializer=projection_initializer(self.projection_gain),
        )
        self.output_bias = self.add_weight(
            name="output_bias", shape=(d_model,), initializer="zeros"
        )

    def call(
        self,
        query,
        key=None,
        value=None,
        attention_mask=None,
        cache=None,
        return_attention_scores=False,
    ):
        """Lets each query look at the keys and mix the values.

        Args:
            query: (B, T, D).
            key: (B, S, D).
            value: (B, S, D).
            attention_mask: boolean, (B, T, S) or broadcast to (B, H, T, S); True = may
                look.
            cache: `Cache` of positions projected before. The projections of `key` and
                `value` are appended to it; without them it is used as it is.
            return_attention_scores: also return the shares.

        Returns:
            The output (B, T, D); then, if asked, the shares (B, H, T, S); then, if one
            came in, the cache that the next call needs.
        """
        if attention_mask is not None and len(attention_mask.shape) == 3:
            attention_mask = attention_mask[:, None]
        query, key, value = self.project(query, key, value)  # (B, H, T or S, K)
        if cache is not None:
            cache = _append(cache, key, value)
            key, value = cache
        steps = scaled_dot_product_attention(query, key, value, attention_mask)
        outputs = [self.combine(steps.output)]
        if return_attention_scores:
            outputs.append(steps.shares)
        if cache is not None:
            outputs.append(cache)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def project(self, query, key=None, value=None):
        """(B, T, D), (B, S, D), (B, S, D) -> queries, keys, values (B, H, ., K).

        What is one tensor, as in self-attention, is projected in one matrix product.
        """
        if key is None:
            return *self._project(query, 0, 1), None, None
        if query is key and key is value:
            return self._project(query, 0, 3)
        if key is value:
            return *self._project(query, 0, 1), *self._project(key, 1, 3)
        parts = enumerate((query, key, value))
        return tuple(self._project(x, i, i + 1)[0] for i, x in parts)

    def project_memory(self, memory) -> Cache:
        """Keys and values of (B, S, D), to be looked at by many later queries."""
        return Cache(*self._project(memory, 1, 3))

    def combine(self, heads):
        """(B, H, T, K) -> (B, T, D): heads side by side, times the output kernel."""
        batch, _, length, _ = ops.shape(heads)
        joined = ops.reshape(
            ops.transpose(heads, (0, 2, 1, 3)), (batch, length, self.d_model)
        )
        kernel = ops.cast(self.output_kernel, heads.dtype)
        return ops.matmul(joined, kernel) + ops.cast(self.output_bias, heads.dtype)

    def _project(self, x, first, last):
        """Projections first..last-1 of (query, key, value), each (B, H, length, K)."""
        x = ops.cast(x, self.compute_dtype)
        kernel = ops.cast(self.qkv_kernel, x.dtype)
        bias = ops.cast(self.qkv_bias, x.dtype)
        if last - first < 3:
            columns = slice(first * self.d_model, last * self.d_model)
            kernel, bias = kernel[:, columns], bias[columns]
        batch, length, _ = ops.shape(x)
        head_width = self.d_model // self.num_heads
        heads = ops.reshape(
            ops.matmul(x, kernel) + bias,
            (batch, length, last - first, self.num_heads, head_width),
        )
        heads = ops.transpose(heads, (2, 0, 3, 1, 4))  # (parts, B, H, length, K)
        return tuple(ops.unstack(heads, axis=0))

    def _three_kernels(self, shape, dtype=None):
        """Three kernels, each with the spread of its own shape, not of the joined."""
        size = (shape[0], shape[1] // 3)
        # One initializer called three times would give the same numbers three times.
        parts = [
            projection_initializer(self.projection_gain)(size, dtype) for _ in range(3)
        ]
        return ops.concatenate(parts, axis=1)


def _append(cache: Cache, key, value) -> Cache:
    if key is None:
        return cache
    return Cache(
        ops.concatenate([cache.key, key], axis=2),
        ops.concatenate([cache.value, value], axis=2),
    )
