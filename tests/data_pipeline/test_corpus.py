"""What goes in, what comes out, and a count for every pair that does not."""

import dataclasses
import gzip
import os
import random
import subprocess
import sys

import pytest

from data_pipeline import corpus as corpus_module
from data_pipeline.corpus import DataConfig, open_corpus
from data_pipeline.errors import DataError
from data_pipeline.splits import normalize

WHOLE = {"validation_percent": 0.0, "test_percent": 0.0}  # nothing is split off


def write(path, *lines: bytes | str, end: bytes = b"\n"):
    """Writes lines as they are; text as UTF-8. Returns the path as flags hold it."""
    data = [line.encode() if isinstance(line, str) else line for line in lines]
    content = b"".join(line + end for line in data)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def two_files(folder, source, target, **fields) -> DataConfig:
    return DataConfig(
        train_source=write(folder / "a.ja", *source),
        train_target=write(folder / "a.en", *target),
        **(WHOLE | fields),
    )


def numbered(count: int, start: int = 0) -> list[tuple[str, str]]:
    numbers = range(start, start + count)
    return [(f"荷物は{n}個です。", f"There are {n} parcels.") for n in numbers]


def drops(pairs) -> dict[str, int]:
    list(pairs)
    return {why: n for why, n in pairs.counts.items() if n and why != "kept"}


# --------------------------------------------------------------------------- one by one


def test_two_files_give_their_pairs_again_and_again(tmp_path):
    config = two_files(tmp_path, ["犬。", " 猫。 "], ["A dog.", "\u3000A cat.\t"])
    train = open_corpus(config).train
    assert train.counts == {}
    assert list(train) == [("犬。", "A dog."), ("猫。", "A cat.")] == list(train)
    assert train.counts["kept"] == 2
    assert next(iter(train.counts)) == "kept"


INVALID = [b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xe3\x81", b"\xf4\x90\x80\x80"]


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("", "A dog.", "empty side"),
        ("犬。", "", "empty side"),
        ("", "", "empty side"),
        ("\u3000 \t", "A dog.", "empty side"),
        ("犬\0。", "A dog.", "NUL"),
        ("犬。", "\0", "NUL"),
        *((bad, "A dog.", "invalid UTF-8") for bad in INVALID),
        ("犬。", b"A \x80 dog.", "invalid UTF-8"),
        ("犬" * 1001, "d" * 1001, "too long"),
        ("犬" * 1001, "d" * 10, "too long"),
        ("犬。", "d" * 19, "length ratio"),
        ("犬" * 10, "d", "length ratio"),
    ],
)
def test_each_rule_drops_and_counts(tmp_path, source, target, reason):
    config = two_files(tmp_path, ["猫。", source], ["A cat.", target])
    train = open_corpus(config).train
    assert list(train) == [("猫。", "A cat.")]
    assert drops(train) == {reason: 1}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("犬" * 1000, "d" * 1000),
        ("犬。", "d" * 18),
        ("OK", "OK"),
        ("犬", "D"),
        ("\"'", "'\""),
        ("𠮷", "👨‍👩‍👧"),
        ("\ufffd", "\uffff"),
    ],
)
def test_the_edge_of_each_rule_is_kept(tmp_path, source, target):
    train = open_corpus(two_files(tmp_path, [source], [target])).train
    assert list(train) == [(source, target)]


@pytest.mark.parametrize(
    "mark", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\r", "\x1c"]
)
def test_only_line_feeds_end_a_line(tmp_path, mark):
    config = two_files(tmp_path, [f"犬{mark}だ。", "猫。"], ["A dog.", "A cat."])
    train = open_corpus(config).train
    assert list(train) == [(f"犬{mark}だ。", "A dog."), ("猫。", "A cat.")]


def test_windows_files_a_bom_and_a_last_line_without_an_end(tmp_path):
    (tmp_path / "a.ja").write_bytes("\ufeff犬。\r\n猫。\r\n".encode())
    (tmp_path / "a.en").write_bytes("\ufeffA dog.\nA cat.".encode())
    config = DataConfig(
        train_source=str(tmp_path / "a.ja"),
        train_target=str(tmp_path / "a.en"),
        **WHOLE,
    )
    assert list(open_corpus(config).train) == [("犬。", "A dog."), ("猫。", "A cat.")]


