"""What happens inside a station: every token asks the others and mixes what they give.

Paper, section 3.2. `scaled_dot_product_attention` is the article's four steps, one line
each; `MultiHeadAttention` projects, splits into heads, and calls it.
"""

from typing import NamedTuple

import keras
from keras import ops

from transformer_tf.config import MASKED_SCORE, PAD_ID, check_heads


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
        masked = scaled + ops.where(mask, 0.0, MASKED_SCORE)
    shares = ops.softmax(masked, axis=-1)  # ③
    output = ops.matmul(ops.cast(shares, value.dtype), value)  # ④ (..., T, V)
    return AttentionSteps(scores, scaled, shares, output)


def flat(x):
    """(B, T, D) -> (B * T, D): what a projection needs to be one matrix product.

    A product of a 3-D and a 2-D tensor would work out its shapes in a dozen operations
    more, and decoding, one token at a time, spends its time on counting operations.
    """
    return ops.reshape(x, (-1, x.shape[-1]))


def sizes(x, axes=(0, 1)):
    """The sizes of two axes, for a reshape: -1 where just one of them is not known."""
    known = [x.shape[axis] for axis in axes]
    if known.count(None) == 1:
        return [-1 if size is None else size for size in known]
    shape = ops.shape(x)
    return [shape[axis] for axis in axes]


class Cache(NamedTuple):
    """Keys and values that were projected before; axis 2 is time."""

    key: object  # (B, H, S, K)
    value: object  # (B, H, S, K)


class MultiHeadAttention(keras.layers.Layer):
    """Several attentions side by side, each in its own small space (3.2.2).

    Called with the keywords of `keras.layers.MultiHeadAttention`, to which it is equal
    on equal weights. What is projected together has one kernel and needs one matrix
    product: queries, keys and values in self-attention, keys and values in cross-
    attention, whose queries come from elsewhere.

    Args:
        d_model: width D of what comes in and goes out.
        num_heads: H; each head works in K = D / H dimensions.
        projection_gain: size of the first kernels, in units of Glorot's.
        cross: made for cross-attention. It says how the kernels are stored, no more.

    Raises:
        ValueError: num_heads does not divide d_model.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        projection_gain: float = 1.0,
        cross: bool = False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        check_heads(d_model, num_heads)
        self.d_model = d_model
        self.num_heads = num_heads
        self.projection_gain = projection_gain
        self.fused = ("q", "kv") if cross else ("qkv",)

    def build(self, query_shape):
        d_model = self.d_model
        self.kernels, self.biases = {}, {}
        for parts in self.fused:
            self.kernels[parts] = self.add_weight(
                name=f"{parts}_kernel",
                shape=(d_model, len(parts) * d_model),
                initializer=self._kernels_side_by_side,
            )
            self.biases[parts] = self.add_weight(
                name=f"{parts}_bias", shape=(len(parts) * d_model,), initializer="zeros"
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
        given = {"q": query, "k": key, "v": value}
        heads = {"q": None, "k": None, "v": None}
        for fused in self.fused:
            parts = "".join(part for part in fused if given[part] is not None)
            together = all(given[part] is given[parts[0]] for part in parts)
            for group in [parts] if parts and together else parts:
                projected = self._project(given[group[0]], fused, group)
                heads.update(zip(group, projected, strict=True))
        return heads["q"], heads["k"], heads["v"]

    def project_memory(self, memory) -> Cache:
        """Keys and values of (B, S, D), to be looked at by many later queries."""
        return Cache(*self._project(memory, self.fused[-1], "kv"))

    def combine(self, heads):
        """(B, H, T, K) -> (B, T, D): heads side by side, times the output kernel."""
        joined = ops.reshape(ops.transpose(heads, (0, 2, 1, 3)), (-1, self.d_model))
        output = ops.matmul(joined, ops.cast(self.output_kernel, heads.dtype))
        output += ops.cast(self.output_bias, heads.dtype)
        return ops.reshape(output, (*sizes(heads, (0, 2)), self.d_model))

    def _project(self, x, fused, parts):
        """Projections with the kernel `fused`, or those `parts` of it that are wanted;
        each is (B, H, length, K)."""
        x = ops.cast(x, self.compute_dtype)
        kernel = ops.cast(self.kernels[fused], x.dtype)
        bias = ops.cast(self.biases[fused], x.dtype)
        if parts != fused:
            first = fused.index(parts) * self.d_model
            columns = slice(first, first + len(parts) * self.d_model)
            kernel, bias = kernel[:, columns], bias[columns]
        head_width = self.d_model // self.num_heads
        heads = ops.reshape(
            ops.matmul(flat(x), kernel) + bias,
            (*sizes(x), len(parts), self.num_heads, head_width),
        )
        heads = ops.transpose(heads, (2, 0, 3, 1, 4))  # (parts, B, H, length, K)
        return tuple(ops.unstack(heads, axis=0))

    def _kernels_side_by_side(self, shape, dtype=None):
        """Each with the spread of its own shape, not of the joined one."""
        size = (shape[0], shape[0])
        # One initializer called three times would give the same numbers three times.
        kernels = [
            projection_initializer(self.projection_gain)(size, dtype)
            for _ in range(shape[1] // shape[0])
        ]
        return ops.concatenate(kernels, axis=1)


def _append(cache: Cache, key, value) -> Cache:
    if key is None:
        return cache
    return Cache(
        ops.concatenate([cache.key, key], axis=2),
        ops.concatenate([cache.value, value], axis=2),
    )
