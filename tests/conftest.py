"""Quiet TensorFlow, the same random numbers in every test."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(1)
