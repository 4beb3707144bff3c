"""Asks a server instead of an export: TensorFlow Serving by REST or gRPC.

What a client answers with is what an export would say. Asking twice does no harm, so a
busy server (503, UNAVAILABLE) and one that is not there yet are asked again, with
pauses; a slow one is not, since that would make it slower.
"""

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from transformer_tf.config import ConfigError, DecodingConfig
from transformer_tf.lines import Answer

TIMEOUT_SECONDS = 60
PAUSES_SECONDS = (0.2, 0.5, 1.0, 2.0)  # before the second, third, … attempt
MAX_ANSWER_BYTES = 64 * 2**20


class ServerError(OSError):
    """A server that is not there, or does not do what we need; in one line."""

    exit_code = 5


class Busy(Exception):
    """The server may answer if it is asked again."""


def is_server(model: str) -> bool:
    """Whether --model names a server."""
    return model.startswith(("http://", "https://", "grpc://"))


def connect(url: str) -> Callable[..., Answer]:
    """The way to ask the server at `url` about sentences, as `translator.asker`.

    Args:
        url: http(s)://HOST:8501/v1/models/NAME, or grpc://HOST:8500/NAME with the
            `serving` extra.

    Raises:
        ConfigError: another URL, or the extra is missing.
    """
    predict = _grpc(url) if url.startswith("grpc://") else _rest(url)

    def ask(sentences: list[bytes], **options: float) -> Answer:
        signature, inputs = _request(sentences, options)
        outputs = _persistently(lambda: predict(signature, inputs), url)
        return _answer(outputs, len(sentences), url)

    return ask


def _request(sentences: list[bytes], options: dict) -> tuple[str, dict[str, list]]:
    """Signature and inputs. Without options the server's own defaults hold; a server
    that batches wants each input with a value for each sentence."""
    inputs: dict[str, list] = {"text": sentences}
    if options == {"nbest": 1} or not options:
        return "serving_default", inputs
    names = ("beam_size", "length_penalty", "extra_length")
    defaults = {name: getattr(DecodingConfig, name) for name in names}
    for name, value in {**defaults, "nbest": 1, **options}.items():
        inputs[name] = [value] * len(sentences)
    return "nbest", inputs


def _persistently(attempt: Callable[[], Any], url: str) -> Any:
    for pause in (*PAUSES_SECONDS, None):
        try:
            return attempt()
        except Busy as busy:
            if pause is None:
                raise ServerError(
                    f"{url} does not answer after {len(PAUSES_SECONDS) + 1} attempts "
                    f"({busy}), expected a running TensorFlow Serving"
                ) from busy
            time.sleep(pause)


def _answer(outputs: Any, count: int, url: str) -> Answer:
    try:
        translations, scores = outputs["translation"], outputs["score"]
        if translations and not isinstance(translations[0], list):
            translations = [[text] for text in translations]
            scores = [[score] for score in scores]
        truncated = [bool(x) for x in outputs.get("truncated", [False] * count)]
        answer = Answer(
            [[_as_bytes(text) for text in row] for row in translations],
            [[float(score) for score in row] for row in scores],
            truncated,
        )
        if (
            not len(answer.translations)
            == len(answer.scores)
            == len(truncated)
            == count
        ):
            raise ValueError("another number of translations")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(
            f"{url} answers something else than translations ({error!r}), expected a "
            "model that `train.py` exported"
        ) from error
    return answer


def _as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


# --- REST ---------------------------------------------------------------------------


def _rest(url: str) -> Callable[[str, dict], dict]:
    path = urlsplit(url).path.rstrip("/")
    if not path.startswith("/v1/models/"):
        raise ConfigError(
            f"--model is {url}, expected http://HOST:8501/v1/models/NAME of a server"
        )
    address = url.rstrip("/") + ":predict"

    def predict(signature: str, inputs: dict[str, list]) -> dict:
        texts = [{"b64": base64.b64encode(text).decode()} for text in inputs["text"]]
        body = {"signature_name": signature, "inputs": {**inputs, "text": texts}}
        answer = _post(address, json.dumps(body).encode(), url)
        try:
            return json.loads(answer)["outputs"]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(
                f"{url} answers {answer[:60]!r}, expected JSON of TensorFlow Serving"
            ) from error

    return predict


def _post(address: str, body: bytes, url: str) -> bytes:
    request = urllib.request.Request(
        address, data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            answer = response.read(MAX_ANSWER_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == 503:
            raise Busy("503") from error
        raise ServerError(_refusal(url, error)) from error
    except (TimeoutError, urllib.error.URLError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise ServerError(
                f"{url} gives no answer within {TIMEOUT_SECONDS} s, expected one; is "
                "the server overloaded?"
            ) from error
        raise Busy(reason) from error
    if len(answer) > MAX_ANSWER_BYTES:
        raise ServerError(f"{url} answers more than {MAX_ANSWER_BYTES:,} bytes")
    return answer


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    """What the server says, and what may be meant."""
    try:
        said = json.loads(error.read(10_000))["error"]
    except (ValueError, KeyError, TypeError, OSError):
        said = error.reason
    hints = {
        400: "has the model the signatures of one that `train.py` exported?",
        404: "is the name of the model right?",
        413: "a proxy limits the size of requests",
    }
    hint = hints.get(error.code, "expected an answer")
    return f"{url} refuses ({error.code}: {' '.join(str(said).split())[:200]}); {hint}"


# --- gRPC ---------------------------------------------------------------------------


def _grpc(url: str) -> Callable[[str, dict], dict]:
    parts = urlsplit(url)
    name = parts.path.strip("/")
    if not parts.netloc or not name or "/" in name:
        raise ConfigError(f"--model is {url}, expected grpc://HOST:8500/NAME")
    try:
        import grpc
        import tensorflow as tf
        from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
    except ImportError as error:
        raise ConfigError(
            f"--model is {url}, but {error.name} is missing: "
            "run `pip install -e '.[serving]'`, or use http://"
        ) from error
    channel = grpc.insecure_channel(
        parts.netloc, options=[("grpc.max_receive_message_length", MAX_ANSWER_BYTES)]
    )
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

    def predict(signature: str, inputs: dict[str, list]) -> dict:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = name
        request.model_spec.signature_name = signature
        for key, values in inputs.items():
            kind = tf.float32 if key == "length_penalty" else None
            request.inputs[key].CopyFrom(tf.make_tensor_proto(values, dtype=kind))
        try:
            response = stub.Predict(request, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            said = f"{error.code().name}: {' '.join(error.details().split())[:200]}"
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                raise Busy(said) from error
            raise ServerError(f"{url} refuses ({said}), expected an answer") from error
        return {
            key: tf.make_ndarray(tensor).tolist()
            for key, tensor in response.outputs.items()
        }

    return predict
