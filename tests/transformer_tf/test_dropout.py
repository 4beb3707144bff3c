import keras
import numpy as np
import pytest
import tensorflow as tf

from transformer_tf.config import ConfigError
from transformer_tf.dropout import Dropout


def test_without_training_nothing_changes():
    x = tf.random.normal((3, 5))
    assert Dropout(0.5)(x, training=False) is x
    assert Dropout(0.0)(x, training=True) is x


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_zeroes_its_share_and_enlarges_the_rest(rate, dtype):
    n = 99_999  # odd: the last pair of 16 bits is used by half
    layer = Dropout(rate, dtype=dtype)
    y = tf.cast(layer(tf.ones((3, n // 3), dtype), training=True), tf.float32).numpy()
    share = np.mean(y == 0)
    assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / n) ** 0.5)
    np.testing.assert_allclose(y[y > 0], 1 / (1 - rate), rtol=8e-3)


def test_gradient_is_the_mask():
    layer = Dropout(0.5)
    x = tf.random.normal((40, 50))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    np.testing.assert_allclose(tape.gradient(y, x), y / x, rtol=1e-6)


def test_neighbours_and_calls_are_independent():
    layer = Dropout(0.5)
    first, second = (layer(tf.ones(100_000), training=True).numpy() for _ in range(2))
    pairs = [(first, second), (first[0::2], first[1::2]), (first[:-4], first[4:])]
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_the_seed_decides():
    def masks():
        keras.utils.set_random_seed(5)
        layer = Dropout(0.5)
        return [layer(tf.ones(64), training=True).numpy() for _ in range(3)]

    np.testing.assert_array_equal(masks(), masks())


def test_replicas_draw_different_masks():
    devices = tf.config.list_logical_devices("CPU")
    if len(devices) < 2:
        pytest.skip("needs two logical CPU devices; tests/conftest.py makes them")
    strategy = tf.distribute.MirroredStrategy([d.name for d in devices[:2]])
    with strategy.scope():
        layer = Dropout(0.5)
    step = tf.function(lambda: strategy.run(lambda: layer(tf.ones(64), training=True)))
    one, other = (y.numpy() for y in step().values)
    assert 10 < np.count_nonzero(one != other) < 54


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="dropout_rate"):
        Dropout(rate)
