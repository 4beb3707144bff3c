"""Quiet TensorFlow, the same random numbers in every test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

# Two devices on any machine, so that replicas can be tested without a GPU.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(1)
