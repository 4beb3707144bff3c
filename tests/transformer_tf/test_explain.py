"""The walk ends where the model ends."""

import dataclasses

import keras
import numpy as np
import pytest

from transformer_tf.config import PRESETS
from transformer_tf.explain import walk_decoder, walk_encoder
from transformer_tf.model import build_transformer

SOURCE = np.array([[5, 6, 7, 8, 3, 0, 0], [9, 4, 10, 11, 12, 13, 3]], np.int32)
TARGET = np.array([[2, 20, 21, 0], [2, 22, 23, 24]], np.int32)


@pytest.fixture(scope="module", params=["sinusoidal", "learned"])
def model(request):
    keras.utils.set_random_seed(2)
    size = dataclasses.replace(
        PRESETS["tiny"].model, vocab_size=304, positions=request.param
    )
    model = build_transformer(size)
    for weight in model.weights:  # biases that are not zero
        weight.assign_add(keras.random.normal(weight.shape, stddev=0.1))
    return model


@pytest.fixture(scope="module")
def walks(model):
    memory, mask = model.encode(SOURCE)
    encoder = walk_encoder(model, SOURCE, mask)
    return encoder, walk_decoder(model, TARGET, encoder.memory, mask)


def test_the_walk_ends_in_the_same_logits(model, walks):
    encoder, decoder = walks
    memory, _ = model.encode(SOURCE)
    np.testing.assert_allclose(encoder.memory, memory, atol=1e-5)
    np.testing.assert_allclose(decoder.logits, model((SOURCE, TARGET)), atol=1e-5)


def test_there_is_a_look_for_each_station(model, walks):
    encoder, decoder = walks
    assert len(encoder.looks) == len(model.encoder.enc_layers) == 2
    assert len(decoder.looks) == len(decoder.cross_looks) == 2


def test_shares_sum_to_one_and_are_zero_where_nobody_may_look(walks):
    encoder, decoder = walks
    for look in [*encoder.looks, *decoder.looks, *decoder.cross_looks]:
        shares = np.asarray(look.steps.shares)
        np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-5)
        hidden = np.broadcast_to(~np.asarray(look.mask), shares.shape)
        assert hidden.any()
        assert (shares[hidden] == 0).all()


def test_the_steps_follow_from_each_other(walks):
    encoder, decoder = walks
    for look in [*encoder.looks, *decoder.looks, *decoder.cross_looks]:
        query, key, value = (np.asarray(x) for x in (look.query, look.key, look.value))
        scores = query @ np.swapaxes(key, -1, -2)
        np.testing.assert_allclose(look.steps.scores, scores, atol=1e-4)
        scaled = scores / query.shape[-1] ** 0.5
        np.testing.assert_allclose(look.steps.scaled, scaled, atol=1e-4)
        mixed = np.asarray(look.steps.shares) @ value
        np.testing.assert_allclose(look.steps.output, mixed, atol=1e-4)


def test_the_shares_are_those_of_the_layer(model, walks):
    look = walks[0].looks[0]
    layer = model.encoder.enc_layers[0]
    output, shares = layer.mha(
        query=look.x,
        key=look.x,
        value=look.x,
        attention_mask=look.mask,
        return_attention_scores=True,
    )
    np.testing.assert_allclose(look.steps.shares, shares, atol=1e-6)
    np.testing.assert_allclose(look.attn_output, output, atol=1e-5)
