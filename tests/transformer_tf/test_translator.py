"""Text in, text out, on a model that has learned a phrase book by heart."""

import json
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from data_pipeline.tokenizer import Tokenizer, train_vocabulary
from transformer_tf.config import BOS_ID, EOS_ID, PAD_ID, PRESETS, ConfigError
from transformer_tf.graphs import read_source, search
from transformer_tf.model import DecoderCache, Transformer, build_transformer
from transformer_tf.translator import (
    ExportError,
    Translator,
    best_translations,
    load,
)

PHRASES = {
    "はい": "Yes.",
    "ありがとう": "Thanks.",
    "明日は晴れ": "It will be sunny tomorrow.",
    "水をください": "Some water, please.",
    "駅はどこですか": "Where is the station?",
    "猫が庭で眠っている": "The cat is asleep in the garden.",
    "彼女は毎朝駅まで歩く": "She walks to the station every morning.",
    "この本はとても面白いと思う": "I think this book is very interesting.",
}
# What it has not learned, it guesses at: long, short, doubtful.
UNSEEN = ["猫は駅", "本をください", "station", "明日は毎朝はい", "？", "𠮷野家でcatを"]
AWKWARD = [
    b"\xff\xfe\xfd",
    "が👩‍👩‍👧 🇯🇵".encode(),
    "שלום \u202eabc".encode(),
    b"a\0b\nc\x01",
    "<unk></s>▁".encode(),
]


@pytest.fixture(scope="module")
def phrase_book():
    """(model, tokenizer, translator): the phrases learned in three seconds."""
    keras.utils.set_random_seed(1)
    sentences = [text for pair in PHRASES.items() for text in pair]
    tokenizer = Tokenizer(train_vocabulary(sentences * 9, 400))
    model = Transformer(
        tokenizer.vocab_size,
        num_layers=1,
        d_model=48,
        num_heads=4,
        d_ff=96,
        dropout_rate=0.0,
        max_length=40,
    )
    source, _ = read_source(list(PHRASES), tokenizer, 40)
    target, _ = read_source(list(PHRASES.values()), tokenizer, 40)
    shifted = tf.concat([tf.fill([len(PHRASES), 1], BOS_ID), target[:, :-1]], axis=1)
    optimizer = keras.optimizers.Adam(3e-3)
    model((source, shifted))
    optimizer.build(model.trainable_variables)

    @tf.function
    def learn():
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=target, logits=model((source, shifted))
            )
            loss = tf.reduce_mean(tf.boolean_mask(losses, target != PAD_ID))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(80):
        learn()
    return model, tokenizer, Translator(model, tokenizer)


def for_all(options):
    """Each option with one value for all sentences."""
    return {name: [value] for name, value in options.items()}


def best(translator, texts, **options):
    """The best translation of each text, as str."""
    found = translator.translate(tf.constant(texts, tf.string), **for_all(options))
    return [text.decode() for text in found["translation"].numpy()[:, 0]]


# --- Translating ------------------------------------------------------------------


@pytest.mark.parametrize("beam_size", [1, 4])
def test_it_says_what_it_has_learned(phrase_book, beam_size):
    _, _, translator = phrase_book
    translations = best(translator, list(PHRASES), beam_size=beam_size)
    assert translations == list(PHRASES.values())


def test_lines_of_text_become_lines_of_text(phrase_book):
    _, _, translator = phrase_book
    lines = [*PHRASES, ""]
    assert best_translations(translator, lines) == [*PHRASES.values(), ""]


def test_blank_in_blank_out(phrase_book):
    _, _, translator = phrase_book
    texts = ["", "はい", " ", "\u3000", "\t", "\0"]
    assert best(translator, texts) == ["", "Yes.", "", "", "", ""]
    assert best(translator, [""]) == [""]
    assert best(translator, []) == []


@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_batch_equals_its_sentences_one_by_one(phrase_book, beam_size):
    _, _, translator = phrase_book
    options = dict(beam_size=beam_size, nbest=beam_size)
    texts = [*PHRASES, *UNSEEN, ""]
    together = translator.translate(tf.constant(texts), **for_all(options))
    for row, text in enumerate(texts):
        alone = translator.translate(tf.constant([text]), **for_all(options))
        for name in ("translation", "truncated"):
            np.testing.assert_array_equal(together[name][row], alone[name][0])
        np.testing.assert_allclose(
            together["score"][row], alone["score"][0], rtol=1e-4, atol=1e-4
        )


