import json

import pytest
import yaml

from transformer_tf.config import ConfigError
from transformer_tf.run_directory import Metrics, RunDirectory

SETTINGS = {"d_model": 64, "max_steps": 10, "dataset": "天気"}


def test_settings_are_kept(tmp_path):
    run = RunDirectory(tmp_path / "a" / "run", SETTINGS)
    assert yaml.safe_load((run.path / "config.yaml").read_text("utf-8")) == SETTINGS


def test_the_same_settings_go_on_and_others_are_refused(tmp_path):
    RunDirectory(tmp_path, SETTINGS)
    RunDirectory(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="d_model 64 there, 32 now.*--fresh"):
        RunDirectory(tmp_path, {**SETTINGS, "d_model": 32})


def test_a_run_may_be_made_longer(tmp_path):
    RunDirectory(tmp_path, SETTINGS)
    run = RunDirectory(tmp_path, {**SETTINGS, "max_steps": 20})
    assert (
        yaml.safe_load((run.path / "config.yaml").read_text("utf-8"))["max_steps"] == 20
    )


def test_fresh_removes_a_run_and_nothing_else(tmp_path):
    run = RunDirectory(tmp_path / "run", SETTINGS)
    (run.path / "vocab.model").write_text("old")
    RunDirectory(tmp_path / "run", {**SETTINGS, "d_model": 32}, fresh=True)
    assert not run.vocabulary.exists()

    other = tmp_path / "photos"
    other.mkdir()
    (other / "cat.jpg").write_text("a cat")
    RunDirectory(other, SETTINGS, fresh=True)
    assert (other / "cat.jpg").exists()


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write to --output_dir .*run"):
        RunDirectory(tmp_path / "run", SETTINGS)


def test_facts_add_up_in_run_json(tmp_path):
    run = RunDirectory(tmp_path, SETTINGS)
    run.note(seed=1, words="天気")
    run.note(seed=2)
    known = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert known == {"seed": 2, "words": "天気"}


def test_metrics_after_the_checkpoint_are_written_again(tmp_path):
    metrics = Metrics(tmp_path / "metrics.csv")
    metrics.rewind(0)
    for step in (10, 20, 30):
        metrics.add(step, 1.5, 1e-3, 4, 3.5, 12.25, 30)
    metrics.rewind(20)
    lines = metrics.path.read_text().splitlines()
    assert lines[0] == Metrics.HEADER
    assert [line.split(",")[0] for line in lines[1:]] == ["10", "20"]
    assert lines[1] == "10,1.5,0.001,4,3.5,12.25,30"
