import keras
import numpy as np
import pytest
import tensorflow as tf

from transformer_tf.loss import label_smoothed_loss


def test_loss_equals_a_calculation_by_hand():
    # Softmax of [ln 1, ln 2, ln 5] is [1/8, 2/8, 5/8]. The first token is piece 2, the
    # second is padding. 0.9 * ln(8/5) + 0.1 * mean(ln 8, ln 4, ln 8/5) = 0.5543.
    logits = tf.math.log([[[1.0, 2.0, 5.0], [1.0, 1.0, 1.0]]])
    loss, tokens = label_smoothed_loss(logits, tf.constant([[2, 0]]), 0.1)
    assert float(loss) == pytest.approx(0.9 * 0.4700 + 0.1 * 1.3119, abs=1e-4)
    assert float(tokens) == 1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_gradient_equal_keras_with_one_hot(smoothing):
    random = np.random.default_rng(1)
    logits = tf.Variable(random.standard_normal((3, 4, 7)), dtype=tf.float32)
    target = tf.constant(random.integers(0, 7, (3, 4)))
    keras_loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=smoothing, reduction=None
    )
    with tf.GradientTape(persistent=True) as tape:
        loss, tokens = label_smoothed_loss(logits, target, smoothing)
        per_token = keras_loss(tf.one_hot(target, 7), logits)
        expected = tf.reduce_sum(per_token * tf.cast(target != 0, tf.float32))
    assert float(tokens) == np.count_nonzero(target)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        tape.gradient(loss, logits), tape.gradient(expected, logits), atol=1e-6
    )


def plain_form(logits, target, smoothing):
    """The same loss by TensorFlow's own cross entropy, derived by the tape."""
    real = tf.cast(target != 0, tf.float32)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
    chosen = tf.gather(logits, target, batch_dims=2)
    loss += smoothing * (chosen - tf.reduce_mean(logits, axis=-1))
    return tf.reduce_sum(loss * real)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_loss_and_gradient_equal_the_plain_form(scale):
    # At the larger scales the shares of most pieces underflow to 0.
    random = np.random.default_rng(2)
    logits = tf.constant(scale * random.standard_normal((5, 9, 50)), tf.float32)
    target = tf.constant(random.integers(0, 50, (5, 9)), tf.int32)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        loss, _ = label_smoothed_loss(logits, target, 0.1)
        expected = plain_form(logits, target, 0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(
        tape.gradient(loss, logits), tape.gradient(expected, logits), atol=1e-6
    )


def test_gradient_follows_what_the_loss_is_multiplied_with():
    logits = tf.random.normal((2, 3, 8))
    target = tf.constant([[1, 2, 0], [7, 0, 0]])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        loss, _ = label_smoothed_loss(logits, target, 0.1)
        halved = loss / 2
    np.testing.assert_allclose(
        tape.gradient(halved, logits), tape.gradient(loss, logits) / 2, rtol=1e-6
    )


def test_a_batch_of_padding_has_no_loss():
    loss, tokens = label_smoothed_loss(
        tf.random.normal((2, 3, 8)), tf.zeros((2, 3), tf.int32), 0.1
    )
    assert (float(loss), float(tokens)) == (0, 0)
