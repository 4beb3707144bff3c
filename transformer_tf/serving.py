"""What TensorFlow Serving wants beside an export: settings, and requests to warm up.

The server takes up each numbered directory that appears in its base path, so an export
is written under another name and renamed (`Translator.save`); the files here lie beside
the numbers and are only read when the server is told so.
"""

from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

# Rows of a batch that the server makes of several requests; it fills up to the next.
BATCH_SIZES = (1, 2, 4, 8, 16, 32)
SERVER = "tensorflow/serving:2.20.0"

_MODELS = """\
model_config_list {{
  config {{
    name: "{name}"
    base_path: "/models/{name}"
    model_platform: "tensorflow"
  }}
}}
"""
_BATCHING = """\
max_batch_size {{ value: {largest} }}
{allowed}
batch_timeout_micros {{ value: 2000 }}
max_enqueued_batches {{ value: 100 }}
num_batch_threads {{ value: 2 }}
"""
_MONITORING = """\
prometheus_config {
  enable: true
  path: "/monitoring/prometheus/metrics"
}
"""
_README = """\
This directory is a base path of TensorFlow Serving. In the directory above it:

    docker run --rm -p 8500:8500 -p 8501:8501 \\
      -v "$PWD/export:/models/{name}" -e MODEL_NAME={name} {server} \\
      --enable_batching \\
      --batching_parameters_file=/models/{name}/batching_parameters.txt \\
      --monitoring_config_file=/models/{name}/monitoring.config

    curl -d '{{"instances": ["明日は天気"]}}' \\
      http://localhost:8501/v1/models/{name}:predict

    curl -d '{{"signature_name": "greedy", "inputs": {{"text": ["明日は天気"]}}}}' \\
      http://localhost:8501/v1/models/{name}:predict

Signatures: serving_default and greedy take text and give translation and score; nbest
also takes beam_size (1 to 8), length_penalty, extra_length and nbest, one number for
each text, and gives translation and score as rows of that many, and truncated.
models.config is for a server of several models (--model_config_file).
"""


def write_serving_files(base_path: Path, name: str | None = None) -> None:
    """Writes models.config, batching_parameters.txt, monitoring.config, README.txt.

    Args:
        base_path: the directory of the numbered exports.
        name: of the model in the server; that of the run by default.
    """
    name = name or base_path.resolve().parent.name
    allowed = "\n".join(f"allowed_batch_sizes: {size}" for size in BATCH_SIZES)
    texts = {
        "models.config": _MODELS.format(name=name),
        "batching_parameters.txt": _BATCHING.format(
            largest=BATCH_SIZES[-1], allowed=allowed
        ),
        "monitoring.config": _MONITORING,
        "README.txt": _README.format(name=name, server=SERVER),
    }
    for file, text in texts.items():
        (base_path / file).write_text(text, encoding="utf-8")


def write_warmup(export: Path) -> bool:
    """Writes the requests that a server answers for itself before it serves an export:
    several lengths, one and eight at a time, for each signature.

    Returns:
        False, and nothing is written, without the `serving` extra.
    """
    try:
        from tensorflow_serving.apis import prediction_log_pb2
    except ImportError:
        return False
    file = export / "assets.extra" / "tf_serving_warmup_requests"
    file.parent.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(file)) as writer:
        for signature, inputs in _warmup_inputs():
            log = prediction_log_pb2.PredictionLog()
            request = log.predict_log.request
            request.model_spec.signature_name = signature
            for name, values in inputs.items():
                request.inputs[name].CopyFrom(tf.make_tensor_proto(values))
            writer.write(log.SerializeToString())
    return True


def _warmup_inputs() -> Iterator[tuple[str, dict]]:
    for rows in (1, 8):
        for repeated in (1, 4, 12):
            text = ["明日は天気がいい。" * repeated] * rows
            yield "serving_default", {"text": text}
            yield "greedy", {"text": text}
    options = {"beam_size": [4], "nbest": [4], "extra_length": [50]}
    yield "nbest", {"text": ["明日は天気"], "length_penalty": [0.6], **options}
