import base64
import gc
import hashlib
import io
import json
import subprocess
import sys
import textwrap

import pytest
import sentencepiece
import tensorflow as tf

from data_pipeline import tokenizer as module
from data_pipeline.errors import DataError
from data_pipeline.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    Tokenizer,
    train_vocabulary,
)

WHO = ["私", "姉", "先生", "となりの猫", "あの鳥", "駅員さん", "パン屋", "ぼくら"]
WHAT = ["パン", "りんご", "青い傘", "古い地図", "ガラスの靴", "お茶", "コーヒー"]
DID = ["を買った。", "を忘れた。", "を探しています。", "が好きだ。", "を見せてくれた？"]
SUBJECTS = ["I", "My sister", "The teacher", "The cat next door", "That bird", "We"]
OBJECTS = ["bread", "an apple", "a blue umbrella", "an old map", "glass shoes", "tea"]
VERBS = ["bought", "forgot", "is looking for", "likes", "showed me"]

SENTENCES = [f"{who}は{what}{did}" for who in WHO for what in WHAT for did in DID] + [
    f"{subject} {verb} {thing}."
    for subject in SUBJECTS
    for verb in VERBS
    for thing in OBJECTS
]

AWKWARD = {
    "plain Japanese": "明日は天気がいい。",
    "plain English": "The weather will be fine tomorrow.",
    "mixed": "Tokyoで30%OFFのcoffeeを買った!!",
    "half-width kana": "ﾊﾟﾝﾔﾉｺｰﾋｰ",
    "half-width voiced": "ｶﾞｷﾞｸﾞ ﾞ ﾟ",
    "full-width latin": "ＡＢＣ１２３！？",
    "NFD voiced marks": "か\u3099は\u309aき\u3099",
    "stray voiced mark": "\u3099あ\u309a",
    "long vowels": "ラーメンーーー〜～",
    "surrogate pair kanji": "𠮷野家の𩸽と𠮟る",
    "rare kanji": "鱻 龘 驫",
    "variation selector": "葛\U000e0100城市 ❤\ufe0f",
    "ZWJ emoji": "👩‍👩‍👧‍👦が来た",
    "skin tone": "👍🏽👋🏿",
    "flags": "🇯🇵🇬🇧🏴\U000e0067\U000e0062\U000e007f",
    "keycap": "1️⃣ #️⃣",
    "Hebrew": "שלום עולם",
    "Arabic, bidi controls": "\u202bمرحبا\u202c \u200fabc\u200e",
    "bidi isolates": "\u2066abc\u2069\u2068def\u2069",
    "Thai": "สวัสดี",
    "combining": "e" + "\u0301" * 200,
    "zalgo": "h̶̢e̷̡l̸̨l̴̢o",
    "C0 controls": "a\x01b\x02\x07c\x1b[31m\x7f",
    "C1 controls": "a\x85b\x9fc",
    "line breaks": "a\nb\r\nc\u2028d\u2029e\x0bf\x0cg",
    "tabs and spaces": "\t a \t\u3000\u00a0 b  ",
    "zero width": "a\u200bb\u200cc\u2060d\ufeffe",
    "BOM": "\ufeff最初",
    "soft hyphen": "co\u00adop",
    "typed control pieces": "<unk></s><s><pad>▁",
    "typed byte piece": "<0x41><0xE3>",
    "typed space marks": "▁▁a▁b",
    "empty": "",
    "blank": "   ",
    "blank, ideographic": "\u3000\u3000",
    "only controls": "\x01\x02\u200b",
    "private use": "\ue000\uf8ff\U0010fffd",
    "noncharacters": "\ufffe\uffff\U0001ffff",
    "replacement character": "a\ufffdb",
    "ligatures": "ﬁ ㍿ ㌔ ℃ ½ Ⅷ",
    "quotes": "「『“‘\"'’”』」",
    "markup": '<b>a</b> &amp; {"k": [1, null]} %s \\n',
    "6,000 characters": "とても長い文です。" * 666 + "終わり。xy",
    "one word of 5,000": "x" * 5000,
    "invalid: lone continuation": b"a\x80b",
    "invalid: cut short": "日本".encode()[:-1],
    "invalid: overlong": b"\xc0\xaf\xe0\x80\xaf",
    "invalid: surrogate": b"\xed\xa0\x80\xed\xb0\x80",
    "invalid: too large": b"\xf5\x80\x80\x80\xff\xfe",
}


