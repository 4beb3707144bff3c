"""Does an export say in a server what the model says here?

TensorFlow Serving loads a SavedModel with a session and its restore operation, not as
`tf.saved_model.load` does; some exports work in the one and fail in the other. So a
fresh process that knows TensorFlow and its text operations, and nothing of ours, loads
the export as the server does and runs every signature.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from transformer_tf.export_check import find_faults

# A dozen of different lengths, and what a model may never have seen.
SENTENCES = (
    "明日は天気",
    "はい。",
    "駅はどこですか。",
    "今日はとても寒いですね。",
    "このりんごはいくらですか。",
    "昨日、友達と映画を見ました。",
    "窓を開けてもいいですか。",
    "電車に乗り遅れてしまったので、今日は歩いて行くことにします。",
    "Where is the station?",
    "𠮷野家で👍",
    "",
    "あ" * 300,
)

_SERVER = """
import json, sys
import tensorflow as tf
import tensorflow_text

export, sentences = sys.argv[1], json.load(sys.stdin)
v1 = tf.compat.v1
with v1.Session(graph=tf.Graph()) as session:
    model = v1.saved_model.load(session, ["serve"], export)

    def run(name, texts):
        signature = model.signature_def[name]
        fed = {signature.inputs["text"].name: [text.encode() for text in texts]}
        wanted = {key: info.name for key, info in signature.outputs.items()}
        return session.run(wanted, fed)

    def best(name, texts):
        found = run(name, texts)["translation"].reshape(len(texts), -1)[:, 0]
        return [text.decode() for text in found]

    answers = {}
    for name in model.signature_def:
        if "translation" not in model.signature_def[name].outputs:
            continue
        one_by_one = [best(name, [text])[0] for text in sentences]
        answers[name] = [best(name, sentences), one_by_one]
    shares = run("attention", sentences)["attention"].sum(axis=-1)
    assert ((abs(shares - 1) < 1e-4) | (shares == 0)).all(), "shares do not sum to 1"
print(json.dumps(answers))
"""


class Check(NamedTuple):
    """What was looked at, and what is wrong with it."""

    name: str
    fault: str  # "" if all is well


def self_check(export: Path, translator: Any) -> Iterator[Check]:
    """Looks at an export as a server would.

    Args:
        export: directory of the SavedModel.
        translator: the `Translator` that was saved.

    Yields:
        Each check as soon as it is done.
    """
    yield Check("operations", "; ".join(find_faults(export)[:3]))
    yield Check("size of the variables", _size_fault(export, translator.weights))
    result = subprocess.run(
        [sys.executable, "-c", _SERVER, str(export)],
        input=json.dumps(SENTENCES),
        capture_output=True,
        encoding="utf-8",
        # Whatever this process computes with: the server's is a CPU.
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    if result.returncode:
        yield Check("loading as a server", result.stderr.strip().split("\n")[-1])
        return
    yield Check("loading as a server", "")
    for name, answers in json.loads(result.stdout.splitlines()[-1]).items():
        options = {"beam_size": [1]} if name == "greedy" else {}
        fault = _answer_fault(translator.translate, options, answers)
        yield Check(f"signature {name}", fault)


def _size_fault(export: Path, weights: list[tf.Variable]) -> str:
    """The weights are there once; for their names 5 percent of what float32 needs."""
    size = sum(f.stat().st_size for f in (export / "variables").iterdir())
    counts = [weight.shape.num_elements() for weight in weights]
    bound = round((weights[0].dtype.size + 0.05 * 4) * sum(counts))
    return "" if size <= bound else f"{size:,} bytes, expected at most {bound:,}"


def _answer_fault(translate: Callable, options: dict[str, Any], answers: list) -> str:
    found = translate(tf.constant(SENTENCES), **options)["translation"].numpy()[:, 0]
    expected = [text.decode() for text in found]
    for manner, texts in zip(("in a batch", "one by one"), answers, strict=True):
        for sentence, ours, theirs in zip(SENTENCES, expected, texts, strict=True):
            if ours != theirs:
                return f"{sentence!r} {manner} gives {theirs!r}, expected {ours!r}"
    return ""
