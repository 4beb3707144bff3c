import json
import threading

import numpy as np
import pytest
import tensorflow as tf

from data_pipeline import encoded as module
from data_pipeline.encoded import encode_pairs
from data_pipeline.errors import DataError
from data_pipeline.shards import join
from data_pipeline.tokenizer import Tokenizer, train_vocabulary

PAIRS = [
    ("ねこ", "a cat"),
    ("いぬがいる", "there is a dog"),
    ("とり", "bird"),
    ("\u200b", "nothing but a zero-width space"),
    ("とてもとてもとてもとても長い", "long"),
    ("短い", "a very very very long one"),
]


class Letters:
    """A vocabulary of letters: a is 4, b is 5, ...; spaces are no tokens."""

    def __init__(self, fingerprint="letters", vocab_size=60_000):
        self.fingerprint, self.vocab_size = fingerprint, vocab_size
        self.sentences = 0  # asked for

    def tokenize(self, text):
        self.sentences += len(text)
        text = tf.strings.regex_replace(text, "[ \u200b]", "")
        return tf.strings.unicode_decode(text, "UTF-8") - (ord("a") - 4)


class Pairs:
    """The corpus's side of the contract: `counts` are there after a full pass."""

    def __init__(self, pairs=PAIRS, fingerprint="six pairs"):
        self.pairs, self.fingerprint, self.counts = pairs, fingerprint, None

    def __iter__(self):
        yield from self.pairs
        self.counts = {"kept": len(self.pairs), "empty side": 3}


class Unreadable(Pairs):
    def __iter__(self):
        raise AssertionError("the text was read")


def quiet(line):
    assert "\n" not in line


def whole(encoded):
    """All its shards as one."""
    return join([open_shard() for open_shard in encoded.shards])


def rows_of(encoded):
    if not len(encoded):
        return []
    ids = whole(encoded)
    return [
        (
            ids.source_ids[slice(*ids.source_offsets[i : i + 2])].tolist(),
            ids.target_ids[slice(*ids.target_offsets[i : i + 2])].tolist(),
        )
        for i in range(len(ids))
    ]


def same(a, b):
    return rows_of(a) == rows_of(b) and a.counts == b.counts


def test_by_hand(tmp_path):
    pairs = Pairs([("abc", "d"), ("", "x"), ("b", "cdef"), ("a", "bc"), ("abcd", "e")])
    encoded = encode_pairs(pairs, Letters(), tmp_path, max_length=4, report=quiet)
    # The end token counts: three letters fit into 4, four do not.
    (open_shard,), (lengths,) = encoded.shards, encoded.lengths
    shard = open_shard()
    assert shard.source_ids.tolist() == [4, 5, 6, 4]
    assert shard.source_offsets.tolist() == [0, 3, 4]
    assert shard.target_ids.tolist() == [7, 5, 6]
    assert shard.target_offsets.tolist() == [0, 1, 3]
    assert shard.source_lengths.tolist() == [3, 1]
    assert shard.target_lengths.tolist() == [1, 2]
    assert lengths.tolist() == [[1, 2, 1], [3, 1, 1]]
    assert len(encoded) == len(shard) == 2
    assert encoded.counts == {
        "kept": 2,
        "empty side": 3,
        "no tokens": 1,
        "too many tokens": 2,
    }


def test_counts_add_up(tmp_path):
    counts = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet).counts
    assert counts["no tokens"] == 1 and counts["too many tokens"] == 2
    assert sum(counts.values()) == len(PAIRS) + 3


def test_the_real_tokenizer(tmp_path):
    tokenizer = Tokenizer(
        train_vocabulary([text for pair in PAIRS for text in pair], 400)
    )
    encoded = encode_pairs(Pairs(), tokenizer, tmp_path, 100, quiet)
    assert len(encoded) == 5
    for (source, target), (ja, en) in zip(
        rows_of(encoded), PAIRS[:3] + PAIRS[4:], strict=True
    ):
        ids = tf.ragged.constant([source, target])
        assert [t.decode() for t in tokenizer.detokenize(ids).numpy()] == [ja, en]


def test_a_second_start_reads_no_text(tmp_path):
    first = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    again = encode_pairs(Unreadable(), Letters(), tmp_path, 12, quiet)
    assert same(first, again) and first.fingerprint == again.fingerprint


