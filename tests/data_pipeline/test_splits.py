"""Pairs that share a sentence stay together; the choice is a hash, never chance."""

import random
from collections import Counter

import numpy as np
import pytest

from data_pipeline import splits as module
from data_pipeline.splits import SPLITS, normalize, remembered


def assign_splits(*args):
    return [SPLITS[number] for number in module.assign_splits(*args)]


def made_up_pairs(seed: int, count: int) -> list[tuple[str, str]]:
    """Pairs over few sentences, so that most are linked through others."""
    rng = random.Random(seed)
    return [
        (
            f"{rng.randrange(count)}番の電車です。",
            f"It is train {rng.randrange(count)}.",
        )
        for _ in range(count)
    ]


def components(pairs: list[tuple[str, str]]) -> list[set[int]]:
    """The slow way: flood fill over pairs that share a sentence."""
    keys = [{("ja", normalize(ja)), ("en", normalize(en))} for ja, en in pairs]
    rest, found = set(range(len(pairs))), []
    while rest:
        group, frontier = set(), {rest.pop()}
        while frontier:
            group |= frontier
            known = set.union(*(keys[i] for i in frontier))
            frontier = {i for i in rest if keys[i] & known}
            rest -= frontier
        found.append(group)
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ｙｅｓ！", "yes"),
        ("明日は、雨。", "明日は雨"),
        ("「もう　帰るの？」", "もう帰るの"),
        ("ｶﾞﾗｽ", "ガラス"),
        ("ガ", "カ\u3099"),  # one code point, or a kana and its mark
        ("STRASSE", "straße"),
        ("don't", "dont"),
        ("a\u200bb\u2028c\x0b", "abc"),
    ],
)
def test_normalize_ignores_what_does_not_matter(one, other):
    assert normalize(one) == normalize(other)


@pytest.mark.parametrize(
    ("one", "other"), [("はし", "ばし"), ("5時", "6時"), ("2+2", "22"), ("ー", "")]
)
def test_normalize_keeps_what_does(one, other):
    assert normalize(one) != normalize(other)


def test_linked_pairs_stay_together():
    # a-b, a'-c and d-c are one component: a links the first two, c the last two.
    linked = [
        ("朝だ。", "Morning."),
        ("朝だ", "It's dawn."),
        ("夜明けだ。", "IT'S DAWN"),
    ]
    for other in range(300):  # the same three under ever new company
        links = [(f"{ja}{other}", f"{en}{other}") for ja, en in linked]
        assert len(set(assign_splits(links, 30, 30))) == 1


@pytest.mark.parametrize("seed", range(5))
def test_no_component_crosses_splits(seed):
    pairs = made_up_pairs(seed, 400)
    splits = assign_splits(pairs, 20, 20)
    groups = components(pairs)
    assert 20 < len(groups) < 200
    assert all(len({splits[i] for i in group}) == 1 for group in groups)
    assert set(splits) == set(SPLITS)


def test_a_long_chain_is_one_component():
    chain = [(f"文{(i + 1) // 2}", f"s{i // 2}") for i in range(1000)]
    random.Random(1).shuffle(chain)
    assert len(set(assign_splits(chain, 30, 30))) == 1


def test_shares_are_fair_even_for_large_components():
    # 4,000 components of 8 pairs. The smallest hash of each is a small number; used as
    # the draw, it would send nearly every component to one side.
    pairs = [(f"話{i}", f"talk {i} {j}") for i in range(4000) for j in range(8)]
    shares = Counter(assign_splits(pairs, 10, 20))
    assert shares["test"] / len(pairs) == pytest.approx(0.2, abs=0.02)
    assert shares["validation"] / len(pairs) == pytest.approx(0.1, abs=0.02)


def test_the_choice_is_stable():
    pairs = made_up_pairs(7, 300)
    chosen = dict(zip(pairs, assign_splits(pairs, 20, 20), strict=True))

    shuffled = random.Random(2).sample(pairs, len(pairs))
    assert assign_splits(shuffled, 20, 20) == [chosen[p] for p in shuffled]
    swapped = [(en, ja) for ja, en in pairs]
    assert assign_splits(swapped, 20, 20) == [chosen[p] for p in pairs]
    more = [*pairs, ("まったく別の文。", "A different sentence altogether.")]
    assert assign_splits(more, 20, 20)[:-1] == [chosen[p] for p in pairs]
    # Pinned: another answer would move sentences from test to train between releases.
    numbers = [(f"第{i}章", f"Chapter {i}") for i in range(2000)]
    splits = assign_splits(numbers)
    assert [i for i, s in enumerate(splits) if s == "test"][:3] == [61, 566, 575]
    assert [i for i, s in enumerate(splits) if s == "validation"][:3] == [13, 55, 270]


def test_corpora_of_many_blocks(monkeypatch):
    pairs = made_up_pairs(5, 500)
    plain = assign_splits(pairs, 20, 20)
    monkeypatch.setattr(module, "BLOCK", 7)
    assert assign_splits(pairs, 20, 20) == plain


def test_remembered_is_drawn_once(tmp_path):
    path, drawn = tmp_path / "ids" / "x.splits", []

    def draw():
        drawn.append(1)
        return np.array([0, 1, 0, 2], np.uint8)

    for times in (1, 1):
        assert remembered(path, draw).tolist() == [0, 1, 0, 2]
        assert len(drawn) == times
    assert [each.name for each in path.parent.iterdir()] == ["x.splits"]
    content = path.read_bytes()
    for damaged in (content[:-1], content[:3], b"", b"\x01" + content[1:]):
        path.write_bytes(damaged)
        drawn.clear()
        assert remembered(path, draw).tolist() == [0, 1, 0, 2] and len(drawn) == 1
        assert path.read_bytes() == content


def test_shares_of_zero_and_their_independence():
    pairs = made_up_pairs(3, 400)
    assert set(assign_splits(pairs, 0, 0)) == {"train"}
    assert set(assign_splits(pairs, 0, 30)) == {"train", "test"}
    one, other = assign_splits(pairs, 5, 20), assign_splits(pairs, 30, 20)
    assert [s == "test" for s in one] == [s == "test" for s in other]
    assert assign_splits([]) == []


def test_sentences_without_letters_are_told_apart():
    pairs = [("……", f"A sigh, number {i}.") for i in range(50)]
    pairs += [("！？", f"A shout, number {i}.") for i in range(50)]
    assert normalize("……") == normalize("！？") == ""
    splits = assign_splits(pairs, 50, 0)
    assert len(set(splits[:50])) == len(set(splits[50:])) == 1
    pairs = [("。" * i, "!" * i) for i in range(1, 200)]
    assert set(assign_splits(pairs, 50, 0)) == {"train", "validation"}