@pytest.fixture(scope="module")
def model_bytes():
    return train_vocabulary(SENTENCES, 600)


@pytest.fixture(scope="module")
def tokenizer(model_bytes):
    return Tokenizer(model_bytes)


@pytest.fixture(scope="module")
def oracle(model_bytes):
    return sentencepiece.SentencePieceProcessor(model_proto=model_bytes)


def text_of(tokenizer, ids):
    return [text.decode() for text in tokenizer.detokenize(ids).numpy()]


# By hand -----------------------------------------------------------------------------


def test_ids_spell_the_sentence(tokenizer):
    ids = tokenizer.tokenize(["ガラスの靴を買った。"]).to_list()[0]
    assert "".join(tokenizer.pieces(ids)) == "▁ガラスの靴を買った。"
    assert min(ids) > EOS_ID  # neither start nor end token


def test_special_ids(tokenizer):
    assert [PAD_ID, UNK_ID, BOS_ID, EOS_ID] == [0, 1, 2, 3]
    assert tokenizer.pieces(range(4)) == ["<pad>", "<unk>", "<s>", "</s>"]


def test_unknown_character_becomes_its_bytes(tokenizer):
    ids = tokenizer.tokenize(["鱻"]).to_list()[0]
    assert tokenizer.pieces(ids)[-3:] == ["<0xE9>", "<0xB1>", "<0xBB>"]


# Against python sentencepiece --------------------------------------------------------


def test_there_are_enough_awkward_strings():
    assert len(AWKWARD) >= 40


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_same_ids_and_text_as_python_sentencepiece(tokenizer, oracle, text):
    ids = oracle.encode(text)
    assert tokenizer.tokenize([text]).to_list() == [ids]
    assert text_of(tokenizer, tf.ragged.constant([ids], tf.int32)) == [
        oracle.decode(ids)
    ]


def test_same_ids_in_a_batch(tokenizer, oracle):
    texts = list(AWKWARD.values())
    assert tokenizer.tokenize(texts).to_list() == [oracle.encode(t) for t in texts]


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_same_ids_for_both_model_types(model_type):
    model_bytes = train_vocabulary(SENTENCES, 500, model_type)
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
    texts = list(AWKWARD.values())
    assert Tokenizer(model_bytes).tokenize(texts).to_list() == [
        oracle.encode(t) for t in texts
    ]


# Properties --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "back"),
    [
        ("がぎぐげご ぱぴぷぺぽ", "がぎぐげご ぱぴぷぺぽ"),
        ("か\u3099は\u309a", "がぱ"),
        ("ｶﾞﾊﾟｰ", "ガパー"),
        ("スーパーでコーヒー", "スーパーでコーヒー"),
        ("ＡＢＣ", "ABC"),
        ("𠮷野家 鱻", "𠮷野家 鱻"),
        ("👩‍👩‍👧‍👦", "👩‍👩‍👧‍👦"),
        ("שלום", "שלום"),
        ("<unk></s>", "<unk></s>"),
        ("  a\u3000 b\n", "a b"),
        ("", ""),
        (b"a\xffb", "a\ufffdb"),
        ("明日\0は", "明日は"),
    ],
)
def test_round_trip(tokenizer, typed, back):
    assert text_of(tokenizer, tokenizer.tokenize([typed])) == [back]


def test_nul_is_stripped(tokenizer, oracle):
    assert tokenizer.tokenize(["\0a\0\0b\0"]).to_list() == [oracle.encode("ab")]
    assert tokenizer.tokenize([b"\0a\xff\0b"]).to_list() == [oracle.encode(b"a\xffb")]


def test_typed_control_pieces_are_text(tokenizer):
    ids = tokenizer.tokenize(["<s></s><pad><unk>"]).to_list()[0]
    assert not set(ids) & {PAD_ID, UNK_ID, BOS_ID, EOS_ID}