def test_a_thousand_lines_with_every_fault(tmp_path):
    faults = {
        "missing TAB": [b"no tab here"] * 11,
        "empty side": [b"\tnothing before", "何もない\t".encode(), b"\t"] * 4,
        "NUL": ["犬\0。\tA dog.".encode()] * 13,
        "invalid UTF-8": [bad + b"\tA dog." for bad in INVALID] * 3,
        "too long": ["犬".encode() * 1001 + b"\t" + b"d" * 1001] * 5,
        "length ratio": [b"a\t" + b"d" * 60] * 7,
        "duplicate": ["荷物は1個です。\tThere are 1 parcels.".encode()] * 17,
    }
    bad = [line for lines in faults.values() for line in lines]
    good = ["\t".join(pair).encode() for pair in numbered(1000 - len(bad))]
    rows = good + bad
    random.Random(1).shuffle(rows)
    config = DataConfig(pairs=write(tmp_path / "a.tsv", *rows), **WHOLE)
    train = open_corpus(config).train
    assert sorted(train) == sorted(numbered(len(good)))
    assert drops(train) == {why: len(lines) for why, lines in faults.items()}


def test_duplicates_are_exact_pairs(tmp_path):
    source = ["犬。", "犬。", "犬。", "犬", " 犬。"]
    target = ["A dog.", "A dog.", "Dogs.", "A dog.", "A dog."]
    train = open_corpus(two_files(tmp_path, source, target)).train
    assert list(train) == [("犬。", "A dog."), ("犬。", "Dogs."), ("犬", "A dog.")]
    assert drops(train) == {"duplicate": 2}


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_duplicates_far_apart(tmp_path, monkeypatch, block):
    monkeypatch.setattr(corpus_module, "BLOCK", block)
    rows = [f"{n % 70}番\tNo. {n % 70}" for n in range(200)]
    train = open_corpus(DataConfig(pairs=write(tmp_path / "p", *rows), **WHOLE)).train
    assert ["\t".join(pair) for pair in train] == rows[:70]
    assert train.counts["duplicate"] == 130 and train.counts["kept"] == 70


@pytest.mark.parametrize("suffix", [".tsv", ".tsv.gz"])
def test_a_table_counts_wrong_rows(tmp_path, suffix):
    rows = ["犬。\tA dog.", "猫。", "", "鳥。\tA bird.\tnote", "\tx", '"魚"\t"Fish"']
    path = write(tmp_path / f"p{suffix}", *rows, end=b"\r\n")
    train = open_corpus(DataConfig(pairs=path, **WHOLE)).train
    assert list(train) == [("犬。", "A dog."), ('"魚"', '"Fish"')]
    assert drops(train) == {"missing TAB": 2, "extra TAB": 1, "empty side": 1}


def test_gzip_and_plain_files_are_the_same_corpus(tmp_path):
    plain = open_corpus(two_files(tmp_path, ["犬。"], ["A dog."]))
    source, target = tmp_path / "a.ja.gz", tmp_path / "a.en.gz"
    packed = open_corpus(
        DataConfig(
            train_source=write(source, "犬。"),
            train_target=write(target, "A dog."),
            **WHOLE,
        )
    )
    assert list(plain.train) == list(packed.train)
    assert plain.fingerprint == packed.fingerprint


# ------------------------------------------------------------------------------- splits


def test_missing_splits_are_drawn_and_nothing_is_lost(tmp_path):
    pairs = numbered(600)
    path = write(tmp_path / "p.tsv", "no tab", *map("\t".join, pairs), "\0\tx")
    config = DataConfig(pairs=path, validation_percent=10, test_percent=20)
    drawn = open_corpus(config)
    parts = [list(drawn.train), list(drawn.validation), list(drawn.test)]
    assert sorted(sum(parts, [])) == sorted(pairs)
    assert all(20 < len(part) < 500 for part in parts)
    assert [drops(part) for part in (drawn.train, drawn.validation, drawn.test)] == [
        {"missing TAB": 1, "NUL": 1},
        {},
        {},
    ]
    seen = [{normalize(text) for pair in part for text in pair} for part in parts]
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_what_was_drawn_is_kept_for_the_next_process(tmp_path, monkeypatch):
    config = DataConfig(pairs=write(tmp_path / "p", *map("\t".join, numbered(300))))
    first = open_corpus(config, tmp_path / "cache")
    splits = [list(first.train), list(first.validation)]
    monkeypatch.setattr(corpus_module, "assign_splits", None)
    again = open_corpus(config, tmp_path / "cache")
    assert [list(again.train), list(again.validation)] == splits
    for other in (
        DataConfig(pairs=config.pairs, validation_percent=2),
        DataConfig(pairs=write(tmp_path / "q", *map("\t".join, numbered(301)))),
    ):
        with pytest.raises(TypeError):  # it has to be drawn
            list(open_corpus(other, tmp_path / "cache").train)


def test_invalid_lines_do_not_shift_the_drawn_splits(tmp_path):
    pairs = numbered(300)
    rows = ["\t".join(pair) for pair in pairs]
    dirty = [line for row in rows for line in (b"\xff\t", row, "", "\t\t")]
    config = {"validation_percent": 10, "test_percent": 10}
    clean = open_corpus(DataConfig(pairs=write(tmp_path / "c", *rows), **config))
    mixed = open_corpus(DataConfig(pairs=write(tmp_path / "d", *dirty), **config))
    for split in ("train", "validation", "test"):
        assert list(getattr(clean, split)) == list(getattr(mixed, split))


