"""What the pages show is what the code is, and what they say to type works."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = "\n".join(
    path.read_text("utf-8") for path in (ROOT / "transformer_tf").glob("*.py")
)


def blocks_of(page, language):
    text = page.read_text("utf-8").replace("\\\n", " ")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands_of(page, name):
    """Arguments of each call of a command that a page shows."""
    for block in blocks_of(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True) if name in line else []
            for place, word in enumerate(words):
                if word == name and "python" in words[place - 1]:
                    rest = words[place + 1 :]
                    ends = [rest.index(x) for x in ("&&", "<", ">") if x in rest]
                    yield rest[: min(ends, default=len(rest))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_on_a_page_is_the_code(page):
    for block in blocks_of(page, "python"):
        for line in block.splitlines():
            assert line.strip() in SOURCES, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_a_page_have_flags_that_exist(page):
    import export
    import train
    import translate

    parsers = {
        "train.py": train.parse_options,
        "translate.py": translate.parse_options,
        "export.py": export.make_parser().parse_args,
    }
    seen = 0
    for name, parse in parsers.items():
        for arguments in commands_of(page, name):
            parse(arguments)  # SystemExit if something is wrong
            seen += 1
    assert seen


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