def test_cached_decoding_equals_the_argmax_of_the_whole_model(phrase_book):
    model, tokenizer, translator = phrase_book
    last = tf.function(lambda *ids: model(ids)[0, -1], reduce_retracing=True)
    for text in [*PHRASES, *UNSEEN]:
        source, _ = read_source(tf.constant([text]), tokenizer, 40)
        longest = min(source.shape[1] + 50, 40)
        ids = [BOS_ID]
        while ids[-1] != EOS_ID:
            logits = last(source, tf.constant([ids])).numpy()
            logits[: BOS_ID + 1] = -np.inf
            logits[tokenizer.vocab_size :] = -np.inf
            ids.append(EOS_ID if len(ids) == longest else int(np.argmax(logits)))
        expected = tokenizer.detokenize(tf.constant([ids]))[0].numpy().decode()
        assert best(translator, [text], beam_size=1) == [expected]


def test_scores_are_those_of_teacher_forcing(phrase_book):
    model, tokenizer, _ = phrase_book
    source, _ = read_source(tf.constant([*PHRASES, *UNSEEN]), tokenizer, 40)
    found = search(
        source,
        model,
        tokenizer.vocab_size,
        beam_size=4,
        extra_length=50,
        length_penalty=0.6,
        nbest=3,
    )
    for place in range(3):
        target = found.ids[:, place]
        begin = tf.fill([len(target), 1], BOS_ID)
        logits = model((source, tf.concat([begin, target[:, :-1]], axis=1)))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
        logp = -tf.reduce_sum(tf.where(target != PAD_ID, losses, 0.0), axis=1)
        lengths = found.lengths[:, place].numpy()
        assert (target.numpy()[np.arange(len(target)), lengths - 1] == EOS_ID).all()
        np.testing.assert_allclose(
            found.scores[:, place], logp / ((5 + lengths) / 6) ** 0.6, atol=1e-4
        )


def test_a_translation_is_at_most_extra_length_longer_than_its_source(phrase_book):
    _, tokenizer, translator = phrase_book
    for text in PHRASES:
        (translation,) = best(translator, [text], extra_length=0)
        lengths = tokenizer.tokenize([text, translation]).row_lengths()
        assert lengths[1] <= lengths[0]


def test_long_text_is_cut_and_reported(phrase_book):
    _, _, translator = phrase_book
    found = translator.translate(tf.constant(["はい", "猫が庭で" * 2500]))
    assert found["truncated"].numpy().tolist() == [False, True]
    assert found["translation"][0, 0].numpy() == b"Yes."


def test_options_out_of_bounds_are_brought_to_the_bound(phrase_book):
    _, _, translator = phrase_book

    def scores(**options):
        return translator.translate(tf.constant(UNSEEN), **for_all(options))[
            "score"
        ].numpy()

    for asked, given in [
        (dict(beam_size=1000, nbest=1000), dict(beam_size=8, nbest=8)),
        (dict(beam_size=-5, nbest=-5), dict(beam_size=1, nbest=1)),
        (dict(length_penalty=float("inf")), dict(length_penalty=10.0)),
        (dict(length_penalty=float("nan")), dict(length_penalty=0.0)),
        (dict(extra_length=-1), dict(extra_length=0)),
        (dict(extra_length=2**31 - 1), dict(extra_length=40)),
    ]:
        np.testing.assert_array_equal(scores(**asked), scores(**given))


def test_each_sentence_may_have_options_of_its_own(phrase_book):
    _, _, translator = phrase_book
    options = {
        "beam_size": [4, 1, 2, 8, 3, 1],
        "length_penalty": [0.6, 0.0, 2.0, -1.0, 0.6, float("nan")],
        "extra_length": [50, 2, 0, 9, 1, 50],
        "nbest": [1, 1, 2, 5, 3, 9],
    }
    assert len(UNSEEN) == 6
    together = translator.translate(tf.constant(UNSEEN), **options)
    for row, text in enumerate(UNSEEN):
        mine = {name: [values[row]] for name, values in options.items()}
        alone = translator.translate(tf.constant([text]), **mine)
        kept = alone["score"].shape[1]
        np.testing.assert_allclose(
            together["score"][row, :kept], alone["score"][0], atol=1e-5
        )
        assert np.isneginf(together["score"][row, kept:]).all()
        translations = together["translation"].numpy()[row].tolist()
        assert translations[:kept] == alone["translation"].numpy()[0].tolist()
        assert set(translations[kept:]) <= {b""}


