"""Where do raw pairs come from? From two line files, from a table, or from TFDS.

Raw means bytes as they stand: nothing is judged here but that a source can be had and
that its sides fit together. `corpus` does the rest.
"""

import contextlib
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import DataError
from data_pipeline.splits import SPLITS

DEFAULT_DATASET = "tatoeba_ja_en"


@dataclass(frozen=True)
class Source:
    """One stream of raw pairs.

    Attributes:
        name: for messages.
        fingerprint: hex; of the content of files, or of the name, version and counts
            of a TFDS set.
        records: starts a new pass; a record that is not two fields is no pair.
    """

    name: str
    fingerprint: str
    records: Callable[[], Iterator[tuple[bytes, ...]]]


def digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()


# ------------------------------------------------------------------------------- files


def table_source(path: Path) -> Source:
    fingerprint, _ = _survey(path)
    return Source(
        str(path), fingerprint, lambda: (tuple(s.split(b"\t")) for s in _lines(path))
    )


def lines_source(source: Path, target: Path) -> Source:
    """Two files that must have a partner for every line: nothing is cut off."""
    surveys = [_survey(source), _survey(target)]
    (_, source_lines), (_, target_lines) = surveys
    if source_lines != target_lines:
        longer = source if source_lines > target_lines else target
        number = min(source_lines, target_lines) + 1
        text = next(s for n, s in enumerate(_lines(longer), 1) if n == number)
        shown = text[:200].decode("utf-8", "replace")
        shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
        raise DataError(
            f"{source} has {source_lines} lines but {target} has {target_lines}: line "
            f"n of one must translate line n of the other; the first line without a "
            f"partner is line {number} of {longer}: {shown!r}"
        )
    return Source(
        f"{source} + {target}",
        digest(*(fingerprint for fingerprint, _ in surveys)),
        lambda: zip(_lines(source), _lines(target), strict=True),
    )


def _survey(path: Path) -> tuple[str, int]:
    """Returns SHA-256 and number of lines of the (unpacked) bytes, in one pass."""
    digest, lines, last = sha256(), 0, b"\n"
    with _open(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return digest.hexdigest(), lines + (last != b"\n")


def _lines(path: Path) -> Iterator[bytes]:
    """Yields lines without their end; only LF or CR LF ends one.

    Bytes, because text mode and `str.splitlines` also split at U+2028, U+0085, VT or
    FF, which real sentences contain, and then every later pair is misaligned.
    """
    with _open(path) as file:
        for number, line in enumerate(file):
            if number == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield line.removesuffix(b"\n").removesuffix(b"\r")


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a file: expected a text file, or one in .gz")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: expected a text file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error


# --------------------------------------------------------------------------------- TFDS


def dataset_sources(
    dataset: str,
    languages: tuple[str, str],
    data_dir: str | None = None,
    manual_dir: str | None = None,
) -> dict[str, Source]:
    """Prepares a TFDS set, once, and returns its splits by name."""
    if manual_dir and not Path(manual_dir).is_dir():
        raise DataError(f"--manual_dir {manual_dir} is not a folder")
    builder = _builder(dataset, data_dir)
    _check_languages(builder, languages)
    _prepare(builder, manual_dir)
    name = builder.info.full_name
    sources = {
        split: Source(
            f"{name} ({languages[0]} to {languages[1]})",
            digest(name, str(info.num_examples), split, *languages),
            _dataset_records(builder, split, languages),
        )
        for split, info in builder.info.splits.items()
        if split in SPLITS
    }
    if "train" not in sources:
        raise DataError(
            f"{name} has no split 'train', only {', '.join(builder.info.splits)}"
        )
    return sources


def _builder(dataset: str, data_dir: str | None):
    """Finds the builder of a TFDS name; ours becomes known to TFDS by its import."""
    import tensorflow_datasets as tfds

    name, _, variant = dataset.partition(":")[0].partition("/")
    if name == DEFAULT_DATASET:
        # Always by this one module name: TFDS refuses to register a builder twice.
        from data_pipeline.tatoeba_ja_en import tatoeba_ja_en_dataset_builder as ours

        if variant and variant not in ours.Builder.builder_configs:
            there = [f"{name}/{each}" for each in ours.Builder.builder_configs]
            raise DataError(
                f"--dataset {dataset} is unknown: expected {' or '.join(there)}"
            )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return tfds.builder(dataset, data_dir=data_dir)
    except tfds.core.registered.DatasetNotFoundError:
        raise DataError(
            f"--dataset {dataset} is unknown: expected {DEFAULT_DATASET}, "
            f"{DEFAULT_DATASET}/opus, or a translation set of TFDS "
            "(`python -c 'import tensorflow_datasets as t; print(t.list_builders())'`)"
        ) from None
    except Exception as error:  # a builder may raise anything
        raise DataError(
            f"cannot open --dataset {dataset}: {_one_line(error)}"
        ) from error


def _check_languages(builder, languages: tuple[str, str]) -> None:
    import tensorflow_datasets as tfds

    features = builder.info.features
    there = [k for k in features if isinstance(features[k], tfds.features.Text)]
    missing = [each for each in languages if each not in there]
    if missing or languages[0] == languages[1]:
        raise DataError(
            f"--source_lang {languages[0]} --target_lang {languages[1]}: expected two "
            f"of those that {builder.info.full_name} has: {', '.join(there) or 'none'}"
        )


def _prepare(builder, manual_dir: str | None) -> None:
    import tensorflow_datasets as tfds

    download_config = tfds.download.DownloadConfig(manual_dir=manual_dir)
    try:
        # TFDS announces itself on standard output, which belongs to results.
        with contextlib.redirect_stdout(sys.stderr):
            builder.download_and_prepare(download_config=download_config)
    except DataError:
        raise
    except Exception as error:  # a builder may raise anything
        raise DataError(
            f"cannot prepare {builder.info.full_name} in {builder.data_dir}: "
            f"{_one_line(error)}"
        ) from error


def _dataset_records(
    builder, split: str, languages: tuple[str, str]
) -> Callable[[], Iterator[tuple[bytes, bytes]]]:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    files = [str(path) for path in builder.info.splits[split].filepaths]
    text = dict.fromkeys(languages, tf.io.FixedLenFeature([], tf.string))

    def records() -> Iterator[tuple[bytes, bytes]]:
        # As TFDS reads, but parsing 1,024 examples at once: twenty times as fast.
        batches = tf.data.TFRecordDataset(files).batch(1024)
        batches = batches.map(lambda examples: tf.io.parse_example(examples, text))
        for batch in batches.as_numpy_iterator():
            yield from zip(*(batch[each] for each in languages), strict=True)

    def random_access_records() -> Iterator[tuple[bytes, bytes]]:
        for example in builder.as_data_source(split):
            yield tuple(example[each] for each in languages)

    is_stream = builder.info.file_format == tfds.core.FileFormat.TFRECORD
    return records if is_stream else random_access_records


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
