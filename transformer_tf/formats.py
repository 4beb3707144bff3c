"""In which form translations are printed."""

import json
from argparse import Namespace
from typing import Any

from transformer_tf.lines import Sentence

FORMATS = """\
output formats:
  (none)       TRANSLATION
  --scores     SCORE <tab> TRANSLATION
  --nbest N    NUMBER ||| TRANSLATION ||| SCORE, best first, up to N lines for each line
               in, which are numbered from 0 (the format of Moses)
  --json       {"source": ..., "translation": ..., "score": ..., "truncated": ...}, and
               with --nbest also "nbest": [{"translation": ..., "score": ...}, ...]
A score is log p / ((5 + length) / 6)^length_penalty; nearer to 0 is surer.

What is not given is as the model was exported: beam size 4, length penalty 0.6 and 50
extra tokens unless train.py was told otherwise.
"""


def render(sentence: Sentence, number: int, options: Namespace) -> bytes:
    """What is printed for one line of input, line feeds included."""
    translation, score = sentence.nbest[0]
    if options.json:
        record = as_json(sentence, options)
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    if options.nbest:
        return b"".join(
            b"%d ||| %s ||| %.4f\n" % (number, translation, score)
            for translation, score in sentence.nbest
        )
    if options.scores:
        return b"%.4f\t%s\n" % (score, translation)
    return translation + b"\n"


def as_json(sentence: Sentence, options: Namespace) -> dict[str, Any]:
    nbest = [
        {"translation": translation.decode(errors="replace"), "score": round(score, 4)}
        for translation, score in sentence.nbest
    ]
    record = {
        "source": sentence.source.decode(errors="replace"),
        **nbest[0],
        "truncated": sentence.truncated,
    }
    return {**record, "nbest": nbest} if options.nbest else record