@pytest.mark.parametrize(
    ("pairs", "tokenizer", "max_length"),
    [
        (Pairs(fingerprint="others"), Letters(), 12),
        (Pairs(), Letters("others"), 12),
        (Pairs(), Letters(), 13),
    ],
    ids=["corpus", "vocabulary", "max_length"],
)
def test_another_key(tmp_path, pairs, tokenizer, max_length):
    first = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    other = encode_pairs(pairs, tokenizer, tmp_path, max_length, quiet)
    assert pairs.counts is not None  # it was read
    assert first.fingerprint != other.fingerprint
    assert same(first, encode_pairs(Unreadable(), Letters(), tmp_path, 12, quiet))


def test_ids_are_small_where_the_vocabulary_is(tmp_path):
    small = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    large = encode_pairs(Pairs(), Letters("70 k", 70_000), tmp_path, 12, quiet)
    assert whole(small).source_ids.dtype == np.uint16
    assert whole(large).source_ids.dtype == np.int32
    assert same(small, large)


def test_arrays_are_mapped_not_read(tmp_path):
    encoded = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    (open_shard,) = encoded.shards
    assert isinstance(open_shard().source_ids.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        open_shard().source_ids[0] = 1


def test_no_pairs_at_all(tmp_path):
    for pairs in (Pairs([]), Unreadable([])):
        encoded = encode_pairs(pairs, Letters(), tmp_path, 12, quiet)
        assert len(encoded) == 0 and encoded.counts["kept"] == 0


# Damage ------------------------------------------------------------------------------

ARRAYS = ["source_ids", "source_offsets", "target_ids", "target_offsets"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def encoded_folder(cache_dir):
    (folder,) = (path for path in cache_dir.iterdir() if path.is_dir())
    return folder


@pytest.mark.parametrize("damage", [cut, empty, delete])
@pytest.mark.parametrize(
    "file",
    ["about.json", *(f"00000/{name}" for name in [*ARRAYS, "lengths", "about.json"])],
)
def test_what_is_missing_is_found_and_mended(tmp_path, file, damage):
    rows, lines = rows_of(encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)), []
    damage(encoded_folder(tmp_path) / file)
    again = encode_pairs(Pairs(), Letters(), tmp_path, 12, lines.append)
    assert rows_of(again) == rows
    assert "not whole" in lines[0]
    encode_pairs(Unreadable(), Letters(), tmp_path, 12, quiet)


@pytest.mark.parametrize("file", ARRAYS)
def test_what_was_altered_never_trains(tmp_path, shards_of_two, file):
    """Reading everything at each start would take long: it is found when opened."""
    rows = rows_of(encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet))
    shard = encoded_folder(tmp_path) / "00000"
    flip(shard / file)
    altered = encode_pairs(Unreadable(), Letters(), tmp_path, 12, quiet)
    with pytest.raises(DataError, match=f"rm -r {shard}") as error:
        altered.shards[0]()
    assert "\n" not in str(error.value) and file in str(error.value)
    for file in shard.iterdir():  # what the message says
        file.unlink()
    shard.rmdir()
    letters = Letters()
    mended = encode_pairs(Pairs(), letters, tmp_path, 12, quiet)
    assert rows_of(mended) == rows and letters.sentences == 2 * 2


def test_altered_lengths_are_found_at_the_start(tmp_path):
    encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    flip(encoded_folder(tmp_path) / "00000" / "lengths")
    with pytest.raises(DataError, match="rm -r"):
        encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)


@pytest.mark.parametrize("file", ["about.json", "00000/about.json"])
def test_about_of_another_shape_is_damage(tmp_path, file):
    encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    about = encoded_folder(tmp_path) / file
    for content in ([], {}, {"arrays": 1}, {"arrays": {"x": ["<u2", 0]}, "counts": {}}):
        about.write_text(json.dumps(content))
        assert len(encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)) == 3


# Shards ------------------------------------------------------------------------------


@pytest.fixture
def shards_of_two(monkeypatch):
    monkeypatch.setattr(module, "SHARD_PAIRS", 2)