def test_given_splits_are_taken_as_they_are(tmp_path):
    """Scores must be comparable: no filter by length, no removal of duplicates."""
    held_out = [
        "犬。\tA dog.",
        "犬。\tA dog.",
        "犬。\t" + "d" * 40,
        "\t",
        "鳥。\tA bird.",
    ]
    drawn = open_corpus(
        DataConfig(
            pairs=write(tmp_path / "p", *map("\t".join, numbered(300))),
            validation_pairs=write(tmp_path / "v", *held_out),
            test_percent=10,
        )
    )
    assert [en for _, en in drawn.validation] == [
        "A dog.",
        "A dog.",
        "d" * 40,
        "A bird.",
    ]
    assert drops(drawn.validation) == {"empty side": 1}
    assert len(list(drawn.train)) + len(list(drawn.test)) == 300
    assert "10% of train" in drawn.description


def test_a_tiny_corpus_needs_a_validation_set_but_no_test_set(tmp_path):
    path = write(tmp_path / "p.tsv", *map("\t".join, numbered(3)))
    tiny = open_corpus(DataConfig(pairs=path))
    assert list(tiny.train) == numbered(3)
    assert list(tiny.test) == []
    with pytest.raises(DataError, match="--validation_percent"):
        list(tiny.validation)


# -------------------------------------------------------------------------- fingerprint


def test_the_fingerprint_follows_content_and_rules(tmp_path):
    def prints(source="犬。", **fields):
        made = open_corpus(two_files(tmp_path, [source], ["A dog."], **fields))
        return made.fingerprint, made.train.fingerprint

    first = prints()
    assert prints() == first
    for other in (
        prints("猫。"),
        prints(max_chars=999),
        prints(max_length_ratio=8.0),
        prints(test_percent=1.0),
    ):
        assert other[0] != first[0] and other[1] != first[1]
    splits = open_corpus(two_files(tmp_path, ["犬。"], ["A dog."], test_percent=1.0))
    assert splits.train.fingerprint != splits.test.fingerprint


# -------------------------------------------------------------------------- wrong usage


def test_unequal_files_are_refused_with_the_first_surplus_line(tmp_path):
    config = two_files(tmp_path, ["犬。", "猫。"], ["A dog.", "A cat.", "A bird.", "X"])
    with pytest.raises(DataError) as caught:
        open_corpus(config)
    message = str(caught.value)
    for part in ("a.ja has 2 lines", "a.en has 4", "line 3 of", "'A bird.'"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("missing", "does not exist"),
        ("folder", "is not a file"),
        ("no gzip", "cannot read .*Not a gzipped file"),
        ("cut gzip", "cannot read"),
        ("empty", "it is empty"),
        ("utf-16", "[0-9]+ (NUL|invalid UTF-8|missing TAB)"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, kind, expected):
    path = tmp_path / ("p.gz" if "gzip" in kind else "p.tsv")
    rows = "\n".join(map("\t".join, numbered(2000)))
    if kind == "folder":
        path.mkdir()
    elif kind == "cut gzip":
        path.write_bytes(gzip.compress(rows.encode())[:-900])
    elif kind != "missing":
        data = {"no gzip": b"plain", "empty": b"", "utf-16": rows.encode("utf-16")}
        path.write_bytes(data[kind])
    with pytest.raises(DataError, match=expected) as caught:
        list(open_corpus(DataConfig(pairs=str(path), **WHOLE)).train)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(tmp_path):
    path = write(tmp_path / "p.tsv", "犬。\tA dog.")
    os.chmod(path, 0)
    with pytest.raises(DataError, match="cannot read .*Permission denied"):
        open_corpus(DataConfig(pairs=path))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"train_source": "a"}, "--train_source needs --train_target"),
        ({"test_target": "a", "pairs": "p"}, "--test_target needs --test_source"),
        ({"pairs": "p", "train_source": "a"}, "exclude each other"),
        ({"test_percent": 60.0, "validation_percent": 40.0}, "less than 100"),
        ({"test_percent": float("nan")}, "at least 0"),
        ({"max_length_ratio": 0.5}, "at least 1"),
        ({"manual_dir": "/no/such"}, "--manual_dir /no/such is not a folder"),
    ],
)
def test_flags_that_do_not_fit_together(tmp_path, monkeypatch, fields, expected):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p", "犬。\tA dog.")
    with pytest.raises(DataError, match=expected):
        open_corpus(DataConfig(**fields))