def test_a_thousand_rows_and_one_that_asks_for_too_much(phrase_book):
    _, _, translator = phrase_book
    texts = ["はい", "駅はどこですか"] * 500
    texts[7] = "猫が庭で" * 2500
    sizes = [1] * 1000
    sizes[8] = 10**9
    found = translator.translate(tf.constant(texts), beam_size=sizes)
    assert found["truncated"].numpy().tolist() == [row == 7 for row in range(1000)]
    expected = best(translator, texts[:2], beam_size=1)
    translations = [t.decode() for t in found["translation"].numpy()[:, 0]]
    assert [t for row, t in enumerate(translations) if row not in (7, 8)] == [
        expected[row % 2] for row in range(1000) if row not in (7, 8)
    ]


def test_attention_shows_what_each_chosen_token_saw(phrase_book):
    model, tokenizer, translator = phrase_book
    texts = ["駅はどこですか", "はい"]
    found = {k: v.numpy() for k, v in translator.attention(tf.constant(texts)).items()}
    layers, heads = 1, model.decoder.dec_layers[0].mha.num_heads
    sizes = (len(texts), layers, heads)
    shares, source, target = (
        found[name] for name in ("attention", "source_tokens", "target_tokens")
    )
    assert shares.shape == (*sizes, target.shape[1], source.shape[1])
    for row, text in enumerate(texts):
        tokens = [token.decode() for token in target[row] if token]
        assert tokens[-1] == "</s>"
        spelled = "".join(tokens[:-1]).replace("▁", " ").strip()
        assert [spelled] == best(translator, [text])
        sums = shares[row].sum(axis=-1)
        np.testing.assert_allclose(sums[..., : len(tokens)], 1, atol=1e-5)
        assert (sums[..., len(tokens) :] == 0).all()
        assert (shares[row][..., source[row] == b""] == 0).all()


def test_options_for_other_sentences_are_an_error(phrase_book):
    _, _, translator = phrase_book
    with pytest.raises(tf.errors.InvalidArgumentError):
        translator.translate(tf.constant(["はい"] * 3), beam_size=[1, 2])


def test_any_bytes_give_one_line_each_from_one_trace(phrase_book):
    _, _, translator = phrase_book
    found = translator.translate(tf.constant(AWKWARD))
    for translation in found["translation"].numpy()[:, 0]:
        assert b"\n" not in translation
        translation.decode()
    assert translator.translate.experimental_get_tracing_count() == 1


def test_line_ends_that_a_model_spells_in_bytes_become_spaces(phrase_book):
    _, tokenizer, _ = phrase_book
    [newline] = [i for i in range(300) if tokenizer.pieces([i]) == ["<0x0A>"]]
    letter = int(tokenizer.tokenize(["T"])[0][-1])
    line = tf.constant([letter, newline, newline, letter, EOS_ID])

    def decode(tokens, memory, source_mask, cache):
        position = tf.shape(cache.target)[1]
        logits = 9 * tf.one_hot(line[position], tokenizer.vocab_size)
        fed = tf.concat([cache.target, tokens], axis=1)
        rows = tf.shape(tokens)[0]
        return tf.tile(logits[None, None], [rows, 1, 1]), cache._replace(target=fed)

    parrot = SimpleNamespace(
        weights=[],
        vocab_size=tokenizer.vocab_size,
        max_length=40,
        embedding=SimpleNamespace(input_dim=tokenizer.vocab_size),
        encode=lambda source: (source, source),
        init_cache=lambda memory, rows: DecoderCache(
            memory, tf.zeros([rows, 0], tf.int32), output_kernel=None
        ),
        decode=decode,
    )
    assert best(Translator(parrot, tokenizer), ["はい"], beam_size=1) == ["T T"]


