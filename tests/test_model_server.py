"""The client against a real TensorFlow Serving, where there is one.

Named by TENSORFLOW_MODEL_SERVER or found as tensorflow_model_server on PATH; it is
started on loopback ports. Run with `pytest -m serving`.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from data_pipeline.tokenizer import Tokenizer, train_vocabulary
from transformer_tf.client import ServerError, connect
from transformer_tf.lines import translate_lines
from transformer_tf.model import Transformer
from transformer_tf.serving import write_serving_files
from transformer_tf.translator import Translator, asker

SERVER = os.environ.get("TENSORFLOW_MODEL_SERVER") or shutil.which(
    "tensorflow_model_server"
)
pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(
        SERVER is None,
        reason="needs TensorFlow Serving: put tensorflow_model_server on PATH, or name "
        "it in TENSORFLOW_MODEL_SERVER",
    ),
]
LINES = ["明日は晴れ。", "", "猫", "a sunny day! 猫。", "\u3000", "𠮷野家で👍"]


def make_translator(seed):
    """One that has learnt nothing, and says something else with each seed."""
    keras.utils.set_random_seed(seed)
    tokenizer = Tokenizer(train_vocabulary(["明日は晴れ。 a sunny day"] * 9, 320))
    sizes = dict(num_layers=1, d_model=32, num_heads=2, d_ff=32, max_length=24)
    model = Transformer(tokenizer.vocab_size, **sizes)
    model((np.ones((1, 2), np.int32),) * 2)
    model.embedding.embeddings.assign(3 * model.embedding.embeddings)
    return Translator(model, tokenizer)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base_path = tmp_path_factory.mktemp("run") / "export"
    translator = make_translator(1)
    translator.save(base_path / "1")
    write_serving_files(base_path, "ja_en")
    rest, grpc = free_port(), free_port()
    process = subprocess.Popen(
        [
            SERVER,
            f"--rest_api_port={rest}",
            f"--port={grpc}",
            "--model_name=ja_en",
            f"--model_base_path={base_path}",
            "--enable_batching",
            f"--batching_parameters_file={base_path / 'batching_parameters.txt'}",
            f"--monitoring_config_file={base_path / 'monitoring.config'}",
            "--file_system_poll_wait_seconds=1",
        ]
    )
    url = f"http://127.0.0.1:{rest}/v1/models/ja_en"
    try:
        wait_for(url, "1")
        yield url, f"grpc://127.0.0.1:{grpc}/ja_en", base_path, translator
    finally:
        process.terminate()
        process.wait(30)


def wait_for(url, version):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                states = json.load(response)["model_version_status"]
        except (urllib.error.URLError, ConnectionError):
            states = []
        if any(s["version"] == version and s["state"] == "AVAILABLE" for s in states):
            return
        time.sleep(0.2)
    raise AssertionError(f"version {version} does not become available")


def best(ask, lines, **options):
    found = translate_lines(ask, [line.encode() for line in lines], **options)
    return [sentence.nbest for sentence in found]


def same(one, other):
    assert [[text for text, _ in nbest] for nbest in one] == [
        [text for text, _ in nbest] for nbest in other
    ]
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(
            [score for _, score in mine], [score for _, score in theirs], atol=1e-4
        )


@pytest.mark.parametrize(
    "options", [{}, {"beam_size": 2}, {"beam_size": 3, "nbest": 3}]
)
@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_it_says_what_the_export_says(served, protocol, options):
    rest, grpc, _, translator = served
    if protocol == "grpc":
        pytest.importorskip("grpc", reason="needs pip install -e '.[serving]'")
    ask = connect(rest if protocol == "rest" else grpc)
    same(best(ask, LINES, **options), best(asker(translator), LINES, **options))


def test_requests_that_ask_for_different_things_share_batches(served):
    rest, _, _, translator = served
    ask = connect(rest)
    wishes = [{"beam_size": 1 + n % 4, "nbest": 1 + n % 2} for n in range(40)]
    wishes = [{**w, "nbest": min(w["nbest"], w["beam_size"])} for w in wishes]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda w: best(ask, LINES[:2], **w), wishes))
    for wish, nbest in zip(wishes, found, strict=True):
        same(nbest, best(asker(translator), LINES[:2], **wish))


def test_metrics_are_there(served):
    address = served[0].split("/v1/")[0] + "/monitoring/prometheus/metrics"
    with urllib.request.urlopen(address, timeout=5) as response:
        assert b"tensorflow" in response.read()


def test_an_unknown_model(served):
    with pytest.raises(ServerError, match="404"):
        connect(served[0].replace("ja_en", "en_ja"))([b"a"])


def test_a_new_version_is_taken_up(served):
    rest, _, base_path, _ = served
    newer = make_translator(2)
    newer.save(base_path / "2")
    wait_for(rest, "2")
    same(best(connect(rest), LINES), best(asker(newer), LINES))