def test_shards_by_hand(tmp_path, monkeypatch):
    """Nine pairs in shards of four: the last pair is opened with those before it."""
    monkeypatch.setattr(module, "SHARD_PAIRS", 4)
    pairs = Pairs([("a" * n, "b") for n in range(1, 10)])
    encoded = encode_pairs(pairs, Letters(), tmp_path, 10, quiet)
    folder = encoded_folder(tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "about.json",
        "00000",
        "00001",
        "00002",
    }
    # "a" * 9 and an end token still fit.
    lengths = [open_shard().source_lengths.tolist() for open_shard in encoded.shards]
    assert lengths == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert encoded.lengths[1].tolist() == [[n, 1, 1] for n in range(5, 10)]
    assert encoded.counts["kept"] == len(encoded) == 9


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("chunk", [1, 2, 4096])
def test_shards_leave_no_trace(tmp_path, monkeypatch, size, chunk):
    plain = encode_pairs(Pairs(), Letters(), tmp_path / "a", 12, quiet)
    monkeypatch.setattr(module, "SHARD_PAIRS", size)
    monkeypatch.setattr(module, "CHUNK_PAIRS", chunk)
    assert same(plain, encode_pairs(Pairs(), Letters(), tmp_path / "b", 12, quiet))
    again = encode_pairs(Unreadable(), Letters(), tmp_path / "b", 12, quiet)
    assert same(plain, again)
    for lengths, open_shard in zip(again.lengths, again.shards, strict=True):
        assert lengths[:, 2].sum() == len(open_shard())


def test_many_threads_write_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_PAIRS", 100)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 7)
    pairs = Pairs([("a" * (n % 17), "b" * (n % 5 + 1)) for n in range(777)])
    for threads in (1, 5):
        monkeypatch.setattr(module, "THREADS", threads)
        encode_pairs(pairs, Letters(), tmp_path / str(threads), 12, quiet)
    one, five = (encoded_folder(tmp_path / threads) for threads in "15")
    files = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    assert len(files) == 1 + 8 * 6
    assert all(
        (one / file).read_bytes() == (five / file).read_bytes() for file in files
    )


class Broken(Pairs):
    """Stops after a number of pairs, as a disk does."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def __iter__(self):
        yield from PAIRS[: self.count]
        raise DataError("line 7 of it")


@pytest.mark.parametrize(("count", "whole_shards"), [(1, 0), (2, 1), (5, 2), (6, 3)])
def test_goes_on_after_the_last_whole_shard(
    tmp_path, shards_of_two, count, whole_shards
):
    rows = rows_of(encode_pairs(Pairs(), Letters(), tmp_path / "a", 12, quiet))
    with pytest.raises(DataError, match="line 7"):
        encode_pairs(Broken(count), Letters(), tmp_path / "b", 12, quiet)
    left = sorted(path.name for path in encoded_folder(tmp_path / "b").iterdir())
    assert left == [f"{number:05}" for number in range(whole_shards)]
    letters = Letters()
    resumed = encode_pairs(Pairs(), letters, tmp_path / "b", 12, quiet)
    assert rows_of(resumed) == rows
    assert letters.sentences == 2 * (len(PAIRS) - 2 * whole_shards)


def test_what_a_killed_run_left_is_no_shard(tmp_path):
    rows = rows_of(encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet))
    shard = encoded_folder(tmp_path) / "00000"
    shard.rename(shard.with_suffix(".tmp"))
    (shard.with_suffix(".tmp") / "source_ids").write_bytes(b"half")
    assert rows_of(encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)) == rows
    assert sorted(path.name for path in shard.parent.iterdir()) == [
        "00000",
        "about.json",
    ]


def test_progress_is_lines_without_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "CHUNK_PAIRS", 2)
    monkeypatch.setattr(module, "PAIRS_PER_LINE", 2)
    lines = []
    encode_pairs(Pairs(), Letters(), tmp_path, 12, lines.append)
    assert [line.split()[0] for line in lines] == ["2", "4", "6", "3"]
    assert capsys.readouterr() == ("", "")


def test_a_second_worker_waits(tmp_path):
    acquired = threading.Event()

    def work():
        with module._locked(tmp_path / "lock"):
            acquired.set()

    worker = threading.Thread(target=work, daemon=True)
    with module._locked(tmp_path / "lock"):
        worker.start()
        assert not acquired.wait(0.3)
    assert acquired.wait(5)