def test_detokenize_leaves_out_what_is_no_text(tokenizer):
    bread, tea = tokenizer.tokenize(["bread", "tea"]).to_list()
    size = tokenizer.vocab_size
    width = len(bread) + len(tea) + 5
    rows = [
        [BOS_ID, *bread, EOS_ID, PAD_ID, size, 2**31 - 1, *tea],
        [-1, -(2**31), *bread],
        [PAD_ID] * width,
    ]
    dense = tf.constant([row + [PAD_ID] * (width - len(row)) for row in rows])
    assert text_of(tokenizer, dense) == ["bread tea", "bread", ""]
    assert text_of(tokenizer, tf.ragged.constant(rows)) == ["bread tea", "bread", ""]


def test_half_a_character_is_a_replacement_character(tokenizer):
    ids = tokenizer.tokenize(["鱻"]).to_list()[0][:-1]
    assert "\ufffd" in text_of(tokenizer, tf.constant([ids]))[0]


def test_no_rows(tokenizer):
    ids = tokenizer.tokenize(tf.constant([], tf.string))
    assert ids.to_list() == [] and ids.dtype == tf.int32
    assert tokenizer.detokenize(tf.zeros([0, 3], tf.int32)).shape == [0]
    assert tokenizer.detokenize(tf.zeros([2, 0], tf.int32)).shape == [2]


def test_seeding_afterwards_does_no_harm(model_bytes):
    # TensorFlow then drops what eager kernels own; a bare SentencepieceTokenizer dies.
    tokenizer, other = Tokenizer(model_bytes), Tokenizer(model_bytes)
    both_ways = tf.function(lambda text: tokenizer.detokenize(tokenizer.tokenize(text)))
    for seed in (1, 2):
        assert text_of(tokenizer, tokenizer.tokenize(["tea"])) == ["tea"]
        assert both_ways(tf.constant(["tea"])).numpy() == [b"tea"]
        tf.random.set_seed(seed)
    del other
    gc.collect()
    assert text_of(tokenizer, tokenizer.tokenize(["tea"])) == ["tea"]


def test_in_a_graph_without_retracing(tokenizer):
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def there_and_back(text):
        traces.append(1)
        return tokenizer.detokenize(tokenizer.tokenize(text).to_tensor())

    assert there_and_back(tf.constant(["bread"])).numpy().tolist() == [b"bread"]
    assert there_and_back(tf.constant(["a", "", "tea"])).numpy()[2] == b"tea"
    assert len(traces) == 1


# Training ----------------------------------------------------------------------------


def test_training_again_gives_the_same_bytes(model_bytes):
    assert train_vocabulary(iter(SENTENCES), 600) == model_bytes


def test_a_sample_is_fair_and_always_the_same():
    sample = module._sample((str(i) for i in range(5000)), 100)
    assert len(set(sample)) == 100
    assert hashlib.sha256(b" ".join(sample)).hexdigest().startswith("ea8dff17e13f1cc8")
    # Each with the same chance: the mean of 100 of 0..4999 is 2500 +- 144.
    assert 2000 < sum(map(int, sample)) / 100 < 3000


def test_a_sample_larger_than_the_corpus_is_the_corpus():
    assert module._sample(["b", "", " a ", "\n"], 10) == [b"b", b"a"]


def test_training_survives_odd_sentences():
    odd = ["a\0b", "c\nd\r\n", "", "  ", "\0", "x" * 5000, "\ud800", "▅"]
    tokenizer = Tokenizer(train_vocabulary(odd + SENTENCES, 600))
    spelled = tokenizer.pieces(range(tokenizer.vocab_size))
    assert not any("\0" in piece or "\n" in piece for piece in spelled)


def test_a_small_corpus_yields_a_smaller_vocabulary():
    assert Tokenizer(train_vocabulary(["うみ", "やま"] * 5, 8000)).vocab_size < 300


def test_too_small_vocabulary_names_the_size_it_needs():
    with pytest.raises(DataError, match=r"--vocab_size \d+") as error:
        train_vocabulary(SENTENCES, 100)
    needed = int(str(error.value).split("--vocab_size ")[1].split()[0])
    assert Tokenizer(train_vocabulary(SENTENCES, needed)).vocab_size == needed


