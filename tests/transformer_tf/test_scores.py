import pytest

from transformer_tf.scores import score

SENTENCES = ["The weather is nice tomorrow.", "I will buy two red apples."]


def test_equal_sentences_score_100_and_name_how():
    scores = score(SENTENCES, SENTENCES)
    assert scores.bleu == pytest.approx(100)
    assert scores.chrf == pytest.approx(100)
    assert "tok:13a" in scores.bleu_signature
    assert "case:mixed" in scores.bleu_signature
    assert "version:" in scores.chrf_signature
    assert "BLEU 100.0 (nrefs:1|" in str(scores)


def test_two_of_three_ngrams():
    # 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples; equal length:
    # (4/5 * 3/4 * 2/3 * 1/2) ** (1/4)
    scores = score(["a b c d x"], ["a b c d e"])
    assert scores.bleu == pytest.approx(100 * 0.2**0.25, abs=0.01)


def test_japanese_is_not_cut_at_spaces():
    scores = score(["明日は天気"], ["明日は天気だ"], target_lang="ja")
    assert "tok:char" in scores.bleu_signature or "ja-mecab" in scores.bleu_signature
    assert 30 < scores.bleu < 100
