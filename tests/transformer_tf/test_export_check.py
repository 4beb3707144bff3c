"""What could read or write files is found before anything is loaded."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from data_pipeline.tokenizer import Tokenizer, train_vocabulary
from transformer_tf.config import ConfigError
from transformer_tf.export_check import find_faults
from transformer_tf.model import Transformer
from transformer_tf.translator import ExportError, Translator, load


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    keras.utils.set_random_seed(1)
    tokenizer = Tokenizer(train_vocabulary(["山と犬。 a x"] * 9, 300))
    model = Transformer(tokenizer.vocab_size, 1, 16, num_heads=2, d_ff=16, max_length=9)
    model((np.ones((1, 2), np.int32),) * 2)
    path = tmp_path_factory.mktemp("export") / "1"
    Translator(model, tokenizer).save(path)
    return path


def test_our_own_export_has_no_fault(export):
    assert find_faults(export) == []
    load(export)


@pytest.fixture
def changed(export, tmp_path):
    """Writes the export with something changed in its graph."""

    def change(edit):
        model = saved_model_pb2.SavedModel()
        model.ParseFromString((export / "saved_model.pb").read_bytes())
        edit(model.meta_graphs[0])
        (tmp_path / "saved_model.pb").write_bytes(model.SerializeToString())
        return tmp_path

    return change


def functions_of(graph, part):
    return [f for f in graph.graph_def.library.function if part in f.signature.name]


@pytest.mark.parametrize("op", ["ReadFile", "WriteFile", "MatchingFiles", "PyFunc"])
def test_an_operation_on_files_is_found_wherever_it_is(changed, op):
    def in_a_function(graph):
        functions_of(graph, "translate")[0].node_def.add(name="x", op=op)

    def in_the_main_graph(graph):
        graph.graph_def.node.add(name="x", op=op)

    for edit in (in_a_function, in_the_main_graph):
        [fault] = find_faults(changed(edit))
        assert f"the operation {op}" in fault


def test_variables_are_read_from_files_by_their_own_functions_only(changed):
    def read_elsewhere(graph):
        functions_of(graph, "translate")[0].node_def.add(name="x", op="RestoreV2")

    def call_the_reader(graph):
        [reader] = functions_of(graph, "traced_restore")
        node = functions_of(graph, "translate")[0].node_def.add(
            name="x", op="StatefulPartitionedCall"
        )
        node.attr["f"].func.name = reader.signature.name

    assert "RestoreV2" in find_faults(changed(read_elsewhere))[0]
    assert (
        "a call of __inference__traced_restore"
        in find_faults(changed(call_the_reader))[0]
    )


def test_xla_is_found(changed):
    def compile_it(graph):
        functions_of(graph, "translate")[0].attr["_XlaMustCompile"].b = True

    assert "XLA in" in find_faults(changed(compile_it))[0]


def test_what_has_a_fault_is_not_loaded(changed, monkeypatch):
    def read(graph):
        graph.graph_def.node.add(name="x", op="ReadFile")

    def fail(path):
        raise AssertionError("loaded")

    monkeypatch.setattr(tf.saved_model, "load", fail)
    with pytest.raises(ConfigError, match="refused: it has the operation ReadFile"):
        load(changed(read))


def test_what_is_no_protocol_buffer_is_damaged(tmp_path):
    (tmp_path / "saved_model.pb").write_bytes(b"no model at all")
    with pytest.raises(ExportError, match="cannot read the export"):
        load(tmp_path)
