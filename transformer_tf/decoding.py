"""How it chooses words: beam search over any model of the next token.

Paper, section 6.1: beam 4, length penalty 0.6 (GNMT), at most source + 50 tokens. The
search knows no model and no text; it asks a `step_fn` for logits and keeps the best
hypotheses. With beam 1 it is greedy.

One step, read in the order of `_Search.step`: every live beam is extended by one token;
its extension by EOS is a finished hypothesis; the best W other extensions live on.
A beam that can no longer matter gets the log-probability minus infinity, whatever the
reason. A sentence without a live beam leaves the batch, so that it costs nothing while
its neighbours go on; the search is over when all have left.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from transformer_tf.config import BOS_ID, EOS_ID, GNMT_OFFSET, PAD_ID

DEAD = float("-inf")  # log-probability of a beam, or score of a place, that is empty


class Hypotheses(NamedTuple):
    """What the search found for each sentence, best first; F = nbest."""

    ids: tf.Tensor  # (B, F, T) int32: tokens with EOS, without BOS, then PAD
    scores: tf.Tensor  # (B, F) float32: log p / ((5 + length) / 6)^alpha; -inf = none
    lengths: tf.Tensor  # (B, F) int32: tokens, EOS included; 0 = none


class Limits(NamedTuple):
    """What each sentence may have; its neighbours may have more or less."""

    beam_size: tf.Tensor  # (b,) int32: W of the sentence, at most that of the batch
    nbest: tf.Tensor  # (b,) int32: F of the sentence
    length: tf.Tensor  # (b,) int32: tokens, EOS included
    alpha: tf.Tensor  # (b,) float32: of the length penalty


class Beams(NamedTuple):
    """What one step hands to the next; t tokens have been chosen.

    b of the B sentences are still in the batch, with n = b * W hypotheses.
    """

    step: tf.Tensor  # () int32: t
    sentences: tf.Tensor  # (b,) int32: which ones they are
    limits: Limits
    ids: tf.Tensor  # (n, 1 + t) int32: BOS and the tokens of each live hypothesis
    logp: tf.Tensor  # (b, W) float32: its log-probability, best first; -inf = dead
    state: Any  # nest of (n, ...): what the model remembers of it
    memory: Any  # nest of (b, ...): what the model knows of the sentence
    finished_ids: tf.Tensor  # (B, F, 1 + t) int32: BOS, tokens, EOS, PAD
    scores: tf.Tensor  # (B, F) float32: final scores, best first; -inf = empty


def length_penalty_divisor(length: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """((5 + length) / 6)^alpha: what GNMT divides a log-probability by."""
    length = tf.cast(length, tf.float32)
    return tf.pow((GNMT_OFFSET + length) / (GNMT_OFFSET + 1.0), alpha)


def widest(sizes: int | tf.Tensor) -> tf.Tensor:
    """The largest of the sizes; 1 if there are none."""
    return tf.maximum(tf.reduce_max(sizes), 1)


def top_k(rows: tf.Tensor, k: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The k best of each row and where they are, as `tf.math.top_k`, but for ties.

    The k best are in the k groups with the best maxima, and maxima are cheap: over a
    vocabulary of 8,000 pieces this takes a third of the time.
    """
    size, groups = rows.shape[1], 8
    if size is None or size % groups or size < 64 * groups:
        return tf.math.top_k(rows, k=k)
    parts = tf.reshape(rows, [-1, groups, size // groups])
    _, group = tf.math.top_k(tf.reduce_max(parts, axis=1), k=k)  # (n, k)
    members = tf.range(groups) * (size // groups)
    places = tf.reshape(group[:, :, None] + members, [-1, k * groups])
    best, index = tf.math.top_k(tf.gather(rows, places, batch_dims=1), k=k)
    return best, tf.gather(places, index, batch_dims=1)


def beam_search(
    step_fn: Callable[[tf.Tensor, Any, Any, tf.Tensor], tuple[tf.Tensor, Any]],
    initial_state: Any,
    memory: Any = (),
    *,
    batch_size: int | tf.Tensor,
    beam_size: int | tf.Tensor,
    max_lengths: tf.Tensor,
    allowed: tf.Tensor,
    length_penalty: float | tf.Tensor = 0.6,
    nbest: int | tf.Tensor = 1,
    bos_id: int = BOS_ID,
    eos_id: int = EOS_ID,
    pad_id: int = PAD_ID,
) -> Hypotheses:
    """Finds the `nbest` best-scored token sequences of each sentence.

    Every hypothesis ends with EOS, at its cap at the latest, so that its score is the
    one that the model gives to the whole sequence when forced along it. A sentence is
    done when no live beam can still beat the worst of its `nbest` kept hypotheses;
    from then on it does not change, whatever its neighbours in the batch do.

    Args:
        step_fn: (tokens (n,) int32, state, memory, step () int32) -> (logits (n, V)
            float32, state). Called with the newest token of each hypothesis, BOS at
            step 0; those of one sentence side by side.
        initial_state: any nest of tensors whose axis 0 is B * W, sentence by sentence.
            Rows follow the hypotheses from step to step. Axes that are 0 long may grow.
        memory: any nest of tensors whose axis 0 is B, which the hypotheses of a
            sentence share. Rows leave with their sentences.
        batch_size: B.
        beam_size: W, or (B,) one for each sentence; W is then the largest, and
            `initial_state` has B * W rows. Tensors make one graph serve every width.
        max_lengths: (B,) int32, the most tokens of a hypothesis, EOS included; values
            below 1 count as 1.
        allowed: (V,) boolean, False = never produced. EOS is always allowed.
        length_penalty: alpha of the GNMT penalty, or (B,) one for each sentence; 0
            compares bare log-probabilities.
        nbest: F, hypotheses kept for each sentence, or (B,), of which F is the largest.
            Greedy search finds only one.
        bos_id: the token that is fed first.
        eos_id: the token that ends a hypothesis.
        pad_id: what fills the ids after EOS; may not be an allowed token.

    Returns:
        `Hypotheses`. T is the longest that was found.
    """
    extension_bias = tf.where(
        allowed & (tf.range(tf.size(allowed)) != eos_id), 0.0, DEAD
    )

    def for_each(value, dtype):
        return tf.broadcast_to(tf.cast(value, dtype), [batch_size])

    limits = Limits(
        beam_size=for_each(beam_size, tf.int32),
        nbest=for_each(nbest, tf.int32),
        length=tf.maximum(max_lengths, 1),
        alpha=for_each(length_penalty, tf.float32),
    )
    search = _Search(
        step_fn=step_fn,
        beam_size=widest(beam_size),
        nbest=widest(nbest),
        extension_bias=extension_bias,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
    )
    beams = search.init(initial_state, memory, limits)
    (beams,) = tf.while_loop(
        lambda beams: tf.size(beams.sentences) > 0,
        lambda beams: (search.step(beams),),
        (beams,),
        shape_invariants=(_growing_shapes(beams),),
    )
    return search.finish(beams, limits.nbest)


@dataclass(frozen=True)
class _Search:
    """What stays the same over one search, and its three parts."""

    step_fn: Callable
    beam_size: tf.Tensor  # () int32: W
    nbest: tf.Tensor  # () int32: F
    extension_bias: tf.Tensor  # (V,) float32: 0, or -inf for EOS and what is forbidden
    bos_id: int
    eos_id: int
    pad_id: int

    def init(self, state: Any, memory: Any, limits: Limits) -> Beams:
        """One live beam per sentence; W equal ones would fill the beam with copies."""
        width, kept = self.beam_size, self.nbest
        # Grappler would take a size that is constant here for one that stays.
        sentences = tf.compat.v1.placeholder_with_default(
            tf.range(tf.size(limits.length)), [None]
        )
        batch = tf.size(sentences)
        first = tf.where(tf.range(width) == 0, 0.0, DEAD)  # (W,)
        return Beams(
            step=tf.constant(0),
            sentences=sentences,
            limits=limits,
            ids=tf.fill([batch * width, 1], self.bos_id),
            logp=tf.tile(first[None], [batch, 1]),
            state=state,
            memory=memory,
            finished_ids=tf.fill([batch, kept, 1], self.bos_id),
            scores=tf.fill([batch, kept], DEAD),
        )

    def step(self, beams: Beams) -> Beams:
        """Extends every live hypothesis by one token."""
        logits, state = self.step_fn(
            beams.ids[:, -1], beams.state, beams.memory, beams.step
        )
        ends, logp, parents, tokens = self._extend(beams, logits)
        finished_ids, scores, worst = self._keep_best(beams, ends)
        hopeful = self._is_hopeful(beams, logp, worst)
        beams = beams._replace(
            step=beams.step + 1,
            logp=logp,
            state=state,
            finished_ids=finished_ids,
            scores=scores,
        )
        return self._follow(beams, hopeful, parents, tokens)

    def finish(self, beams: Beams, nbest: tf.Tensor) -> Hypotheses:
        """Cuts BOS, what no hypothesis fills, and what a sentence did not ask for."""
        is_wanted = tf.range(self.nbest) < nbest[:, None]  # (B, F)
        ids = beams.finished_ids[:, :, 1:]
        ids = tf.where(is_wanted[:, :, None], ids, self.pad_id)
        scores = tf.where(is_wanted, beams.scores, DEAD)
        lengths = tf.math.count_nonzero(ids != self.pad_id, axis=-1, dtype=tf.int32)
        longest = tf.reduce_max(tf.pad(lengths, [[0, 1], [0, 0]]))  # 0 without a row
        return Hypotheses(ids[:, :, :longest], scores, lengths)

    def _extend(self, beams: Beams, logits: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The extensions of all live beams.

        Returns:
            (B, W) log-probability of each beam with EOS added, and for the best W other
            extensions of the sentence, (B, W) each: log-probability, beam, token.
        """
        width = self.beam_size
        # A beam's log-probabilities are its logits minus one number, so its best tokens
        # can be picked from the logits; W of each beam hold the W best of all.
        log_sum = tf.reduce_logsumexp(logits, axis=-1)  # (n,)
        few = tf.minimum(width, tf.size(self.extension_bias))
        best, tokens = top_k(logits + self.extension_bias, few)  # (n, few)
        before = tf.reshape(beams.logp, [-1]) - log_sum  # (n,)
        flat = [tf.size(beams.sentences), width * few]
        logp, index = tf.math.top_k(tf.reshape(before[:, None] + best, flat), k=width)
        tokens = tf.gather(tf.reshape(tokens, flat), index, batch_dims=1)

        ends = tf.reshape(before + logits[:, self.eos_id], tf.shape(beams.logp))
        has_room = beams.step + 1 < beams.limits.length  # for a token and then EOS
        is_wanted = tf.range(width) < beams.limits.beam_size[:, None]
        logp = tf.where(has_room[:, None] & is_wanted, logp, DEAD)
        # Greedy search has to choose: its one beam ends where EOS is the best token,
        # and only there.
        greedy = tf.equal(beams.limits.beam_size, 1)[:, None]
        chosen = ends >= logp[:, :1]
        logp = tf.where(greedy & chosen, DEAD, logp)
        ends = tf.where(greedy & ~chosen, DEAD, ends)
        return ends, logp, index // few, tokens

    def _keep_best(self, beams: Beams, ends: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The best F of the finished hypotheses and of those that EOS now ends.

        Returns:
            `finished_ids` and `scores` of all sentences, one token longer; and of those
            in the batch the worst of the scores, (b,).
        """
        alpha = beams.limits.alpha[:, None]
        candidates = ends / length_penalty_divisor(beams.step + 1, alpha)
        shape = [tf.size(beams.sentences), self.beam_size, beams.step + 1]
        # Finished ones come first: on a tie top_k keeps what is there.
        all_ids = [
            tf.gather(beams.finished_ids, beams.sentences),
            tf.reshape(beams.ids, shape),
        ]
        all_scores = [tf.gather(beams.scores, beams.sentences), candidates]
        scores, index = tf.math.top_k(tf.concat(all_scores, axis=1), k=self.nbest)
        ids = tf.gather(tf.concat(all_ids, axis=1), index, batch_dims=1)
        last = tf.where(index < self.nbest, self.pad_id, self.eos_id)
        ids = tf.concat([ids, last[:, :, None]], axis=2)

        padding = [[0, 0], [0, 0], [0, 1]]
        finished_ids = tf.pad(beams.finished_ids, padding, constant_values=self.pad_id)
        places = beams.sentences[:, None]
        return (
            tf.tensor_scatter_nd_update(finished_ids, places, ids),
            tf.tensor_scatter_nd_update(beams.scores, places, scores),
            tf.gather(scores, beams.limits.nbest - 1, batch_dims=1),
        )

    def _is_hopeful(self, beams: Beams, logp: tf.Tensor, worst: tf.Tensor) -> tf.Tensor:
        """Which sentences, (b,), have a live beam that can still enter the best F.

        A log-probability only falls, so the best a beam can hope for is what it has now
        under the most favourable length to come: the cap if alpha > 0, else the next.
        """
        divisor = tf.maximum(
            length_penalty_divisor(beams.step + 2, beams.limits.alpha),
            length_penalty_divisor(beams.limits.length, beams.limits.alpha),
        )
        return logp[:, 0] / divisor > worst

    def _follow(
        self, beams: Beams, hopeful: tf.Tensor, parents: tf.Tensor, tokens: tf.Tensor
    ) -> Beams:
        """Gives each new hypothesis the rows of the one that it extends, and leaves out
        the sentences that are not hopeful."""
        stay = tf.cast(tf.where(hopeful)[:, 0], tf.int32)  # (b',)
        rows = stay[:, None] * self.beam_size + tf.gather(parents, stay)  # (b', W)
        rows = tf.reshape(rows, [-1])
        state, ids = _gather((beams.state, beams.ids), rows)
        tokens = tf.reshape(tf.gather(tokens, stay), [-1, 1])
        sentences, limits, logp = _gather(
            (beams.sentences, beams.limits, beams.logp), stay
        )
        memory = beams.memory
        if tf.nest.flatten(memory):  # it is large and seldom changes
            memory = tf.cond(
                tf.size(stay) < tf.size(hopeful),
                lambda: _gather(beams.memory, stay),
                lambda: beams.memory,
            )
        return beams._replace(
            sentences=sentences,
            limits=limits,
            ids=tf.concat([ids, tokens], axis=1),
            logp=logp,
            state=state,
            memory=memory,
        )


def _gather(nest: Any, rows: tf.Tensor) -> Any:
    """The given rows of every tensor."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), nest)


def _growing_shapes(beams: Beams) -> Beams:
    """The shape invariants of the loop: rows leave, ids grow, and so do axes of length
    0."""

    def changing(tensor: tf.Tensor) -> tf.TensorShape:
        return tf.TensorShape([None] + [size or None for size in tensor.shape[1:]])

    return Beams(
        step=tf.TensorShape([]),
        sentences=tf.TensorShape([None]),
        limits=Limits(*[tf.TensorShape([None])] * 4),
        ids=tf.TensorShape([None, None]),
        logp=tf.TensorShape([None, None]),
        state=tf.nest.map_structure(changing, beams.state),
        memory=tf.nest.map_structure(changing, beams.memory),
        finished_ids=tf.TensorShape([None, None, None]),
        scores=tf.TensorShape([None, None]),
    )
