"""Beam search: a puzzle on paper, brute force, a naive search, then its properties."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from transformer_tf.decoding import Hypotheses, beam_search, top_k

A, B, EOS, BOS, PAD = 0, 1, 2, 3, -1


def search(step_fn, state, max_lengths, beam_size, vocab_size=4, **options):
    """beam_search on the toy vocabulary, as numpy arrays."""
    allowed = options.pop("allowed", np.arange(vocab_size) != BOS)
    found = beam_search(
        step_fn,
        state,
        batch_size=len(max_lengths),
        beam_size=beam_size,
        max_lengths=tf.constant(max_lengths, tf.int32),
        allowed=tf.constant(allowed),
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD,
        **options,
    )
    return Hypotheses(*(array.numpy() for array in found))


def words(ids):
    """[0, 1, 2, -1] -> "AB.": EOS is a dot, padding is nothing."""
    return "".join("AB.?"[token] for token in ids if token != PAD)


# --- On paper: a chain in which each token depends on the one before ----------------
#
#            A    B    end
#   begin   .6   .4   0        "B."   .4 * .9      = .36
#   A       .1   .5   .4       "AB."  .6 * .5 * .9 = .27
#   B       .05  .05  .9       "A."   .6 * .4      = .24

CHAIN = {BOS: (0.6, 0.4, 0.0), A: (0.1, 0.5, 0.4), B: (0.05, 0.05, 0.9)}


def chain_step(tokens, state, memory, step):
    table = np.full((4, 4), -np.inf, np.float32)
    for token, shares in CHAIN.items():
        with np.errstate(divide="ignore"):
            table[token, :3] = np.log(shares)
    return tf.gather(table, tokens), state


def test_puzzle_the_best_first_word_is_a_trap():
    found = search(chain_step, (), [9], 2, length_penalty=0.0, nbest=3)
    assert [words(ids) for ids in found.ids[0]] == ["B.", "AB.", "A."]
    np.testing.assert_allclose(np.exp(found.scores[0]), [0.36, 0.27, 0.24], rtol=1e-5)
    assert found.lengths.tolist() == [[2, 3, 2]]


def test_puzzle_greedy_falls_into_the_trap():
    found = search(chain_step, (), [9], 1, length_penalty=0.0)
    assert words(found.ids[0, 0]) == "AB."


def test_puzzle_a_strong_length_penalty_prefers_the_longer():
    # log .36 / (7/6)^2 = -0.751 against log .27 / (8/6)^2 = -0.736
    found = search(chain_step, (), [9], 2, length_penalty=2.0)
    assert words(found.ids[0, 0]) == "AB."
    assert found.scores[0, 0] == pytest.approx(math.log(0.27) / (8 / 6) ** 2, rel=1e-5)


def test_puzzle_at_the_cap_only_the_end_may_follow():
    found = search(chain_step, (), [2], 4, length_penalty=0.0, nbest=4)
    assert [words(ids) for ids in found.ids[0]] == ["B.", "A.", "", ""]
    np.testing.assert_allclose(np.exp(found.scores[0]), [0.36, 0.24, 0, 0], rtol=1e-5)
    assert found.lengths.tolist() == [[2, 2, 0, 0]]


# --- Oracles: a model that depends on everything said so far ------------------------


class HistoryModel:
    """Random logits for each history of each sentence; the state numbers the history.

    The number reads the tokens as digits, so that no two histories share one.
    """

    def __init__(self, seed, batch=1, depth=4, vocab_size=4, spread=2.0):
        self.base = vocab_size + 1
        rng = np.random.default_rng(seed)
        self.batch = batch
        shape = (batch, self.base**depth, vocab_size)
        self.logits = rng.normal(0, spread, shape).astype(np.float32)

    def state(self, beam_size):
        sentence = np.repeat(np.arange(self.batch), beam_size)
        return {"sentence": tf.constant(sentence), "history": sentence * 0}

    def step(self, tokens, state, memory, step):
        tokens = tf.cast(tokens, tf.int64)
        digit = tf.where(tokens == BOS, tf.zeros_like(tokens), tokens + 1)
        history = state["history"] * self.base + digit
        where = tf.stack([state["sentence"], history], axis=1)
        return tf.gather_nd(self.logits, where), {**state, "history": history}

    def log_probabilities(self, sentence, prefix):
        history = 0
        for token in prefix:
            history = history * self.base + token + 1
        logits = self.logits[sentence, history].astype(np.float64)
        return logits - np.log(np.exp(logits).sum())

    def score(self, sentence, ids, alpha):
        """The score of a whole sequence: teacher forcing, then the length penalty."""
        steps = [
            self.log_probabilities(sentence, ids[:i])[token]
            for i, token in enumerate(ids)
        ]
        return sum(steps) / ((5 + len(ids)) / 6) ** alpha


def brute_force(model, sentence, cap, alpha):
    """All sequences of at most `cap` tokens, EOS included, best first."""
    everything = [
        [*prefix, EOS]
        for length in range(cap)
        for prefix in itertools.product((A, B), repeat=length)
    ]
    scored = [(model.score(sentence, ids, alpha), ids) for ids in everything]
    return sorted(scored, reverse=True)


def naive_search(model, sentence, cap, alpha, width):
    """Beam search as one would write it with lists, without ever stopping early."""
    live, finished = [(0.0, [])], []
    for length in range(1, cap + 1):
        longer = []
        for logp, ids in live:
            following = logp + model.log_probabilities(sentence, ids)
            finished.append((following[EOS] / ((5 + length) / 6) ** alpha, [*ids, EOS]))
            longer += [(following[token], [*ids, token]) for token in (A, B)]
        live = sorted(longer, reverse=True)[:width]
    return sorted(finished, reverse=True)


def assert_found(found, sentence, expected):
    for place, (score, ids) in enumerate(expected):
        assert words(found.ids[sentence, place]) == words(ids)
        assert found.scores[sentence, place] == pytest.approx(score, abs=1e-5)
        assert found.lengths[sentence, place] == len(ids)


ALPHAS = [-1.0, 0.0, 0.6, 1.0, 3.0]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("nbest", [1, 5, 15])
def test_a_beam_wide_enough_equals_brute_force(alpha, nbest):
    for seed in range(5):
        model = HistoryModel(seed)
        found = search(
            model.step, model.state(8), [4], 8, length_penalty=alpha, nbest=nbest
        )
        assert_found(found, 0, brute_force(model, 0, 4, alpha)[:nbest])


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("width", [2, 3])
def test_a_narrow_beam_equals_a_naive_one_that_never_stops_early(alpha, width):
    # With a spread this small the probabilities are nearly level, so that penalties
    # decide and stopping one step too early would show.
    for seed in range(5):
        model = HistoryModel(seed, depth=6, spread=0.5 + seed % 2)
        for nbest in (1, width):
            found = search(
                model.step,
                model.state(width),
                [6],
                width,
                length_penalty=alpha,
                nbest=nbest,
            )
            expected = naive_search(model, 0, 6, alpha, width)
            assert_found(found, 0, expected[:nbest])


def test_beam_1_is_the_argmax_of_every_step():
    for seed in range(10):
        model = HistoryModel(seed, depth=5)
        ids = []
        while EOS not in ids:
            logp = model.log_probabilities(0, ids)
            logp[BOS] = -np.inf
            ids.append(EOS if len(ids) == 4 else int(np.argmax(logp)))
        for width in (1, tf.constant(1)):
            found = search(model.step, model.state(1), [5], width)
            assert words(found.ids[0, 0]) == words(ids)
            assert found.scores[0, 0] == pytest.approx(
                model.score(0, ids, 0.6), abs=1e-5
            )


# --- Properties -----------------------------------------------------------------


def test_a_batch_equals_its_sentences_one_by_one():
    caps = [5, 1, 3, 4, 2, 5]
    model = HistoryModel(7, batch=len(caps), depth=5)
    together = search(model.step, model.state(3), caps, 3, nbest=2)
    for row, cap in enumerate(caps):
        alone = HistoryModel(0, depth=5)
        alone.logits = model.logits[row : row + 1]
        found = search(alone.step, alone.state(3), [cap], 3, nbest=2)
        length = found.ids.shape[2]
        np.testing.assert_array_equal(together.ids[row, :, :length], found.ids[0])
        assert (together.ids[row, :, length:] == PAD).all()
        np.testing.assert_array_equal(together.scores[row], found.scores[0])
        assert found.lengths.max() <= cap


def test_scores_are_teacher_forced_scores():
    model = HistoryModel(11, batch=4, depth=6)
    found = search(model.step, model.state(3), [6, 5, 6, 3], 3, nbest=3)
    for row, place in itertools.product(range(4), range(3)):
        ids = found.ids[row, place, : found.lengths[row, place]].tolist()
        assert ids[-1] == EOS and ids.count(EOS) == 1
        expected = model.score(row, ids, 0.6)
        assert found.scores[row, place] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("width", [1, 4])
def test_a_model_that_never_ends_is_ended_at_the_cap(width):
    logits = np.array([[1.0, 0.5, -1e9, 0.0]], np.float32)

    def step(tokens, state, memory, step):
        return tf.repeat(logits, len(tokens), axis=0), state

    found = search(step, (), [7, 3], width)
    assert [words(ids) for ids in found.ids[:, 0]] == ["AAAAAA.", "AA."]
    assert np.isfinite(found.scores).all()


@pytest.mark.parametrize("width", [1, 4])
def test_a_model_that_ends_at_once_is_asked_once(width):
    asked = []

    def step(tokens, state, memory, step):
        asked.append(int(step))
        return tf.repeat(np.array([[0.0, 0, 50, 0]], np.float32), len(tokens), 0), state

    found = search(step, (), [30, 30], width)
    assert [words(ids) for ids in found.ids[:, 0]] == [".", "."]
    assert asked == [0]


def test_it_stops_as_soon_as_nothing_better_can_come():
    # "A." has .9 * .9 = .81 after two steps; what lives on has .1 at the most.
    asked = []

    def step(tokens, state, memory, step):
        asked.append(int(step))
        share = [0.9, 0.05, 0.05] if step == 0 else [0.05, 0.05, 0.9]
        logits = np.log([[*share, 1e-30]]).astype(np.float32)
        return tf.repeat(logits, len(tokens), 0), state

    found = search(step, (), [100], 4, length_penalty=0.6)
    assert words(found.ids[0, 0]) == "A."
    assert asked == [0, 1]


@pytest.mark.parametrize("width", [2, 4])
def test_it_waits_for_a_long_hypothesis_that_the_penalty_will_lift(width):
    # "." has log .6 = -0.51. "AAAAAAA." has only .4, but no further doubts: log .4 /
    # (13 / 6) = -0.42. One word on, at log .4 / (7 / 6) = -0.79, it looks lost.
    shares = np.full((8, 4), 1e-30)
    shares[:, A] = [0.4, 1, 1, 1, 1, 1, 1, 1e-30]
    shares[:, EOS] = [0.6, *[1e-30] * 6, 1]

    def step(tokens, state, memory, step):
        logits = tf.gather(np.log(shares).astype(np.float32), [step])
        return tf.repeat(logits, len(tokens), 0), state

    found = search(step, (), [8], width, length_penalty=1.0)
    assert words(found.ids[0, 0]) == "AAAAAAA."
    assert found.scores[0, 0] == pytest.approx(math.log(0.4) / (13 / 6), rel=1e-5)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_ties_go_to_the_smaller_id_and_give_no_duplicates(width):
    def step(tokens, state, memory, step):
        return tf.zeros([len(tokens), 4]), state

    found = search(step, (), [4], width, length_penalty=0.0, nbest=width)
    sentences = [words(ids) for ids in found.ids[0]]
    assert len(set(sentences)) == width
    # Level logits: every token costs log 4, so that the shortest wins. Only greedy
    # search can not see that: it takes EOS because no token is better.
    assert sentences[0] == "."
    assert sentences[1:3] == ["A.", "B."][: width - 1]


def test_only_allowed_tokens_are_produced_and_the_others_keep_their_share():
    logits = np.log(np.array([[0.5, 0.2, 0.1, 0.2]], np.float32))

    def step(tokens, state, memory, step):
        return tf.repeat(logits, len(tokens), 0), state

    allowed = np.array([False, True, False, False])
    found = search(step, (), [3], 4, length_penalty=0.0, nbest=3, allowed=allowed)
    assert [words(ids) for ids in found.ids[0]] == [".", "B.", "BB."]
    np.testing.assert_allclose(np.exp(found.scores[0]), [0.1, 0.02, 0.004], rtol=1e-5)


def test_a_beam_wider_than_the_vocabulary():
    model = HistoryModel(3)
    found = search(model.step, model.state(50), [4], 50, nbest=20)
    expected = brute_force(model, 0, 4, 0.6)
    assert_found(found, 0, expected)
    assert np.isneginf(found.scores[0, len(expected) :]).all()
    assert (found.ids[0, len(expected) :] == PAD).all()


@pytest.mark.parametrize("width", [1, 3])
def test_a_state_that_grows_follows_its_hypothesis(width):
    """The state holds what was fed; it must be the prefix of the hypothesis."""
    model = HistoryModel(5, batch=3, depth=6)

    @tf.function
    def run(beam_size):
        rows = 3 * beam_size
        state = {
            "model": {
                "sentence": tf.repeat(tf.range(3, dtype=tf.int64), beam_size),
                "history": tf.zeros([rows], tf.int64),
            },
            "fed": tf.zeros([rows, 0], tf.int32),
            "cache": [tf.zeros([rows, 2, 0, 1])],
        }

        def step(tokens, state, memory, step):
            fed = tf.concat([state["fed"], tokens[:, None]], axis=1)
            # Number the history from what the state remembers, not from its number.
            history = tf.zeros_like(state["model"]["history"])
            digits = tf.cast(fed[:, 1:], tf.int64) + 1
            for_each = tf.range(tf.shape(digits)[1])
            history = tf.foldl(
                lambda number, i: number * model.base + digits[:, i], for_each, history
            )
            where = tf.stack([state["model"]["sentence"], history], axis=1)
            new = tf.tile(
                tf.cast(tokens, tf.float32)[:, None, None, None], [1, 2, 1, 1]
            )
            cache = [tf.concat([state["cache"][0], new], axis=2)]
            state = {"model": state["model"], "fed": fed, "cache": cache}
            return tf.gather_nd(model.logits, where), state

        return beam_search(
            step,
            state,
            batch_size=3,
            beam_size=beam_size,
            max_lengths=tf.constant([6, 4, 5]),
            allowed=tf.range(4) != BOS,
            nbest=2,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=PAD,
        )

    remembered = run(tf.constant(width))
    numbered = search(model.step, model.state(width), [6, 4, 5], width, nbest=2)
    np.testing.assert_array_equal(remembered.ids, numbered.ids)
    np.testing.assert_allclose(remembered.scores, numbered.scores, atol=1e-6)


def test_one_graph_serves_every_beam_size():
    model = HistoryModel(9, batch=2)

    @tf.function(input_signature=[tf.TensorSpec([], tf.int32)] * 2)
    def run(beam_size, nbest):
        state = {
            "sentence": tf.repeat(tf.range(2, dtype=tf.int64), beam_size),
            "history": tf.zeros([2 * beam_size], tf.int64),
        }
        return beam_search(
            model.step,
            state,
            batch_size=2,
            beam_size=beam_size,
            max_lengths=tf.constant([4, 4]),
            allowed=tf.range(4) != BOS,
            nbest=nbest,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=PAD,
        )

    for width in (1, 2, 4, 8):
        eager = search(model.step, model.state(width), [4, 4], width, nbest=width)
        graph = run(width, width)
        np.testing.assert_array_equal(graph.ids, eager.ids)
        np.testing.assert_allclose(graph.scores, eager.scores, atol=1e-6)
    assert run.experimental_get_tracing_count() == 1


def test_no_sentence_at_all():
    found = search(chain_step, (), [], 4)
    assert found.ids.shape == (0, 1, 0)
    assert found.scores.shape == (0, 1)


# --- Speed that changes nothing ------------------------------------------------------


@pytest.mark.parametrize("size", [512, 520, 7856, 7857, 5])
@pytest.mark.parametrize("k", [1, 4, 5])
def test_top_k_equals_tensorflows(size, k):
    rows = tf.random.normal((7, size))
    best, places = top_k(rows, tf.constant(k))
    expected, expected_places = tf.math.top_k(rows, k)
    np.testing.assert_array_equal(best, expected)
    np.testing.assert_array_equal(places, expected_places)


def test_top_k_of_rows_that_are_mostly_forbidden():
    rows = np.full((2, 1024), -np.inf, np.float32)
    rows[:, [3, 131, 259, 700]] = [[1, 2, 3, 4], [4, 3, 2, 1]]  # 3, 131, 259: one group
    best, places = top_k(tf.constant(rows), 4)
    assert best.numpy().tolist() == [[4, 3, 2, 1]] * 2
    assert places.numpy().tolist() == [[700, 259, 131, 3], [3, 131, 259, 700]]


def test_finished_sentences_leave_the_batch():
    # Sentence number n ends after n + 1 tokens.
    seen = []

    def step(tokens, state, memory, step):
        seen.append((memory["number"].numpy().tolist(), len(tokens)))
        ends = np.repeat(memory["number"].numpy(), 2) <= step.numpy()
        logits = np.where(ends[:, None], [[-9, -9, 9, -9]], [[9, 0, -9, -9]])
        return tf.constant(logits, tf.float32), state

    found = search(
        step, (), [9] * 4, 2, length_penalty=0.0, memory={"number": tf.range(4)}
    )
    assert found.lengths[:, 0].tolist() == [1, 2, 3, 4]
    assert seen == [([0, 1, 2, 3], 8), ([1, 2, 3], 6), ([2, 3], 4), ([3], 2)]


def test_neighbours_that_leave_change_nothing():
    model = HistoryModel(4, batch=6)
    caps = [2, 6, 3, 5, 1, 6]
    together = search(model.step, model.state(3), caps, 3, nbest=3)
    for i, cap in enumerate(caps):
        state = {name: x[3 * i : 3 * i + 3] for name, x in model.state(3).items()}
        alone = search(model.step, state, [cap], 3, nbest=3)
        width = alone.ids.shape[2]
        np.testing.assert_array_equal(together.ids[i, :, :width], alone.ids[0])
        assert (together.ids[i, :, width:] == PAD).all()
        np.testing.assert_allclose(together.scores[i], alone.scores[0], atol=1e-6)
