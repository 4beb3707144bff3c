"""A fresh process looks at an export as a server does."""

import itertools
import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from data_pipeline.tokenizer import Tokenizer, train_vocabulary
from transformer_tf.model import Transformer
from transformer_tf.self_check import self_check
from transformer_tf.translator import Translator


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    keras.utils.set_random_seed(3)
    tokenizer = Tokenizer(train_vocabulary(["明日は晴れ。 a sunny day"] * 9, 320))
    model = Transformer(
        tokenizer.vocab_size, 2, 64, num_heads=2, d_ff=64, max_length=20
    )
    model((np.ones((1, 2), np.int32),) * 2)
    model.embedding.embeddings.assign(3 * model.embedding.embeddings)
    path = tmp_path_factory.mktemp("export") / "1"
    translator = Translator(model, tokenizer)
    translator.save(path)
    return path, translator


def test_a_sound_export_passes_every_check(saved):
    path, translator = saved
    checks = dict(self_check(path, translator))
    assert checks == dict.fromkeys(
        [
            "operations",
            "size of the variables",
            "loading as a server",
            "signature serving_default",
            "signature greedy",
            "signature nbest",
        ],
        "",
    )


def test_weights_that_are_there_twice_are_found(saved, tmp_path):
    path, translator = saved
    translator.again = [tf.Variable(weight) for weight in translator.weights]
    try:
        translator.save(tmp_path / "1")
    finally:
        del translator.again
    # The size is the second thing that is looked at.
    checks = dict(itertools.islice(self_check(tmp_path / "1", translator), 2))
    assert "expected at most" in checks["size of the variables"]


def test_another_translation_is_found_and_shown(saved):
    path, translator = saved

    def other(text, **options):
        found = translator.translate(text, **options)
        return {**found, "translation": found["translation"] + "!"}

    liar = SimpleNamespace(translate=other, weights=translator.weights)
    checks = dict(self_check(path, liar))
    assert "'明日は天気' in a batch gives" in checks["signature greedy"]


def test_what_does_not_load_in_a_session_is_found(saved, tmp_path):
    # A planted operation that no stock server knows.
    path, translator = saved
    shutil.copytree(path, tmp_path / "1")
    file = tmp_path / "1" / "saved_model.pb"
    model = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    model.meta_graphs[0].graph_def.node.add(name="x", op="NoSuchOperation")
    file.write_bytes(model.SerializeToString())
    checks = dict(self_check(tmp_path / "1", translator))
    assert "NoSuchOperation" in checks["operations"]
    assert "NoSuchOperation" in checks["loading as a server"]
    assert "signature greedy" not in checks
