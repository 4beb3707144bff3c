"""Which pairs of sentences, and what was left out?

One way in for every source: a TFDS name, two line files, or one TAB-separated file.
Pairs stream; every pair that is dropped is counted under its reason. A split that the
source does not have is drawn from its training pairs (`splits.assign_splits`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_pipeline.errors import DataError, UsageError
from data_pipeline.keys import BLOCK, KeyTable, hash_text
from data_pipeline.sources import (
    DEFAULT_DATASET,
    Source,
    dataset_sources,
    digest,
    lines_source,
    table_source,
)
from data_pipeline.splits import SPLITS, assign_splits, remembered

RULES_VERSION = 1  # part of every fingerprint: raise it when a rule changes

# Why a pair is dropped, in the order in which the rules are asked.
INVALID_RULES = ("missing TAB", "extra TAB", "NUL", "invalid UTF-8", "empty side")
TRAINING_RULES = ("too long", "length ratio", "duplicate")


@dataclass(frozen=True)
class DataConfig:
    """Where the sentence pairs come from; files win over the data set by name."""

    dataset: str = DEFAULT_DATASET  # TFDS name: tatoeba_ja_en[/opus], or another set
    source_lang: str = "ja"  # language to translate from, as the TFDS set calls it
    target_lang: str = "en"  # language to translate into
    train_source: str | None = None  # training sentences, one a line (.gz too)
    train_target: str | None = None  # their translations, line by line
    validation_source: str | None = None  # if missing, split off the training pairs
    validation_target: str | None = None  # their translations
    test_source: str | None = None  # if missing, split off the training pairs
    test_target: str | None = None  # their translations
    pairs: str | None = None  # training pairs, source TAB target a line (.gz too)
    validation_pairs: str | None = None  # validation pairs in the same form
    test_pairs: str | None = None  # test pairs in the same form
    data_dir: str | None = None  # where TFDS keeps prepared data sets
    manual_dir: str | None = None  # folder with files to be used instead of a download
    max_chars: int = 1000  # training pairs with a longer side are dropped
    max_length_ratio: float = 9.0  # so are pairs with one side so many times the other
    validation_percent: float = 1.0  # share to split off where no validation is given
    test_percent: float = 1.0  # share to split off where no test set is given


def open_corpus(config: DataConfig, cache_dir: Path | None = None) -> "Corpus":
    """Finds all files or prepares the data set; reads whole files, but keeps nothing.

    Args:
        config: which ones.
        cache_dir: keeps which pairs were split off, or the next process has to read
            everything to know.

    Raises:
        DataError: something is missing, unreadable or does not fit together.
    """
    _check_numbers(config)
    sources = {split: _files_source(config, split) for split in SPLITS}
    if sources["train"] is None:
        languages = (config.source_lang, config.target_lang)
        named = dataset_sources(
            config.dataset, languages, config.data_dir, config.manual_dir
        )
        sources = {split: sources[split] or named.get(split) for split in SPLITS}
    return Corpus(config, sources, cache_dir)


def _check_numbers(config: DataConfig) -> None:
    percents = (config.validation_percent, config.test_percent)
    if not (min(percents) >= 0 and sum(percents) < 100):
        raise UsageError(
            "--validation_percent and --test_percent must be at least 0 and together "
            f"less than 100, not {percents[0]} and {percents[1]}"
        )
    if not (config.max_chars >= 1 and config.max_length_ratio >= 1):
        raise UsageError(
            "--max_chars and --max_length_ratio must be at least 1, not "
            f"{config.max_chars} and {config.max_length_ratio}"
        )


class Corpus:
    """The pairs of a source in three splits.

    Attributes:
        train, validation, test: `Pairs`.
        fingerprint: hex; changes with the content of the source and with the rules.
        description: one line for the log.
    """

    def __init__(
        self,
        config: DataConfig,
        sources: dict[str, Source | None],
        cache_dir: Path | None = None,
    ):
        self._config = config
        self._sources = sources
        self._cache_dir = cache_dir
        self._percents = {
            split: 0.0 if sources[split] else getattr(config, f"{split}_percent")
            for split in ("validation", "test")
        }
        self.train = self._pairs("train", split_off=any(self._percents.values()))
        self.validation = self._pairs("validation", split_off=not sources["validation"])
        self.test = self._pairs("test", split_off=not sources["test"])
        self.fingerprint = digest(*(getattr(self, s).fingerprint for s in SPLITS))
        names = {
            split: source.name if source else f"{self._percents[split]:g}% of train"
            for split, source in sources.items()
        }
        self.description = ", ".join(
            f"{split}: {name}" for split, name in names.items()
        )
        if len(set(names.values())) == 1:
            self.description = names["train"]

    def _pairs(self, split: str, split_off: bool) -> "Pairs":
        if not split_off:
            return Pairs(split, self._sources[split], self._config)
        part = f"{split} of {self._percents}"
        train, members = self._sources["train"], self._members_of(split)
        return Pairs(split, train, self._config, part, members)

    def _members_of(self, split: str) -> Callable[[], Iterator[bool]]:
        code = SPLITS.index(split)
        return lambda: (each == code for each in memoryview(self._drawn))

    @cached_property
    def _drawn(self) -> np.ndarray:
        """For each valid training pair its number in `SPLITS`, uint8."""
        source, percents = self._sources["train"], self._percents

        def draw() -> np.ndarray:
            pairs = tqdm(  # on a terminal only
                _valid_pairs(source, {}),
                desc="splitting off",
                unit=" pairs",
                unit_scale=True,
                disable=None,
            )
            return assign_splits(pairs, percents["validation"], percents["test"])

        if self._cache_dir is None:
            return draw()
        name = digest(str(RULES_VERSION), source.fingerprint, str(percents))[:32]
        return remembered(self._cache_dir / f"{name}.splits", draw)


class Pairs:
    """Clean (source, target) pairs; can be iterated again and again.

    Only training pairs are filtered by length and freed of duplicates: validation and
    test keep every valid pair in order, or scores would not be comparable.

    Attributes:
        counts: after a full pass, the number of pairs kept and dropped, by reason.
        fingerprint: hex; of the source's fingerprint and the rules.
    """

    def __init__(
        self,
        split: str,
        source: Source,
        config: DataConfig,
        part: str = "all",
        members: Callable[[], Iterator[bool]] | None = None,
    ):
        self.split = split
        self.counts: dict[str, int] = {}
        self._source = source
        self._config = config
        self._members = members
        rules = [RULES_VERSION, split == "train"]
        if split == "train":
            rules += [config.max_chars, config.max_length_ratio]
        self.fingerprint = digest(source.fingerprint, part, *map(str, rules))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        counts = dict.fromkeys(("kept", *INVALID_RULES, *TRAINING_RULES), 0)
        # Invalid lines belong to no split; they are reported once, with training.
        is_rest = self._members is not None and self.split != "train"
        pairs = _valid_pairs(self._source, {} if is_rest else counts)
        if self._members is not None:
            pairs = compress(pairs, self._members())
        if self.split == "train":
            pairs = _training_pairs(pairs, self._config, counts)
        for pair in pairs:
            counts["kept"] += 1
            yield pair
        self.counts = counts
        self._refuse_empty(is_rest)

    def _refuse_empty(self, split_off: bool) -> None:
        if self.counts["kept"] or (split_off and self.split == "test"):
            return  # A tiny corpus may do without a test set.
        if split_off:
            raise DataError(
                f"{self._source.name} is too small to split off "
                f"{self._config.validation_percent:g}% for validation: raise "
                "--validation_percent, or give --validation_source and "
                "--validation_target, or --validation_pairs"
            )
        drops = [f"{n} {why}" for why, n in self.counts.items() if n]
        raise DataError(
            f"no {self.split} pairs in {self._source.name} "
            f"({', '.join(drops) or 'it is empty'}): expected UTF-8 text, one "
            "sentence a line, or source TAB target in a file of pairs"
        )


def _files_source(config: DataConfig, split: str) -> Source | None:
    """Returns the files that the configuration names for a split, if any."""
    table_flag = "pairs" if split == "train" else f"{split}_pairs"
    flags = (f"{split}_source", f"{split}_target")
    table = getattr(config, table_flag)
    sides = [getattr(config, flag) for flag in flags]
    if table and any(sides):
        raise UsageError(f"--{table_flag} and --{flags[0]} exclude each other")
    if table:
        return table_source(Path(table))
    if all(sides):
        return lines_source(Path(sides[0]), Path(sides[1]))
    if any(sides):
        given, missing = flags if sides[0] else flags[::-1]
        raise UsageError(f"--{given} needs --{missing} beside it")
    return None


# ------------------------------------------------------------------------------- rules


def _valid_pairs(source: Source, counts: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the pairs that are text on both sides, blanks at the ends removed."""
    for record in source.records():
        reason = None
        if len(record) != 2:
            reason = "missing TAB" if len(record) < 2 else "extra TAB"
        elif b"\0" in record[0] or b"\0" in record[1]:
            reason = "NUL"
        else:
            try:
                pair = record[0].decode().strip(), record[1].decode().strip()
                reason = None if all(pair) else "empty side"
            except UnicodeDecodeError:
                reason = "invalid UTF-8"
        if reason is None:
            yield pair
        else:
            counts[reason] = counts.get(reason, 0) + 1


def _training_pairs(
    pairs: Iterator[tuple[str, str]], config: DataConfig, counts: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """Yields the pairs from which to learn."""
    seen = KeyTable()
    fitting = (pair for pair in pairs if _fits(pair, config, counts))
    while block := list(islice(fitting, BLOCK)):
        keys = np.array([hash_text("\0".join(pair)) for pair in block], np.uint64)
        is_new = seen.add(keys).tolist()
        counts["duplicate"] += is_new.count(False)
        yield from compress(block, is_new)


def _fits(pair: tuple[str, str], config: DataConfig, counts: dict[str, int]) -> bool:
    shorter, longer = sorted(map(len, pair))
    if longer > config.max_chars:
        counts["too long"] += 1
    elif longer > config.max_length_ratio * shorter:
        counts["length ratio"] += 1
    else:
        return True
    return False
