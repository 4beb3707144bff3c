import os
import random
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import keys as module
from data_pipeline.keys import KeyTable, hash_text, scratch


def array(*keys):
    return np.array(keys, np.uint64)


def test_by_hand():
    table = KeyTable()
    assert table.add(array(5, 7, 5)).tolist() == [True, True, False]
    assert table.add(array(7, 8)).tolist() == [False, True]
    assert table.add(array()).tolist() == []


def test_keys_that_want_the_same_place():
    table = KeyTable()
    places = len(table)
    keys = array(*(3 + n * places for n in range(50)), 4, 2**64 - 1)
    order = np.random.default_rng(0).permutation(len(keys))
    assert table.add(keys[order][:30]).all()
    assert table.add(keys).sum() == len(keys) - 30
    assert not table.add(keys).any()
    assert len(set(table.places(keys).tolist())) == len(keys)


def test_zero_is_a_key_too():
    table = KeyTable()
    assert table.add(array(0, 0)).tolist() == [True, False]
    assert table.add(array(0)).tolist() == [False]


@pytest.mark.parametrize("block", [1, 10, 1000])
def test_equals_a_set_while_it_grows(monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK", 8)  # and so it begins small
    table, seen, rng = KeyTable(room=1), set(), random.Random(block)
    before = len(table)
    for _ in range(3000 // block):
        keys = [rng.randrange(2000) * 2**50 + 1 for _ in range(block)]
        expected = []
        for key in keys:
            expected.append(key not in seen)
            seen.add(key)
        assert table.add(array(*keys)).tolist() == expected
    assert len(table) > 8 * before


def test_places_last_while_there_is_room():
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, 50_000, np.uint64)
    table = KeyTable(room=len(keys))
    size, blocks = len(table), np.array_split(keys, 10)
    places = np.concatenate([table.places(block) for block in blocks])
    again = np.concatenate([table.places(block) for block in blocks])
    assert np.array_equal(places, again) and len(table) == size > places.max()
    assert len(np.unique(places)) == len(keys)


def test_tables_are_files_that_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    numbers = scratch(1000, np.int64)
    assert numbers.shape == (1000,) and not numbers.any()
    numbers[-1] = 7
    assert numbers[-1] == 7 and not list(tmp_path.iterdir())
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if str(tmp_path) in line]
    assert len(mapped) == 1 and "deleted" in mapped[0]
    assert scratch(0, np.int64).shape == (0,)


def test_no_room_is_an_error_not_a_crash():
    space = os.statvfs(module.tempfile.gettempdir())
    with pytest.raises(OSError):
        scratch(2 * space.f_bavail * space.f_frsize, np.uint8)


def test_hashes_are_what_they_were():
    """Pinned: another hash would move sentences from test to train."""
    assert hash_text("") == 0xE4A6A0577479B2B4
    assert hash_text("猫") == hash_text("猫".encode())
    assert hash_text("\ud800")  # half a pair is no UTF-8, and a sentence all the same
