"""What is a station: attention, then a feed-forward network, each added back to x.

Paper, sections 3.1 (stacks), 3.3 (feed-forward), 3.5 (positions) and 5.4 (dropout).
Every sub-layer is LayerNorm(x + Dropout(Sublayer(x))): the norm comes after the sum.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from transformer_tf.attention import (
    MultiHeadAttention,
    flat,
    projection_initializer,
    sizes,
)
from transformer_tf.config import LAYERNORM_EPSILON, POSITION_BASE, embedding_stddev
from transformer_tf.dropout import Dropout


def positional_encoding(length: int, d_model: int) -> np.ndarray:
    """Sines at even, cosines at odd places, wavelengths 2 pi to 10000 * 2 pi (3.5).

    Returns:
        (1, length, d_model) float32; position 0 comes first.
    """
    position = np.arange(length)[:, None]
    frequency = float(POSITION_BASE) ** (-np.arange(0, d_model, 2) / d_model)
    encoding = np.empty((1, length, d_model), np.float32)
    encoding[0, :, 0::2] = np.sin(position * frequency)
    encoding[0, :, 1::2] = np.cos(position * frequency)
    return encoding


class FeedForward(keras.layers.Layer):
    """max(0, x W1 + b1) W2 + b2, the same for every position (3.3).

    Args:
        d_model: width D of what comes in and goes out.
        d_ff: inner width.
        projection_gain: size of the first kernels, in units of Glorot's.
    """

    def __init__(self, d_model, d_ff, projection_gain=1.0, **kwargs):
        super().__init__(**kwargs)

        def dense(width, **options):
            initializer = projection_initializer(projection_gain)
            return keras.layers.Dense(width, kernel_initializer=initializer, **options)

        self.inner = dense(d_ff, activation="relu", name="inner")
        self.outer = dense(d_model, name="outer")

    def call(self, x):
        """(B, T, D) -> (B, T, D)."""
        return ops.reshape(self.outer(self.inner(flat(x))), (*sizes(x), x.shape[-1]))


def layer_norm(name: str) -> keras.layers.LayerNormalization:
    """Keras's layer with the paper's code's epsilon; it computes in float32."""
    return keras.layers.LayerNormalization(epsilon=LAYERNORM_EPSILON, name=name)


class MaskedLayer(keras.layers.Layer):
    """A layer that takes its masks as arguments and hands none on.

    Keras treats an argument called `mask` as the mask of the input and would attach it
    to the output, or warn that it does not.
    """

    def compute_mask(self, inputs, previous_mask):
        return None


