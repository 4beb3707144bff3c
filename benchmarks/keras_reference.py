"""What a Keras user would write: built-in attention, one-hot loss, `fit`.

The same sizes, masks, dropout places and shared matrix as ours, so that the ratio of
the two speeds compares how, not what, is computed.
"""

import keras
import tensorflow as tf
from keras import ops

from transformer_tf.config import ADAM, ModelConfig, TrainingConfig
from transformer_tf.layers import positional_encoding
from transformer_tf.training import WarmupSchedule


def make_reference(model: ModelConfig, training: TrainingConfig) -> keras.Model:
    """A compiled model for `fit` on ((source, target_in), target_out, weights)."""
    reference = PlainTransformer(model)
    schedule = WarmupSchedule(
        model.d_model, training.warmup_steps, training.learning_rate_scale
    )
    smoothing = training.label_smoothing

    def loss(target, logits):
        one_hot = tf.one_hot(tf.cast(target, tf.int32), model.vocab_size)
        return keras.losses.categorical_crossentropy(
            one_hot, logits, from_logits=True, label_smoothing=smoothing
        )

    reference.compile(
        keras.optimizers.Adam(schedule, **ADAM), loss=loss, jit_compile=False
    )
    return reference


def weighted(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Adds the weights that keep padding out of the loss."""
    return dataset.map(lambda x, y: (x, y, tf.cast(y != 0, tf.float32)))


class PlainBlock(keras.layers.Layer):
    def __init__(self, config: ModelConfig, is_decoder: bool):
        super().__init__()
        attention = (config.num_heads, config.d_model // config.num_heads)
        count = 3 if is_decoder else 2
        self.attention = keras.layers.MultiHeadAttention(*attention)
        if is_decoder:
            self.cross = keras.layers.MultiHeadAttention(*attention)
        self.inner = keras.layers.Dense(config.d_ff, activation="relu")
        self.outer = keras.layers.Dense(config.d_model)
        self.norms = [
            keras.layers.LayerNormalization(epsilon=1e-6) for _ in range(count)
        ]
        self.dropouts = [
            keras.layers.Dropout(config.dropout_rate) for _ in range(count)
        ]

    def call(self, x, memory=None, attention_mask=None, training=False):
        causal = memory is not None
        heard = self.attention(
            x,
            x,
            attention_mask=None if causal else attention_mask,
            use_causal_mask=causal,
        )
        x = self.norms[0](x + self.dropouts[0](heard, training=training))
        if causal:
            heard = self.cross(x, memory, attention_mask=attention_mask)
            x = self.norms[1](x + self.dropouts[1](heard, training=training))
        thought = self.outer(self.inner(x))
        return self.norms[-1](x + self.dropouts[-1](thought, training=training))


class PlainTransformer(keras.Model):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = keras.layers.Embedding(config.vocab_size, config.d_model)
        self.dropout = keras.layers.Dropout(config.dropout_rate)
        self.positions = positional_encoding(config.max_length, config.d_model)
        layers = range(config.num_layers)
        self.encoder = [PlainBlock(config, is_decoder=False) for _ in layers]
        self.decoder = [PlainBlock(config, is_decoder=True) for _ in layers]

    def embed(self, x, training):
        length = ops.shape(x)[1]
        x = self.embedding(x) * self.config.d_model**0.5
        positions = ops.convert_to_tensor(self.positions)[:, :length]
        return self.dropout(x + positions, training=training)

    def call(self, inputs, training=False):
        source, target = inputs
        mask = ops.not_equal(source, 0)[:, None, :]
        memory = self.embed(source, training)
        for block in self.encoder:
            memory = block(memory, attention_mask=mask, training=training)
        x = self.embed(target, training)
        for block in self.decoder:
            x = block(x, memory=memory, attention_mask=mask, training=training)
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))