def test_a_vocabulary_larger_than_the_model_is_refused(phrase_book):
    _, tokenizer, _ = phrase_book
    small = SimpleNamespace(vocab_size=300, weights=[])
    with pytest.raises(ConfigError, match="vocab_size is 300, expected at least the"):
        Translator(small, tokenizer)


# --- The SavedModel ---------------------------------------------------------------


@pytest.fixture(scope="module")
def export(phrase_book, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "export" / "1"
    phrase_book[2].save(path)
    return path


def saved_graph(export):
    saved_model = saved_model_pb2.SavedModel()
    saved_model.ParseFromString((export / "saved_model.pb").read_bytes())
    [graph] = saved_model.meta_graphs
    return graph


def test_the_loaded_export_says_the_same(phrase_book, export):
    _, _, translator = phrase_book
    loaded = load(export)
    texts = tf.constant([*PHRASES, *UNSEEN, ""])
    for options in ({}, dict(beam_size=1), dict(nbest=3), dict(length_penalty=2.0)):
        ours, theirs = (
            t.translate(texts, **for_all(options)) for t in (translator, loaded)
        )
        np.testing.assert_array_equal(ours["translation"], theirs["translation"])
        np.testing.assert_allclose(ours["score"], theirs["score"], atol=1e-6)


def test_signatures(export):
    signatures = saved_graph(export).signature_def
    one = {"translation": "?", "score": "?"}
    many = {"translation": "??", "score": "??", "truncated": "?"}
    for name, inputs, outputs in [
        ("serving_default", {"text"}, one),
        ("greedy", {"text"}, one),
        (
            "nbest",
            {"text", "beam_size", "length_penalty", "extra_length", "nbest"},
            many,
        ),
    ]:
        signature = signatures[name]
        assert set(signature.inputs) == inputs
        assert {
            key: "?" * len(info.tensor_shape.dim)
            for key, info in signature.outputs.items()
        } == outputs
    defaults = signatures["nbest"].defaults
    assert defaults["beam_size"].int_val[0] == 4
    assert defaults["length_penalty"].float_val[0] == pytest.approx(0.6)


# What a server has: TensorFlow and the ops of TensorFlow Text, a session, no Python
# objects. `tf.saved_model.load` would not notice variables that a server cannot find.
SERVER = """
import json, sys
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework import op_def_registry

path, texts = sys.argv[1], json.loads(sys.argv[2])
model = saved_model_pb2.SavedModel.FromString(
    open(path + "/saved_model.pb", "rb").read()
)
graph = model.meta_graphs[0].graph_def
nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
answer = {"foreign ops": sorted(
    {node.op for node in nodes if op_def_registry.get(node.op) is None}
    - {function.signature.name for function in graph.library.function}
)}
import tensorflow_text

with tf.compat.v1.Session(graph=tf.Graph()) as session:
    meta = tf.compat.v1.saved_model.load(session, ["serve"], path)
    for name in ("serving_default", "greedy"):
        signature = meta.signature_def[name]
        translation, score = session.run(
            [signature.outputs[key].name for key in ("translation", "score")],
            {signature.inputs["text"].name: texts},
        )
        answer[name] = [[t.decode() for t in translation], score.tolist()]
answer["ours"] = [name for name in sys.modules if name.startswith("transformer_tf")]
print(json.dumps(answer))
"""


def test_a_server_that_has_only_tensorflow_and_its_text_ops(
    phrase_book, export, tmp_path
):
    _, _, translator = phrase_book
    texts = [*PHRASES, *UNSEEN, ""]
    process = subprocess.run(
        [sys.executable, "-I", "-c", SERVER, str(export), json.dumps(texts)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    answer = json.loads(process.stdout)
    assert answer["ours"] == []
    assert answer["foreign ops"] == [
        "SentencepieceDetokenizeOp",
        "SentencepieceOp",
        "SentencepieceTokenizeOp",
    ]
    for name, beam_size in [("serving_default", 4), ("greedy", 1)]:
        expected = translator.translate(tf.constant(texts), beam_size=[beam_size])
        translation, score = answer[name]
        assert translation == best(translator, texts, beam_size=beam_size)
        np.testing.assert_allclose(score, expected["score"][:, 0], atol=1e-4)


def test_weights_are_saved_once(phrase_book, export):
    model, tokenizer, _ = phrase_book
    weights = sum(file.stat().st_size for file in export.glob("variables/*.data*"))
    assert 4 * model.count_params() <= weights
    assert weights <= 1.05 * 4 * model.count_params() + len(tokenizer.model_bytes)


def test_half_the_bits_are_half_the_size_and_say_the_same(phrase_book, tmp_path):
    model, tokenizer, translator = phrase_book
    small = Translator(model, tokenizer, dtype="float16")
    assert {weight.dtype for weight in small.weights} == {tf.float16}
    small.save(tmp_path / "1")
    size = sum(file.stat().st_size for file in tmp_path.glob("1/variables/*.data*"))
    assert size <= 1.05 * 2 * model.count_params() + len(tokenizer.model_bytes)
    texts = [*PHRASES, *UNSEEN]
    expected = small.translate(tf.constant(texts))
    loaded = load(tmp_path / "1")
    found = loaded.translate(tf.constant(texts))
    np.testing.assert_array_equal(found["translation"], expected["translation"])
    np.testing.assert_allclose(found["score"], expected["score"], atol=1e-6)
    assert best(small, list(PHRASES)) == list(PHRASES.values())
    # It computes in float32 with what float16 keeps of each weight: 11 bits.
    full = translator.translate(tf.constant(texts))["score"]
    np.testing.assert_allclose(expected["score"], full, rtol=0.02)
    assert np.abs(expected["score"] - full).max() > 1e-5


def test_nothing_is_compiled_by_xla_and_one_loop_serves_all_signatures(export):
    library = saved_graph(export).graph_def.library
    nodes = [node for function in library.function for node in function.node_def]
    assert not any(function.attr["_XlaMustCompile"].b for function in library.function)
    assert not any(node.attr["_XlaMustCompile"].b for node in nodes)
    loops = [node for node in nodes if node.op in ("While", "StatelessWhile")]
    assert len(loops) == 1


def test_save_replaces_an_export_and_leaves_nothing_else(phrase_book, tmp_path):
    _, _, translator = phrase_book
    path = tmp_path / "export" / "1"
    translator.save(path)
    (path / "old").touch()
    translator.save(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["1"]
    assert not (path / "old").exists()
    assert best(load(path), ["はい"]) == ["Yes."]


def test_save_refuses_what_is_not_an_export(phrase_book, tmp_path):
    _, _, translator = phrase_book
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is in the way of the export"):
        translator.save(tmp_path / "1")
    assert (tmp_path / "1" / "thesis.txt").exists()


def test_save_where_nothing_can_be_written(phrase_book, tmp_path):
    _, _, translator = phrase_book
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="cannot write the export") as caught:
        translator.save(tmp_path / "file" / "1")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_load_says_what_is_wrong(phrase_book, export, tmp_path):
    with pytest.raises(ConfigError, match="no model at .*train.py"):
        load(tmp_path)

    foreign = tf.Module()
    foreign.f = tf.function(lambda: tf.constant(1), input_signature=[])
    tf.saved_model.save(foreign, str(tmp_path / "foreign"))
    with pytest.raises(ConfigError, match="without `translate`"):
        load(tmp_path / "foreign")


@pytest.mark.parametrize(
    "file", ["saved_model.pb", "variables/variables.data-00000-of-00001"]
)
def test_a_damaged_export_is_one_line(phrase_book, tmp_path, file):
    _, _, translator = phrase_book
    translator.save(tmp_path / "1")
    content = (tmp_path / "1" / file).read_bytes()
    (tmp_path / "1" / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ExportError, match="cannot read the export") as caught:
        load(tmp_path / "1")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_export_of_small_holds_its_weights_once(tmp_path):
    """Files of every kind counted: 4 bytes a parameter, 5 percent, the vocabulary in
    the operations that tokenize and in those that detokenize."""
    sentences = [f"{a}と{b}。" for a in "山川海空" for b in "犬猫鳥魚"]
    tokenizer = Tokenizer(train_vocabulary(sentences, 400))
    model = build_transformer(PRESETS["small"].model)
    Translator(model, tokenizer).save(tmp_path / "1")
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    vocabulary = len(tokenizer.model_bytes)
    assert size <= 1.05 * 4 * model.count_params() + 2 * vocabulary
