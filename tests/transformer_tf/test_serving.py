import pytest
import tensorflow as tf

from transformer_tf.serving import BATCH_SIZES, write_serving_files, write_warmup


def test_the_servers_settings_name_the_run(tmp_path):
    base_path = tmp_path / "my_run" / "export"
    base_path.mkdir(parents=True)
    write_serving_files(base_path)
    texts = {path.name: path.read_text("utf-8") for path in base_path.iterdir()}
    assert sorted(texts) == [
        "README.txt",
        "batching_parameters.txt",
        "models.config",
        "monitoring.config",
    ]
    assert 'name: "my_run"' in texts["models.config"]
    assert 'base_path: "/models/my_run"' in texts["models.config"]
    assert "docker run" in texts["README.txt"]
    assert ":/models/my_run" in texts["README.txt"]
    for text in texts.values():
        assert text.count("{") == text.count("}")


def test_the_largest_batch_is_one_that_is_allowed(tmp_path):
    # Otherwise the server does not start.
    write_serving_files(tmp_path)
    text = (tmp_path / "batching_parameters.txt").read_text()
    assert f"max_batch_size {{ value: {BATCH_SIZES[-1]} }}" in text
    allowed = [int(x.split()[1]) for x in text.splitlines() if "allowed" in x]
    assert allowed == sorted(BATCH_SIZES)


def test_warmup_requests_are_read_back(tmp_path):
    why = "needs the serving extra: pip install -e '.[serving]'"
    pytest.importorskip("tensorflow_serving.apis", reason=why)
    from tensorflow_serving.apis import prediction_log_pb2

    assert write_warmup(tmp_path)
    file = tmp_path / "assets.extra" / "tf_serving_warmup_requests"
    seen = set()
    for record in tf.data.TFRecordDataset(str(file)):
        log = prediction_log_pb2.PredictionLog.FromString(record.numpy())
        request = log.predict_log.request
        rows = {tensor.tensor_shape.dim[0].size for tensor in request.inputs.values()}
        seen.add((request.model_spec.signature_name, *rows))
    expected = {(name, n) for name in ("serving_default", "greedy") for n in (1, 8)}
    assert seen == {*expected, ("nbest", 1)}