@pytest.mark.parametrize("sentences", [[], [""], [" \n", "\0"], ["x" * 5000]])
def test_nothing_to_train_on(sentences):
    with pytest.raises(DataError, match="no sentence") as error:
        train_vocabulary(sentences, 600)
    assert "\n" not in str(error.value) and error.value.exit_code == 3


def test_errors_of_the_corpus_pass_through():
    def broken():
        yield "うみ"
        raise DataError("line 2 of it")

    with pytest.raises(DataError, match="^line 2 of it$"):
        train_vocabulary(broken(), 600)


@pytest.mark.parametrize("size", [0, -1, 256_001])
def test_impossible_sizes(size):
    with pytest.raises(ValueError, match="vocab_size"):
        train_vocabulary(SENTENCES, size)


def test_unknown_model_type():
    with pytest.raises(ValueError, match="model_type"):
        train_vocabulary(SENTENCES, 600, "word")


# Files -------------------------------------------------------------------------------


def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "vocab.model"
    path.write_bytes(b"an older one")
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.model_bytes == tokenizer.model_bytes
    assert loaded.fingerprint == tokenizer.fingerprint
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.model"]


def test_fingerprint_tells_vocabularies_apart(tokenizer):
    other = Tokenizer(train_vocabulary(SENTENCES[::2], 600))
    assert other.fingerprint != tokenizer.fingerprint


def with_other_ids():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=200,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda model: b"", "is empty"),
        (lambda model: b"no model at all" * 99, "damaged"),
        (lambda model: model[:1000], "damaged"),
        (lambda model: model[: len(model) // 2], "damaged"),
        (lambda model: model[:-1], "damaged"),
        (lambda model: with_other_ids(), "pad, unk, bos, eos ids"),
        (lambda model: model + bytes(module.MAX_MODEL_BYTES), "bytes"),
    ],
    ids=["empty", "garbage", "1000 bytes", "half", "all but one", "ids", "16 MB"],
)
def test_a_bad_file_is_refused_in_one_line(model_bytes, tmp_path, damage, problem):
    path = tmp_path / "vocab.model"
    path.write_bytes(damage(model_bytes))
    with pytest.raises(DataError, match=problem) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 3


def test_too_many_pieces_are_refused(model_bytes, monkeypatch):
    monkeypatch.setattr(module, "MAX_PIECES", 300)
    with pytest.raises(DataError, match="pieces"):
        Tokenizer(model_bytes)


def test_no_file(tmp_path):
    with pytest.raises(DataError, match="cannot read the vocabulary"):
        Tokenizer.load(tmp_path / "vocab.model")
    with pytest.raises(DataError, match="cannot read the vocabulary"):
        Tokenizer.load(tmp_path)


# Real use: a server that has never seen this package ---------------------------------


def test_an_exported_module_gives_the_same_ids_elsewhere(tokenizer, tmp_path):
    holder = tf.Module()
    holder.tokenizer = tokenizer

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def serve(text):
        ids = tokenizer.tokenize(text).to_tensor()
        return {"ids": ids, "text": tokenizer.detokenize(ids)}

    tf.saved_model.save(holder, str(tmp_path), signatures={"serving_default": serve})
    code = textwrap.dedent(
        """
        import sys, json, base64
        import tensorflow as tf, tensorflow_text
        texts = [base64.b64decode(t) for t in json.load(sys.stdin)]
        with tf.compat.v1.Session(graph=tf.Graph()) as session:
            loaded = tf.compat.v1.saved_model.load(session, ["serve"], sys.argv[1])
            signature = loaded.signature_def["serving_default"]
            ids, text = session.run(
                [signature.outputs["ids"].name, signature.outputs["text"].name],
                {signature.inputs["text"].name: texts},
            )
        print(json.dumps([ids.tolist(), [t.decode() for t in text]]))
        assert "data_pipeline" not in sys.modules
        """
    )
    texts = [t if isinstance(t, bytes) else t.encode() for t in AWKWARD.values()]
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        input=json.dumps([base64.b64encode(t).decode() for t in texts]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert process.returncode == 0, process.stderr
    ids, back = json.loads(process.stdout)
    here = tokenizer.tokenize(texts)
    assert ids == here.to_tensor().numpy().tolist()
    assert back == text_of(tokenizer, here)
