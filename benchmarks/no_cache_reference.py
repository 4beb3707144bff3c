"""What decoding costs when each step computes the whole prefix again."""

import tensorflow as tf

from transformer_tf.config import BOS_ID, EOS_ID, PAD_ID


def greedy(model):
    """A function from source ids (B, S) to the number of target tokens it chose."""

    def decode(source):
        memory, source_mask = model.encode(source)
        rows = tf.shape(source)[0]

        def step(prefix, going):
            logits = model.decode(prefix, memory, source_mask)[:, -1]
            # PAD, UNK and BOS are the ids below EOS.
            best = EOS_ID + tf.argmax(
                logits[:, EOS_ID : model.vocab_size], axis=-1, output_type=tf.int32
            )
            best = tf.where(going, best, PAD_ID)
            return tf.concat([prefix, best[:, None]], axis=1), going & (best != EOS_ID)

        longest = tf.shape(source)[1] + 50
        prefix, _ = tf.while_loop(
            lambda prefix, going: (
                tf.reduce_any(going) & (tf.shape(prefix)[1] <= longest)
            ),
            step,
            (tf.fill([rows, 1], BOS_ID), tf.fill([rows], True)),
            shape_invariants=(tf.TensorShape([None, None]), tf.TensorShape([None])),
        )
        return tf.math.count_nonzero(prefix[:, 1:])

    return decode
