"""Which export a name means."""

from pathlib import Path

import pytest

from transformer_tf import exports
from transformer_tf.config import ConfigError
from transformer_tf.exports import find_export, versions


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory without a run, in a package without a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(exports, "BUNDLED", Path("bundled"))


def save(path):
    path.mkdir(parents=True)
    (path / "saved_model.pb").touch()


def test_no_model_is_one_line_that_says_what_to_do():
    with pytest.raises(ConfigError, match="no model in runs/ja_en.*train.py"):
        find_export()
    with pytest.raises(ConfigError, match="no model in elsewhere"):
        find_export("elsewhere")


def test_the_newest_export_of_a_run():
    base = Path("runs/ja_en/export")
    for version in ("2", "10", ".11.tmp", "12.old"):
        save(base / version)
    (base / "13").mkdir()  # unfinished
    assert [path.name for path in versions(base)] == ["13", "10", "2"]
    assert find_export() == base / "10"
    for named in ("runs/ja_en", "runs/ja_en/export", "runs/ja_en/export/10"):
        assert find_export(named) == base / "10"
    assert find_export(base / "2") == base / "2"


def test_the_bundled_model_answers_until_something_is_trained():
    save(Path("bundled/export/1"))
    assert find_export() == Path("bundled/export/1")
    Path("runs/ja_en/checkpoints").mkdir(parents=True)  # a run without an export
    assert find_export() == Path("bundled/export/1")
    save(Path("runs/ja_en/export/1"))
    assert find_export() == Path("runs/ja_en/export/1")
    with pytest.raises(ConfigError, match="no model in mine"):
        find_export("mine")
