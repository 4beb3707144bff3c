"""The client against a small server that keeps TensorFlow Serving's contract."""

import base64
import http.server
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from transformer_tf import client
from transformer_tf.client import ServerError, connect, is_server
from transformer_tf.config import ConfigError
from transformer_tf.lines import translate_lines


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the server's plan says, and at its end as a translator would."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)
        self.server.requests.append((self.path, request))
        if self.server.plan:
            return self.server.plan.pop(0)(self)
        inputs = request["inputs"]
        texts = [base64.b64decode(text["b64"]).decode() for text in inputs["text"]]
        if request["signature_name"] == "serving_default":
            outputs = {
                "translation": [text.upper() for text in texts],
                "score": [-0.5] * len(texts),
            }
        else:
            count = max(inputs["nbest"])
            outputs = {
                "translation": [[text.upper()] + [""] * (count - 1) for text in texts],
                "score": [[-0.5] + [float("-inf")] * (count - 1) for _ in texts],
                "truncated": [len(text) > 20 for text in texts],
            }
        self.answer(200, json.dumps({"outputs": outputs}).encode())

    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def answers(code, body):
    return lambda handler: handler.answer(code, body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(client, "PAUSES_SECONDS", (0.01, 0.02))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.plan = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/v1/models/ja_en"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_which_models_are_servers():
    assert is_server("http://a:1/v1/models/m")
    assert is_server("grpc://a:1/m")
    assert not is_server("runs/ja_en")


def test_without_options_the_servers_own_hold(server):
    answer = connect(server.url)([b"tea", "茶".encode()], nbest=1)
    assert answer.translations == [[b"TEA"], ["茶".encode()]]
    assert (answer.scores, answer.truncated) == ([[-0.5]] * 2, [False] * 2)
    [(path, request)] = server.requests
    assert path == "/v1/models/ja_en:predict"
    assert request["signature_name"] == "serving_default"
    assert list(request["inputs"]) == ["text"]


def test_options_are_given_for_each_sentence(server):
    connect(server.url)([b"a", b"b", b"c"], nbest=2, beam_size=3)
    [(_, request)] = server.requests
    assert request["signature_name"] == "nbest"
    texts = request["inputs"].pop("text")
    assert [base64.b64decode(text["b64"]) for text in texts] == [b"a", b"b", b"c"]
    assert request["inputs"] == {
        "beam_size": [3] * 3,
        "length_penalty": [0.6] * 3,
        "extra_length": [50] * 3,
        "nbest": [2] * 3,
    }


def test_what_the_search_did_not_find_and_what_was_cut(server):
    found = translate_lines(connect(server.url), [b"a", b"b" * 30], nbest=3)
    assert [sentence.nbest for sentence in found] == [
        [(b"A", -0.5)],
        [(b"B" * 30, -0.5)],
    ]
    assert [sentence.truncated for sentence in found] == [False, True]


def test_a_thousand_lines_keep_their_order(server):
    lines = [f"line {n} {'x' * (n * 7 % 50)}".encode() for n in range(1000)]
    found = translate_lines(connect(server.url), lines)
    assert [s.nbest[0][0] for s in found] == [line.upper() for line in lines]
    assert len(server.requests) > 30


def test_a_busy_server_is_asked_again(server):
    server.plan = [answers(503, b"{}"), answers(503, b"busy")]
    assert connect(server.url)([b"tea"]).translations == [[b"TEA"]]
    assert len(server.requests) == 3


def test_a_server_that_stays_busy_is_given_up(server):
    server.plan = [answers(503, b"{}")] * 9
    with pytest.raises(ServerError, match="does not answer after 3 attempts .503."):
        connect(server.url)([b"tea"])
    assert len(server.requests) == 3


def test_no_server(monkeypatch):
    monkeypatch.setattr(client, "PAUSES_SECONDS", (0.01,))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match="after 2 attempts .*refused.*expected"):
        connect(f"http://127.0.0.1:{port}/v1/models/m")([b"tea"])