class EncoderLayer(MaskedLayer):
    """One station of the encoder (3.1): self-attention, then feed-forward.

    Args:
        d_model: width D.
        num_heads: H, a divisor of d_model.
        d_ff: inner width of the feed-forward network.
        dropout_rate: of each sub-layer's output, before it is added back (5.4).
        projection_gain: size of the first kernels, in units of Glorot's.

    Raises:
        ValueError: num_heads does not divide d_model, or dropout_rate is not in [0, 1).
    """

    def __init__(
        self,
        d_model,
        num_heads,
        d_ff,
        dropout_rate=0.1,
        projection_gain=1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        options = (d_model, num_heads, projection_gain)
        self.mha = MultiHeadAttention(*options, name="mha")
        self.ffn = FeedForward(d_model, d_ff, projection_gain, name="ffn")
        self.layernorm1 = layer_norm("layernorm1")
        self.layernorm2 = layer_norm("layernorm2")
        self.dropout1 = Dropout(dropout_rate, name="dropout1")
        self.dropout2 = Dropout(dropout_rate, name="dropout2")

    def call(self, x, training=False, mask=None):
        """(B, S, D) -> (B, S, D); mask broadcast to (B, H, S, S), True = may look."""
        # Each token asks all the others.
        attn_output = self.mha(query=x, key=x, value=x, attention_mask=mask)
        attn_output = self.dropout1(attn_output, training=training)
        out1 = self.layernorm1(x + attn_output)

        # Each token thinks over what it heard.
        ffn_output = self.ffn(out1)
        ffn_output = self.dropout2(ffn_output, training=training)
        return self.layernorm2(out1 + ffn_output)


class DecoderLayer(MaskedLayer):
    """One station of the decoder (3.1): causal self-attention, attention over the
    encoder's output, feed-forward.

    Args and errors as for `EncoderLayer`.
    """

    def __init__(
        self,
        d_model,
        num_heads,
        d_ff,
        dropout_rate=0.1,
        projection_gain=1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        options = (d_model, num_heads, projection_gain)
        self.mha = MultiHeadAttention(*options, name="mha")
        self.cross_mha = MultiHeadAttention(*options, cross=True, name="cross_mha")
        self.ffn = FeedForward(d_model, d_ff, projection_gain, name="ffn")
        self.layernorm1 = layer_norm("layernorm1")
        self.layernorm2 = layer_norm("layernorm2")
        self.layernorm3 = layer_norm("layernorm3")
        self.dropout1 = Dropout(dropout_rate, name="dropout1")
        self.dropout2 = Dropout(dropout_rate, name="dropout2")
        self.dropout3 = Dropout(dropout_rate, name="dropout3")

    def call(self, x, memory, cache=None, training=False, mask=None, memory_mask=None):
        """One step of understanding of the target so far.

        Args:
            x: (B, T, D).
            memory: (B, S, D) from the encoder, or the `Cache` that
                `cross_mha.project_memory` made of it.
            cache: `Cache` of this layer's earlier target positions, or None.
            mask: who looks at whom in the target, broadcast to (B, H, T, T).
            memory_mask: who looks at the source, broadcast to (B, H, T, S).

        Returns:
            x (B, T, D), and the cache with the new positions appended (None if None).
        """
        # Each token asks the target tokens before it.
        attn_output = self.mha(
            query=x, key=x, value=x, attention_mask=mask, cache=cache
        )
        if cache is not None:
            attn_output, cache = attn_output
        attn_output = self.dropout1(attn_output, training=training)
        out1 = self.layernorm1(x + attn_output)

        # Each token asks the source.
        cross_output = self.cross_attention(out1, memory, memory_mask)
        cross_output = self.dropout2(cross_output, training=training)
        out2 = self.layernorm2(out1 + cross_output)

        # Each token thinks over what it heard.
        ffn_output = self.ffn(out2)
        ffn_output = self.dropout3(ffn_output, training=training)
        return self.layernorm3(out2 + ffn_output), cache

    def cross_attention(self, x, memory, memory_mask):
        if not isinstance(memory, tuple):
            return self.cross_mha(
                query=x, key=memory, value=memory, attention_mask=memory_mask
            )
        # The W hypotheses of one sentence stand side by side on the time axis, so that
        # the projected source is shared by them and never copied per beam.
        beams = ops.reshape(x, (ops.shape(memory.key)[0], -1, x.shape[-1]))
        output, _ = self.cross_mha(
            query=beams, attention_mask=memory_mask, cache=memory
        )
        return ops.reshape(output, (*sizes(x), x.shape[-1]))


class Stack(MaskedLayer):
    """What encoder and decoder share: the way in (3.4, 3.5) and a row of stations.

    Args:
        embedding: the layer that turns ids into vectors; both stacks have the same.
        num_layers: how many stations.
        d_model, num_heads, d_ff, dropout_rate, projection_gain: as for `EncoderLayer`.
        positions: "sinusoidal" or "learned".
        max_length: longest input in tokens.
        station: the class of the stations.
    """

    def __init__(
        self,
        station,
        embedding,
        num_layers,
        d_model,
        num_heads,
        d_ff,
        dropout_rate=0.1,
        positions="sinusoidal",
        max_length=256,
        projection_gain=1.0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.d_model = d_model
        self.embedding = embedding
        self.dropout = Dropout(dropout_rate, name="dropout")
        self.positions = positions
        self.max_length = max_length
        options = (d_model, num_heads, d_ff, dropout_rate, projection_gain)
        self.stations = [
            station(*options, name=f"layer{i + 1}") for i in range(num_layers)
        ]

    def build(self, x_shape):
        if self.positions == "learned":
            self.pos_encoding = self.add_weight(
                name="pos_encoding",
                shape=(1, self.max_length, self.d_model),
                initializer=keras.initializers.RandomNormal(
                    stddev=embedding_stddev(self.d_model)
                ),
            )
        else:
            # A tensor outside of every graph, so that none of those that are saved
            # holds a copy of it, as it would of an array.
            with tf.init_scope():
                self.pos_encoding = tf.constant(
                    positional_encoding(self.max_length, self.d_model)
                )

    def embed(self, x, training=False, first_position=0):
        """(B, T) ids -> (B, T, D): embedding * sqrt(D) + position, then dropout."""
        seq_len = ops.shape(x)[1]
        x = self.embedding(x)
        x *= self.d_model**0.5  # N(0, 1/D) entries become unit variance (3.4)
        positions = ops.cast(self.pos_encoding, x.dtype)
        x += positions[:, first_position : first_position + seq_len, :]
        return self.dropout(x, training=training)


class Encoder(Stack):
    """The way up on the source side (3.1); arguments as for `Stack`."""

    def __init__(self, *args, **kwargs):
        super().__init__(EncoderLayer, *args, **kwargs)

    @property
    def enc_layers(self):
        return self.stations

    def call(self, x, training=False, mask=None):
        """(B, S) ids -> (B, S, D); mask broadcast to (B, H, S, S)."""
        x = self.embed(x, training)
        for layer in self.enc_layers:
            x = layer(x, training=training, mask=mask)
        return x


class Decoder(Stack):
    """The way up on the target side (3.1); arguments as for `Stack`."""

    def __init__(self, *args, **kwargs):
        super().__init__(DecoderLayer, *args, **kwargs)

    @property
    def dec_layers(self):
        return self.stations

    def call(self, x, memory, cache=None, training=False, mask=None, memory_mask=None):
        """(B, T) ids -> (B, T, D) and the new caches.

        Args:
            memory: the encoder's output (B, S, D), or a list with each layer's
                projection of it.
            cache: None, or a list with each layer's `Cache`; x then holds the positions
                that follow those in the cache.
        """
        first_position = 0 if cache is None else ops.shape(cache[0].key)[2]
        x = self.embed(x, training, first_position)
        new_cache = []
        for i, layer in enumerate(self.dec_layers):
            x, layer_cache = layer(
                x,
                memory[i] if isinstance(memory, list) else memory,
                cache=None if cache is None else cache[i],
                training=training,
                mask=mask,
                memory_mask=memory_mask,
            )
            new_cache.append(layer_cache)
        return x, None if cache is None else new_cache
