"""A language of 400 sentences that we made up, so that tests can learn it quickly."""

from itertools import product
from pathlib import Path

WHO = {
    "私": "I",
    "あなた": "you",
    "子供たち": "the children",
    "先生たち": "the teachers",
}
WHEN = {
    "今日": "today",
    "毎朝": "every morning",
    "週末に": "on weekends",
    "時々": "sometimes",
}
WHAT = {
    "りんごを": "apples",
    "本を": "books",
    "花を": "flowers",
    "古い地図を": "old maps",
    "白い皿を": "white plates",
}
DO = {
    "買います": "buy",
    "見ます": "look at",
    "描きます": "draw",
    "売ります": "sell",
    "探します": "look for",
}


def pairs() -> list[tuple[str, str]]:
    """Every combination, Japanese and English, in a fixed order."""
    return [
        (
            f"{who}は{when}{what}{do}。",
            f"{WHO[who]} {DO[do]} {WHAT[what]} {WHEN[when]}.",
        )
        for who, when, what, do in product(WHO, WHEN, WHAT, DO)
    ]


def write(folder: Path) -> dict[str, Path]:
    """Line files of all pairs: those whose number ends in 9 are kept for the test."""
    files = {}
    for name, is_test in (("train", False), ("test", True)):
        chosen = [p for i, p in enumerate(pairs()) if (i % 10 == 9) == is_test]
        sides = zip(*chosen, strict=True)
        for side, lines in zip(("source", "target"), sides, strict=True):
            files[f"{name}_{side}"] = folder / f"{name}.{side}"
            files[f"{name}_{side}"].write_text("\n".join(lines) + "\n", "utf-8")
    return files
