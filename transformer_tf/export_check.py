"""Is this SavedModel one that only translates?

A graph is a program: operations of TensorFlow can read and write files. So a SavedModel
is read as data first, and loaded only if it is made of operations that translation is
made of. Reading and writing variables is left to the functions that save and restore
them, and nothing else may call these.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import saved_model_pb2

_TRANSLATING = """
    AddV2 All Any Assert BatchMatMulV2 BiasAdd BroadcastTo Cast ConcatV2 Const Cumsum
    Equal Exp ExpandDims Fill FloorDiv GatherV2 Greater GreaterEqual Identity If
    IsFinite IsNan Less LessEqual Log LogicalAnd LogicalNot LogicalOr MatMul Max Maximum
    Mean Min Minimum Mul Neg NoOp NotEqual Pack Pad PadV2 PartitionedCall Placeholder
    PlaceholderWithDefault Pow Prod RaggedGather RaggedRange RaggedTensorToTensor Range
    ReadVariableOp RealDiv Relu Reshape Rsqrt Select SelectV2 SentencepieceDetokenizeOp
    SentencepieceOp SentencepieceTokenizeOp Shape Size Slice Softmax Sqrt Square
    SquaredDifference Squeeze StatefulPartitionedCall StatelessIf StatelessWhile
    StaticRegexReplace StopGradient StridedSlice StringJoin Sub Sum TensorScatterUpdate
    Tile TopKV2 Transpose Unpack VarHandleOp Where While
"""
_SAVING = """
    AssignVariableOp Const DisableCopyOnRead Identity MergeV2Checkpoints NoOp Pack
    Placeholder ReadVariableOp RestoreV2 SaveV2 Select ShardedFilename
    StaticRegexFullMatch StringJoin
"""


def find_faults(export: str | os.PathLike) -> list[str]:
    """What in a SavedModel has no place in a translator; nothing if all is well.

    Args:
        export: directory with saved_model.pb; nothing in it is run.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    model = saved_model_pb2.SavedModel()
    try:
        model.ParseFromString((Path(export) / "saved_model.pb").read_bytes())
    except DecodeError as error:
        raise ValueError("saved_model.pb is damaged") from error
    if len(model.meta_graphs) != 1:
        return [f"{len(model.meta_graphs)} graphs instead of 1"]
    [graph] = model.meta_graphs
    saving = set(_saving_functions(graph))
    saving_ops, translating_ops = set(_SAVING.split()), set(_TRANSLATING.split())
    faults = []
    for name, nodes in _functions(graph.graph_def):
        known = saving_ops if name in saving else translating_ops
        for node in nodes:
            where = f"in {name or 'the main graph'}"
            if node.op not in known:
                faults.append(f"the operation {node.op} {where}")
            called = set(_called_functions(node)) & saving
            if called and node.name not in _saver_nodes(graph):
                faults.append(f"a call of {called.pop()} {where}")
    for function in graph.graph_def.library.function:
        if function.attr["_XlaMustCompile"].b:
            faults.append(
                f"XLA in {function.signature.name}, which TensorFlow Serving refuses"
            )
    return faults


def _functions(graph_def) -> Iterator[tuple]:
    yield "", graph_def.node
    for function in graph_def.library.function:
        yield function.signature.name, function.node_def


def _saver_nodes(graph) -> set[str]:
    """The nodes of the main graph that save and restore."""
    saver = graph.saver_def
    return {saver.save_tensor_name.partition(":")[0], saver.restore_op_name}


def _saving_functions(graph) -> Iterator[str]:
    for node in graph.graph_def.node:
        if node.name in _saver_nodes(graph):
            yield from _called_functions(node)


def _called_functions(node) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)
