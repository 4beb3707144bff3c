"""Any line gives one line: cut, batched, translated, joined."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.tokenizer import Tokenizer, train_vocabulary
from transformer_tf.lines import Answer, _batches, split_sentences, translate_lines
from transformer_tf.model import Transformer
from transformer_tf.translator import Translator, asker


@pytest.mark.parametrize(
    "line, parts",
    [
        ("明日は天気", ["明日は天気"]),
        ("明日は天気。散歩しよう！", ["明日は天気。", "散歩しよう！"]),
        ("え!?本当ですか？ うん", ["え!?", "本当ですか？", "うん"]),
        ("「さあ！」と彼。私も行った。", ["「さあ！」と彼。", "私も行った。"]),
        ("（寒い。）でも行く。いいね。", ["（寒い。）でも行く。", "いいね。"]),
        ("「閉じない。かぎ。", ["「閉じない。", "かぎ。"]),
        ('"Stop! Now!" he cried! Go', ['"Stop! Now!" he cried!', "Go"]),
        ("Yahoo!で見た。http://a.b/?c=1", ["Yahoo!", "で見た。", "http://a.b/?c=1"]),
        ("一行目\n二行目", ["一行目", "二行目"]),
        ("「二行の\n引用」です", ["「二行の\n引用」です"]),
        ("。。。", ["。。。"]),
        ("終わり。  ", ["終わり。  "]),
        ("", [""]),
        (" \t", [" \t"]),
    ],
)  # fmt: skip
def test_a_line_is_cut_where_sentences_end_outside_of_quotes(line, parts):
    assert [part.decode() for part in split_sentences(line.encode())] == parts


def test_what_is_no_text_is_cut_and_kept():
    assert split_sentences(b"\xff\xe3\x80\x82\xfe") == [b"\xff\xe3\x80\x82", b"\xfe"]


@pytest.mark.parametrize("text", ["「", "(", "。", "あ。", "!", '"', "「あ。"])
def test_long_lines_are_cut_in_linear_time(text):
    parts = split_sentences((text * 100_000).encode())
    assert b"".join(parts).decode() == text * 100_000


class Echo:
    """Translates "x" into "x-best" and "x-second"; some texts are too long for it."""

    def __init__(self):
        self.batches = []

    def __call__(self, sentences, nbest=1):
        self.batches.append(sentences)
        kinds = [b"-best", b"-second"][:nbest]
        return Answer(
            [[text + kind for kind in kinds] for text in sentences],
            # It never finds a second one for short texts.
            [[-1.0, -2.0 if len(t) > 3 else -np.inf][:nbest] for t in sentences],
            [len(text) > 20 for text in sentences],
        )


def test_translations_of_a_line_are_joined_as_its_script_asks():
    [english, japanese, plain] = translate_lines(
        Echo(), [b"a!? b! c", "雨。".encode() + b"x", b"plain"]
    )
    assert english.nbest == [(b"a!?-best b!-best c-best", -3.0)]
    assert english.source == b"a!? b! c"
    assert japanese.nbest[0][0].decode() == "雨。-best x-best"
    assert plain.nbest == [(b"plain-best", -1.0)]


def test_the_nth_best_of_a_line_is_made_of_the_nth_best_of_its_sentences():
    [found] = translate_lines(Echo(), [b"long! a"], nbest=2)
    assert found.nbest == [(b"long!-best a-best", -2.0), (b"long!-second a-best", -3.0)]


def test_a_line_is_truncated_if_one_of_its_sentences_is():
    found = translate_lines(Echo(), [b"a! " + b"b" * 30, b"a! b"])
    assert [sentence.truncated for sentence in found] == [True, False]


def test_empty_sentences_leave_no_space():
    class Mute(Echo):
        def __call__(self, sentences, **options):
            answer = super().__call__(sentences, **options)
            texts = [
                [b"" if text == b"b!" else best for best in nbest]
                for text, nbest in zip(sentences, answer.translations, strict=True)
            ]
            return answer._replace(translations=texts)

    [found] = translate_lines(Mute(), [b"b! a! b! c"])
    assert found.nbest[0][0] == b"a!-best c-best"


def test_sentences_of_all_lines_share_batches():
    echo = Echo()
    lines = [b"aa! b! cc!" for _ in range(20)]
    assert len(translate_lines(echo, lines)) == 20
    assert [len(batch) for batch in echo.batches] == [32, 28]
    assert echo.batches[0][:20] == [b"b!"] * 20


def test_batches_are_bounded_by_rows_and_by_bytes():
    sentences = [b"a"] * 70 + [b"b" * 2000] * 9 + [b"c" * 50_000]
    batches = list(_batches(sentences))
    assert sorted(i for batch in batches for i in batch) == list(range(80))
    assert [len(batch) for batch in batches] == [32, 32, 6, 4, 4, 1, 1]


@pytest.fixture(scope="module")
def babbler():
    """A translator that has learnt nothing: it says anything, at any length."""
    keras.utils.set_random_seed(4)
    words = [f"{a}と{b}。 a {c}" for a in "山川海空" for b in "犬猫鳥魚" for c in "xyz"]
    tokenizer = Tokenizer(train_vocabulary(words, 400))
    model = Transformer(
        tokenizer.vocab_size,
        num_layers=1,
        d_model=16,
        num_heads=2,
        d_ff=16,
        max_length=24,
    )
    model((np.ones((1, 2), np.int32),) * 2)
    return Translator(model, tokenizer)


MARKS = '。！？!?「」『』（）()“”"\n あa\u3000\u202e'
ODDITIES = ["👩‍👩‍👧", "🇯🇵", "\0", "\ufeff", "▁", "<unk>", "𠮷", "か\u3099", "ﾊﾟ", "ｱ"]
ANY_TEXT = st.one_of(
    st.text(max_size=80).map(lambda text: text.encode("utf-8", "replace")),
    st.binary(max_size=60),
    st.text(alphabet=MARKS, max_size=40).map(str.encode),
    st.lists(st.sampled_from(ODDITIES)).map("".join).map(str.encode),
)


def check_any_texts(translator, texts):
    found = translate_lines(asker(translator), texts, beam_size=2)
    assert [sentence.source for sentence in found] == texts
    for sentence in found:
        [(translation, score)] = sentence.nbest
        translation.decode("utf-8")
        assert b"\n" not in translation
        assert np.isfinite(score)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(texts=st.lists(ANY_TEXT, min_size=5, max_size=5))
def test_200_random_texts_give_one_translation_each(babbler, texts):
    check_any_texts(babbler, texts)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(texts=st.lists(ANY_TEXT, min_size=1, max_size=4))
def test_many_more_random_texts(babbler, texts):
    check_any_texts(babbler, texts)


def test_a_line_of_ten_thousand_characters(babbler):
    lines = [("山と犬。" * 2500).encode(), ("山" * 10_000).encode()]
    [long, cut] = translate_lines(asker(babbler), lines, beam_size=1)
    assert not long.truncated
    assert cut.truncated


def resident_megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_long_service_needs_no_more_memory(babbler):
    random = np.random.default_rng(1)

    def translate(count):
        for _ in range(count // 4):
            lengths = random.integers(1, 200, 4)
            texts = [
                "".join(random.choice(list("山川海空犬 ab。"), n)) for n in lengths
            ]
            translate_lines(asker(babbler), [t.encode() for t in texts], beam_size=2)

    translate(400)
    before = resident_megabytes()
    translate(2000)
    assert resident_megabytes() < 1.05 * before
    assert babbler.translate.experimental_get_tracing_count() == 1