def test_files_need_no_tfds(tmp_path):
    path = write(tmp_path / "p.tsv", *map("\t".join, numbered(3)))
    code = (
        "import sys; from data_pipeline.corpus import *; "
        f"assert len(list(open_corpus(DataConfig(pairs={path!r})).train)) == 3; "
        "assert not {'tensorflow', 'tensorflow_datasets'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# --------------------------------------------------------------------------------- TFDS


@pytest.fixture
def made_up_set(tmp_path, monkeypatch):
    """A TFDS data_dir in which our builder has prepared made-up sentences."""
    from data_pipeline.tatoeba_ja_en import tatoeba_ja_en_dataset_builder as builder

    pairs = numbered(400)
    rows = [f"{n}\t{ja}\t{en}\t-" for n, (ja, en) in enumerate(pairs)]
    manual = tmp_path / "manual"
    manual.mkdir()
    write(manual / builder.SENTENCES, *rows)
    data = (manual / builder.SENTENCES).read_bytes()
    monkeypatch.setattr(builder, "MEMBER_SHA256", builder.sha256(data).hexdigest())
    return {"data_dir": str(tmp_path / "tfds"), "manual_dir": str(manual)}


def test_a_tfds_name_gives_the_same_pairs_in_either_direction(made_up_set, capsys):
    there = open_corpus(DataConfig(**made_up_set))
    back = open_corpus(DataConfig(**made_up_set, source_lang="en", target_lang="ja"))
    assert capsys.readouterr().out == ""
    for split in ("train", "validation", "test"):
        pairs = list(getattr(there, split))
        assert pairs and [p[::-1] for p in pairs] == list(getattr(back, split))
    assert there.train.counts["kept"] > 350
    assert there.fingerprint != back.fingerprint
    assert there.description == "tatoeba_ja_en/snapshot/1.0.0 (ja to en)"


def test_reading_agrees_with_tfds_in_either_file_format(made_up_set, tmp_path):
    import tensorflow_datasets as tfds

    stream = open_corpus(DataConfig(**made_up_set))
    builder = tfds.builder("tatoeba_ja_en", data_dir=made_up_set["data_dir"])
    expected = [
        (example["ja"].decode(), example["en"].decode())
        for example in tfds.as_numpy(builder.as_dataset(split="train"))
    ]
    assert list(stream.train) == expected

    made_up_set["data_dir"] = str(tmp_path / "random_access")
    tfds.builder(
        "tatoeba_ja_en", data_dir=made_up_set["data_dir"], file_format="array_record"
    ).download_and_prepare(
        download_config=tfds.download.DownloadConfig(
            manual_dir=made_up_set["manual_dir"]
        )
    )
    random_access = open_corpus(DataConfig(**made_up_set))
    assert list(random_access.train) == expected


def test_files_replace_single_splits_of_a_tfds_set(made_up_set, tmp_path):
    path = write(tmp_path / "v.tsv", "犬。\tA dog.")
    mixed = open_corpus(DataConfig(**made_up_set, validation_pairs=path))
    assert list(mixed.validation) == [("犬。", "A dog.")]
    assert len(list(mixed.train)) > 350 and list(mixed.test)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dataset": "no_such_set"}, "no_such_set is unknown: .*tatoeba_ja_en"),
        (
            {"dataset": "tatoeba_ja_en/x"},
            "tatoeba_ja_en/snapshot or tatoeba_ja_en/opus",
        ),
        ({"dataset": "tatoeba_ja_en:9.9.9"}, "only: 1.0.0"),
        ({"dataset": "not a name"}, "cannot open --dataset not a name"),
        ({"dataset": "mnist"}, "mnist/.* has: none"),
        ({"source_lang": "de"}, "--source_lang de .* has: ja, en"),
        ({"source_lang": "en"}, "expected two of those"),
    ],
)
def test_names_and_languages_that_do_not_exist(made_up_set, fields, expected):
    with pytest.raises(DataError, match=expected) as caught:
        open_corpus(DataConfig(**(made_up_set | fields)))
    assert "\n" not in str(caught.value)


def test_a_data_dir_that_cannot_be_written(made_up_set, tmp_path):
    write(tmp_path / "file", "x")
    with pytest.raises(DataError, match="cannot (open|prepare) ") as caught:
        open_corpus(DataConfig(**(made_up_set | {"data_dir": f"{tmp_path}/file"})))
    assert "\n" not in str(caught.value)


def test_every_flag_explains_itself():
    """simple-parsing takes the help of a flag from the comment behind its field."""
    parsing = pytest.importorskip("simple_parsing")
    for field in dataclasses.fields(DataConfig):
        help_text = parsing.docstring.get_attribute_docstring(DataConfig, field.name)
        assert help_text.comment_inline, field.name
    parsed = parsing.parse(DataConfig, args=["--source_lang", "en", "--pairs", "p.tsv"])
    assert parsed == DataConfig(source_lang="en", pairs="p.tsv")
