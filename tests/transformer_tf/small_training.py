"""A trainer of a tiny model and batches for it."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from transformer_tf.config import PRESETS, TrainingConfig
from transformer_tf.model import build_transformer
from transformer_tf.training import Trainer

SIZES = dict(vocab_size=300, num_layers=1, d_model=16, d_ff=32, dropout_rate=0.0)
TINY = dataclasses.replace(PRESETS["tiny"].model, **SIZES)
RECIPE = TrainingConfig(
    batch_tokens=64, warmup_steps=10, max_steps=1, learning_rate_scale=0.5
)


def make_trainer(policy="float32", model=TINY, **changes):
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    try:
        transformer = build_transformer(model)
    finally:
        keras.config.set_dtype_policy("float32")
    recipe = dataclasses.replace(RECIPE, **changes)
    return Trainer(transformer, recipe, model.d_model)


def make_batch(rows=8, seed=1):
    """Sentences of different lengths: ((source, target_in), target_out)."""
    random = np.random.default_rng(seed)
    source = random.integers(4, 300, (rows, 6)).astype(np.int32)
    target = random.integers(4, 300, (rows, 5)).astype(np.int32)
    for row in range(rows):
        source[row, 2 + row % 5 :] = 0
        target[row, 1 + row % 4 :] = 0
    target_in = np.roll(target, 1, axis=1)
    target_in[:, 0] = 2
    return (source, target_in), target


def part_of(batch, rows):
    (source, target_in), target = batch
    return (source[rows], target_in[rows]), target[rows]


def dataset_of(*batches):
    spec = tf.TensorSpec([None, None], tf.int32)
    return tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=((spec, spec), spec)
    )


def run(trainer, batches, **callbacks):
    defaults = dict(
        should_stop=lambda: False,
        after_update=lambda: None,
        report=lambda progress: None,
        checkpoint=lambda: None,
        validate=lambda: None,
    )
    shared = trainer.strategy.experimental_distribute_dataset(dataset_of(*batches))
    trainer.train(shared, **{**defaults, **callbacks})
