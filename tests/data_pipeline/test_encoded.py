import itertools
import json
import threading

import numpy as np
import pytest
import tensorflow as tf

from data_pipeline import encoded as module
from data_pipeline.encoded import encode_pairs
from data_pipeline.errors import DataError
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

    def tokenize(self, text):
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


def rows_of(encoded):
    return [
        (
            encoded.source_ids[slice(*encoded.source_offsets[i : i + 2])].tolist(),
            encoded.target_ids[slice(*encoded.target_offsets[i : i + 2])].tolist(),
        )
        for i in range(len(encoded))
    ]


def same(a, b):
    return rows_of(a) == rows_of(b) and a.counts == b.counts


def test_by_hand(tmp_path):
    pairs = Pairs([("abc", "d"), ("", "x"), ("b", "cdef"), ("a", "bc"), ("abcd", "e")])
    encoded = encode_pairs(pairs, Letters(), tmp_path, max_length=4, report=quiet)
    # The end token counts: three letters fit into 4, four do not.
    assert encoded.source_ids.tolist() == [4, 5, 6, 4]
    assert encoded.source_offsets.tolist() == [0, 3, 4]
    assert encoded.target_ids.tolist() == [7, 5, 6]
    assert encoded.target_offsets.tolist() == [0, 1, 3]
    assert encoded.source_lengths.tolist() == [3, 1]
    assert encoded.target_lengths.tolist() == [1, 2]
    assert len(encoded) == 2
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


@pytest.mark.parametrize("chunk", [1, 2, 4, 6])
def test_chunks_leave_no_trace(tmp_path, monkeypatch, chunk):
    whole = encode_pairs(Pairs(), Letters(), tmp_path / "a", 12, quiet)
    monkeypatch.setattr(module, "CHUNK_PAIRS", chunk)
    assert same(whole, encode_pairs(Pairs(), Letters(), tmp_path / "b", 12, quiet))


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
    assert small.source_ids.dtype == np.uint16 and large.source_ids.dtype == np.int32
    assert same(small, large)


def test_arrays_are_mapped_not_read(tmp_path):
    encoded = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    assert isinstance(encoded.source_ids.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        encoded.source_ids[0] = 1


def test_no_pairs_at_all(tmp_path):
    for pairs in (Pairs([]), Unreadable([])):
        encoded = encode_pairs(pairs, Letters(), tmp_path, 12, quiet)
        assert len(encoded) == 0 and encoded.counts["kept"] == 0


FILES = ["source_ids", "source_offsets", "target_ids", "target_offsets", "about.json"]


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


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        *itertools.product([cut, empty, delete], FILES),
        *itertools.product([flip], FILES[:4]),  # a digit of a count cannot be told
    ],
)
def test_damage_is_found_and_mended(tmp_path, file, damage):
    first = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    rows, lines = rows_of(first), []
    del first
    damage(tmp_path / encoded_folder(tmp_path) / file)
    again = encode_pairs(Pairs(), Letters(), tmp_path, 12, lines.append)
    assert rows_of(again) == rows
    assert "damaged" in lines[0]
    encode_pairs(Unreadable(), Letters(), tmp_path, 12, quiet)


def encoded_folder(cache_dir):
    (folder,) = (path.name for path in cache_dir.iterdir() if path.is_dir())
    return folder


def test_about_of_another_shape_is_damage(tmp_path):
    encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    about = tmp_path / encoded_folder(tmp_path) / "about.json"
    for content in ([], {}, {"arrays": 1}, {"arrays": {"x": ["<u2", 0]}, "counts": {}}):
        about.write_text(json.dumps(content))
        assert len(encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)) == 3


def test_what_a_killed_run_left_is_no_cache(tmp_path):
    first = encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)
    rows, folder = rows_of(first), tmp_path / first.fingerprint
    del first
    folder.rename(folder.with_suffix(".tmp"))
    (folder.with_suffix(".tmp") / "source_ids").write_bytes(b"half")
    assert rows_of(encode_pairs(Pairs(), Letters(), tmp_path, 12, quiet)) == rows
    assert encoded_folder(tmp_path) == folder.name


def test_an_error_of_the_corpus_leaves_nothing_behind(tmp_path):
    class Broken(Pairs):
        def __iter__(self):
            yield from PAIRS
            raise DataError("line 7 of it")

    with pytest.raises(DataError, match="line 7"):
        encode_pairs(Broken(), Letters(), tmp_path, 12, quiet)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_progress_is_lines_without_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "CHUNK_PAIRS", 2)
    monkeypatch.setattr(module, "CHUNKS_PER_LINE", 1)
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