def test_a_slow_server_is_not_asked_again(server, monkeypatch):
    monkeypatch.setattr(client, "TIMEOUT_SECONDS", 0.1)
    server.plan = [lambda handler: time.sleep(0.5)]
    with pytest.raises(ServerError, match="no answer within 0.1 s"):
        connect(server.url)([b"tea"])
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "code, body, message",
    [
        (404, b'{"error": "Servable not found"}', r"404: Servable not found.*name"),
        (
            400,
            b'{"error": "no \\"nbest\\"\\nhere"}',
            "400: .*nbest.*train",
        ),
        (413, b"<html>", "413: .*proxy limits the size"),
        (500, b'["?"]', "500: .*expected an answer"),
        (200, b"<html>hello</html>", "answers b'<html>.*expected JSON"),
        (200, b'{"predictions": [1]}', "expected JSON of TensorFlow Serving"),
        (200, b'{"outputs": [1, 2]}', "answers something else than translations"),
        (200, b'{"outputs": {"translation": [], "score": []}}', "something else"),
        (200, b'{"outputs": {"translation": [3], "score": ["x"]}}', "something else"),
    ],
)
def test_refusals_and_nonsense_are_one_line(server, code, body, message):
    server.plan = [answers(code, body)]
    with pytest.raises(ServerError, match=message) as caught:
        connect(server.url)([b"tea"])
    assert "\n" not in str(caught.value)
    assert len(server.requests) == 1


def test_an_endless_answer_is_cut(server, monkeypatch):
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 100)
    server.plan = [answers(200, b"x" * 200)]
    with pytest.raises(ServerError, match="more than 100 bytes"):
        connect(server.url)([b"tea"])


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://localhost:8501", "expected http://HOST:8501/v1/models/NAME"),
        ("grpc://localhost:8500", "expected grpc://HOST:8500/NAME"),
        ("grpc://localhost:8500/a/b", "expected grpc://HOST:8500/NAME"),
    ],
)
def test_other_addresses_are_refused(url, expected):
    with pytest.raises(ConfigError, match=expected):
        connect(url)


# --- gRPC ---------------------------------------------------------------------------


@pytest.fixture
def grpc_server(monkeypatch):
    why = "needs the serving extra: pip install -e '.[serving]'"
    apis = pytest.importorskip("tensorflow_serving.apis", reason=why)
    grpc = pytest.importorskip("grpc", reason=why)
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    assert apis
    monkeypatch.setattr(client, "PAUSES_SECONDS", (0.01, 0.02))

    class Service(prediction_service_pb2_grpc.PredictionServiceServicer):
        requests, plan = [], []

        def Predict(self, request, context):
            self.requests.append(request)
            if self.plan:
                context.abort(self.plan.pop(0), "not\nnow")
            texts = tf.make_ndarray(request.inputs["text"]).tolist()
            response = predict_pb2.PredictResponse()
            outputs = {
                "translation": [text.upper() for text in texts],
                "score": [-0.5] * len(texts),
            }
            for name, values in outputs.items():
                response.outputs[name].CopyFrom(tf.make_tensor_proto(values))
            return response

    service = Service()
    server = grpc.server(ThreadPoolExecutor(1))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(service, server)
    service.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}/ja_en"
    service.codes = grpc.StatusCode
    server.start()
    yield service
    server.stop(None)


def test_grpc_translates_what_rest_translates(grpc_server):
    texts = ["茶".encode(), b"tea\xff"]
    answer = connect(grpc_server.url)(texts)
    assert answer.translations == [["茶".encode()], [b"TEA\xff"]]
    [request] = grpc_server.requests
    assert request.model_spec.name == "ja_en"
    assert request.model_spec.signature_name == "serving_default"


def test_grpc_options_have_the_types_of_the_signature(grpc_server):
    connect(grpc_server.url)([b"a", b"b"], nbest=1, length_penalty=1)
    inputs = grpc_server.requests[-1].inputs
    assert (
        inputs["length_penalty"].float_val[:] == [1.0]
        or inputs["length_penalty"].tensor_content
    )
    assert [inputs[name].tensor_shape.dim[0].size for name in inputs] == [2] * 5


def test_grpc_asks_a_busy_server_again_and_no_other(grpc_server):
    grpc_server.requests.clear()
    grpc_server.plan[:] = [grpc_server.codes.UNAVAILABLE]
    assert connect(grpc_server.url)([b"tea"]).translations == [[b"TEA"]]
    assert len(grpc_server.requests) == 2
    grpc_server.plan[:] = [grpc_server.codes.NOT_FOUND]
    with pytest.raises(ServerError, match="NOT_FOUND: not now"):
        connect(grpc_server.url)([b"tea"])
    assert len(grpc_server.requests) == 3
