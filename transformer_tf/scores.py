"""How good are the translations? BLEU and chrF, each with its signature.

A score without a signature cannot be compared with anything: sacreBLEU computes both.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Scores(NamedTuple):
    """Corpus scores from 0 to 100, and how they were computed."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str

    def __str__(self) -> str:
        return (
            f"BLEU {self.bleu:.1f} ({self.bleu_signature}) "
            f"chrF2 {self.chrf:.1f} ({self.chrf_signature})"
        )


def score(
    translations: Sequence[str], references: Sequence[str], target_lang: str = "en"
) -> Scores:
    """Scores translations against one reference each, detokenized, case as it is.

    English is cut into words as WMT does (13a). Japanese has no spaces: MeCab cuts it
    if the extra `ja` is installed, else every character is a word. Likewise Korean.
    """
    from sacrebleu.metrics import BLEU, CHRF  # half a second that few calls need

    # force: no warning at each validation that a corpus looks tokenized.
    try:
        bleu = BLEU(trg_lang=target_lang, force=True)
    except RuntimeError:  # a language whose words need a tokenizer that is not there
        bleu = BLEU(tokenize="char", force=True)
    chrf = CHRF()
    return Scores(
        bleu.corpus_score(translations, [references]).score,
        chrf.corpus_score(translations, [references]).score,
        str(bleu.get_signature()),
        str(chrf.get_signature()),
    )
