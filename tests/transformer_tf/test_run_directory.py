import json
import os

import pytest
import yaml

from transformer_tf.config import ConfigError
from transformer_tf.run_directory import Metrics, RunDirectory, write_bytes

SETTINGS = {"d_model": 64, "max_steps": 10, "dataset": "天気"}


def begin(path, settings=SETTINGS, fresh=False):
    run = RunDirectory(path, settings, fresh)
    run.begin()
    run._lock.close()  # as the end of the process does
    return run


def learn(run):
    """Leaves what a run that has learnt something has."""
    run.checkpoints.mkdir()
    (run.checkpoints / "ckpt-1.index").touch()
    run.vocabulary.write_text("words")


def test_settings_are_kept(tmp_path):
    run = begin(tmp_path / "a" / "run")
    assert yaml.safe_load(run.config.read_text("utf-8")) == SETTINGS


def test_the_same_settings_go_on_and_others_are_refused(tmp_path):
    learn(begin(tmp_path))
    assert begin(tmp_path).vocabulary.exists()
    with pytest.raises(ConfigError, match="d_model 64 there, 32 now.*--fresh"):
        RunDirectory(tmp_path, {**SETTINGS, "d_model": 32})


def test_settings_of_a_run_that_learnt_nothing_may_be_mended(tmp_path):
    begin(tmp_path).vocabulary.write_text("words")
    run = begin(tmp_path, {**SETTINGS, "d_model": 32})
    assert yaml.safe_load(run.config.read_text("utf-8"))["d_model"] == 32
    assert not run.vocabulary.exists()


def test_a_run_may_be_made_longer(tmp_path):
    learn(begin(tmp_path))
    run = begin(tmp_path, {**SETTINGS, "max_steps": 20})
    assert yaml.safe_load(run.config.read_text("utf-8"))["max_steps"] == 20
    assert run.has_checkpoint()


def test_fresh_removes_the_files_of_a_run_and_nothing_else(tmp_path):
    learn(begin(tmp_path))
    (tmp_path / "thesis.txt").write_text("years of work")
    run = RunDirectory(tmp_path, {**SETTINGS, "d_model": 32}, fresh=True)
    assert run.has_checkpoint(), "nothing is removed before the corpus is open"
    run.begin()
    assert not run.has_checkpoint()
    assert not run.vocabulary.exists()
    assert (tmp_path / "thesis.txt").exists()


def test_two_processes_do_not_share_a_directory(tmp_path):
    first = RunDirectory(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="in use by another"):
        RunDirectory(tmp_path, SETTINGS)
    first._lock.close()
    RunDirectory(tmp_path, SETTINGS)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write to --output_dir .*run"):
        RunDirectory(tmp_path / "run", SETTINGS)


@pytest.mark.parametrize("text", ["- a list", "broken: [", ""])
def test_a_damaged_configuration_is_no_traceback(tmp_path, text):
    learn(run := begin(tmp_path))
    run.config.write_text(text)
    with pytest.raises(ConfigError, match="config.yaml"):
        RunDirectory(tmp_path, SETTINGS)


def test_a_corpus_that_changed_is_refused(tmp_path):
    run = begin(tmp_path)
    run.note(corpus_fingerprint="aa")
    run.check_unchanged(corpus_fingerprint="bb")  # nothing was learnt yet
    learn(run)
    run.check_unchanged(corpus_fingerprint="aa")
    with pytest.raises(ConfigError, match="corpus_fingerprint .*aa there, bb now"):
        run.check_unchanged(corpus_fingerprint="bb")


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
    metrics.add(1_000_000, 1.5, 1e-3, 4, 3.5, 12.25, 30)
    metrics.rewind(20)
    lines = metrics.path.read_text().splitlines()
    assert lines[0] == Metrics.HEADER
    assert [line.split(",")[0] for line in lines[1:]] == ["10", "20"]
    assert lines[1] == "10,1.5,0.001,4,3.5,12.25,30"


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    write_bytes(path, b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [
        ("a.png", b"old")
    ]
