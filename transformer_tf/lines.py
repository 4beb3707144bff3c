"""How many lines go through a translator: cut into sentences, batched, joined again.

The model has learnt from single sentences. So a line of several is cut where sentences
end, each is translated, and the translations are joined.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, NamedTuple

# A batch holds sentences of similar length: BATCH_ROWS short ones, or as many long ones
# as BATCH_BYTES allows.
BATCH_ROWS = 32
BATCH_BYTES = 8192

# What stands in quotes or brackets is passed over, if they are closed within a few
# hundred characters. A sentence ends after 。！？, and after ! and ? where a space, the
# end or another script follows, since these stand in names and addresses too.
_QUOTED = "|".join(
    f"{opening}[^{closing}]{{0,500}}{closing}"
    for opening, closing in ("「」", "『』", "（）", "“”", (r"\(", r"\)"), '""')
)
_END = r"[。！？]+[。！？!?]*|[!?]+(?=\s|$|[^\x00-\x7f!?])[。！？!?]*|\n"
_MARK = re.compile(f"(?:{_QUOTED})|(?P<end>{_END})")

# Between two sentences there is a space, but for scripts that use none.
_SPACELESS = re.compile("[\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef]")


class Answer(NamedTuple):
    """What a model says to a batch of B sentences."""

    translations: list[list[bytes]]  # (B, F), best first
    scores: list[list[float]]  # (B, F); minus infinity where the search found none
    truncated: list[bool]  # (B,)


class Sentence(NamedTuple):
    """One line of input and what became of it."""

    source: bytes
    nbest: list[tuple[bytes, float]]  # translation and score, best first
    truncated: bool  # the model could not read all of it


def translate_lines(
    ask: Callable[..., Answer], lines: Sequence[bytes], **options: Any
) -> list[Sentence]:
    """Translates lines (UTF-8) in batches of similar length.

    Args:
        ask: (sentences, **options) -> Answer: an export, or a server.
        lines: as many as may be held in memory.
        **options: for `ask`.

    Returns:
        One `Sentence` for each line, in their order.
    """
    cut = [split_sentences(line) for line in lines]
    sentences = list(itertools.chain.from_iterable(cut))
    found = iter(_translate(sentences, ask, options))
    return [
        _joined(line, list(itertools.islice(found, len(parts))))
        for line, parts in zip(lines, cut, strict=True)
    ]


def split_sentences(line: bytes) -> list[bytes]:
    """Cuts a line after 。！？!? and line feeds that stand outside of quotes.

    Returns:
        At least one part; the line itself if there is nothing to cut.
    """
    text = line.decode("utf-8", "surrogateescape")
    ends = [m.end() for m in _MARK.finditer(text) if m["end"]]
    cuts = [0, *ends, len(text)]
    parts = [text[i:j].strip() for i, j in itertools.pairwise(cuts)]
    parts = [part for part in parts if part]
    if len(parts) < 2:
        return [line]
    return [part.encode("utf-8", "surrogateescape") for part in parts]


def _joined(line: bytes, parts: list[Sentence]) -> Sentence:
    """One line of its sentences: the n-th best is made of the n-th best of each (of its
    last, where it has fewer), and the score is the sum of theirs."""
    if len(parts) == 1:
        return parts[0]._replace(source=line)
    nbest = []
    for n in range(max(len(part.nbest) for part in parts)):
        texts, scores = zip(*(part.nbest[: n + 1][-1] for part in parts), strict=True)
        joined = functools.reduce(_append, filter(None, texts), b"")
        nbest.append((joined, sum(scores)))
    return Sentence(line, nbest, any(part.truncated for part in parts))


def _append(text: bytes, more: bytes) -> bytes:
    end = text.decode("utf-8", "replace")[-1:]
    return text + (b"" if not end or _SPACELESS.match(end) else b" ") + more


def _translate(
    sentences: Sequence[bytes], ask: Callable[..., Answer], options: dict[str, Any]
) -> list[Sentence]:
    found: dict[int, Sentence] = {}
    for batch in _batches(sentences):
        answer = ask([sentences[i] for i in batch], **options)
        for i, texts, scores, truncated in zip(batch, *answer, strict=True):
            pairs = enumerate(zip(texts, scores, strict=True))
            # The search may find fewer; those places have minus infinity.
            nbest = [pair for n, pair in pairs if n == 0 or isfinite(pair[1])]
            found[i] = Sentence(sentences[i], nbest, truncated)
    return [found[i] for i in range(len(sentences))]


def _batches(sentences: Sequence[bytes]) -> Iterator[list[int]]:
    """Their numbers, by length, so that little of a batch is padding."""
    batch: list[int] = []
    for i in sorted(range(len(sentences)), key=lambda i: len(sentences[i])):
        full = (len(batch) + 1) * len(sentences[i]) > BATCH_BYTES
        if batch and (full or len(batch) == BATCH_ROWS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
