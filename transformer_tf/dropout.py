"""What it forgets on purpose while it learns (paper, section 5.4)."""

import keras
import tensorflow as tf

from transformer_tf.config import check_dropout

LEVELS = 2**16


class Dropout(keras.layers.Layer):
    """Sets a random share of the numbers to 0 and enlarges the others in return.

    Each number costs 16 random bits instead of a uniform float32 as in Keras's layer,
    which takes half the time; so the rate is the nearest multiple of 2^-16. Replicas of
    one step draw different masks.

    Args:
        rate: share of the numbers that become 0, 0 <= rate < 1.

    Raises:
        ConfigError: rate is out of bounds.
    """

    def __init__(self, rate: float, **kwargs):
        super().__init__(**kwargs)
        check_dropout(rate)
        self.rate = rate
        self.zeroed_levels = min(round(rate * LEVELS), LEVELS - 1)
        self.seed_generator = keras.random.SeedGenerator()

    def call(self, x, training=False):
        """Any shape -> the same shape; without `training` nothing changes."""
        if not training or not self.zeroed_levels:
            return x
        keep = _random_levels(tf.shape(x), self._seed()) >= self.zeroed_levels
        scale = LEVELS / (LEVELS - self.zeroed_levels)
        return x * (tf.cast(keep, x.dtype) * tf.cast(scale, x.dtype))

    def _seed(self):
        seed = tf.convert_to_tensor(self.seed_generator.next())
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return seed
        return tf.random.experimental.stateless_fold_in(
            tf.cast(seed, tf.int32), replica.replica_id_in_sync_group
        )


def _random_levels(shape, seed):
    """Uniform uint16 numbers of that shape, two from each 32 random bits."""
    size = tf.reduce_prod(shape)
    bits = tf.random.stateless_uniform(
        [(size + 1) // 2], seed, minval=None, maxval=None, dtype=tf.uint32
    )
    return tf.reshape(tf.reshape(tf.bitcast(bits, tf.uint16), [-1])[:size], shape)
