"""How it chooses words: beam search over any model of the next token.

Paper, section 6.1: beam 4, length penalty 0.6 (GNMT), at most source + 50 tokens. The
search knows no model and no text; it asks a `step_fn` for logits and keeps the best
hypotheses. With beam 1 it is greedy.

One step, read in the order of `_Search.step`: every live beam is extended by one token;
its extension by EOS is a finished hypothesis; the best W other extensions live on.
A beam that can no longer matter gets the log-probability minus infinity, whatever the
reason, and the search is over when no beam is alive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from transformer_tf.config import BOS_ID, EOS_ID, PAD_ID

DEAD = float("-inf")  # log-probability of a beam, or score of a place, that is empty


class Hypotheses(NamedTuple):
    """What the search found for each sentence, best first; F = nbest."""

    ids: tf.Tensor  # (B, F, T) int32: tokens with EOS, without BOS, then PAD
    scores: tf.Tensor  # (B, F) float32: log p / ((5 + length) / 6)^alpha; -inf = none
    lengths: tf.Tensor  # (B, F) int32: tokens, EOS included; 0 = none


class Beams(NamedTuple):
    """What one step hands to the next; t tokens have been chosen, N = B * W."""

    step: tf.Tensor  # () int32: t
    ids: tf.Tensor  # (N, 1 + t) int32: BOS and the tokens of each live hypothesis
    logp: tf.Tensor  # (B, W) float32: its log-probability, best first; -inf = dead
    state: Any  # nest of (N, ...): what the model remembers of it
    finished_ids: tf.Tensor  # (B, F, 1 + t) int32: BOS, tokens, EOS, PAD
    scores: tf.Tensor  # (B, F) float32: final scores, best first; -inf = empty


def length_penalty_divisor(length: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    """((5 + length) / 6)^alpha: what GNMT divides a log-probability by."""
    return tf.pow((5.0 + tf.cast(length, tf.float32)) / 6.0, alpha)


def beam_search(
    step_fn: Callable[[tf.Tensor, Any, tf.Tensor], tuple[tf.Tensor, Any]],
    initial_state: Any,
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
        step_fn: (tokens (N,) int32, state, step () int32) -> (logits (N, V) float32,
            state). Called with the newest token of each hypothesis, BOS at step 0.
        initial_state: any nest of tensors whose axis 0 is N, sentence by sentence. Rows
            follow the hypotheses from step to step. Axes that are 0 long may grow.
        batch_size: B.
        beam_size: W. A scalar tensor makes one graph serve every width.
        max_lengths: (B,) int32, the most tokens of a hypothesis, EOS included; values
            below 1 count as 1.
        allowed: (V,) boolean, False = never produced. EOS is always allowed.
        length_penalty: alpha of the GNMT penalty; 0 compares bare log-probabilities.
        nbest: F, hypotheses kept for each sentence. Greedy search finds only one.
        bos_id: the token that is fed first.
        eos_id: the token that ends a hypothesis.
        pad_id: what fills the ids after EOS; may not be an allowed token.

    Returns:
        `Hypotheses`. T is the longest that was found.
    """
    extension_bias = tf.where(
        allowed & (tf.range(tf.size(allowed)) != eos_id), 0.0, DEAD
    )
    search = _Search(
        step_fn=step_fn,
        batch_size=batch_size,
        beam_size=beam_size,
        nbest=nbest,
        max_lengths=tf.maximum(max_lengths, 1),
        extension_bias=extension_bias,
        alpha=tf.cast(length_penalty, tf.float32),
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
    )
    beams = search.init(initial_state)
    (beams,) = tf.while_loop(
        lambda beams: tf.reduce_any(beams.logp > DEAD),
        lambda beams: (search.step(beams),),
        (beams,),
        shape_invariants=(_growing_shapes(beams),),
    )
    return search.finish(beams)


@dataclass(frozen=True)
class _Search:
    """What stays the same over one search, and its three parts."""

    step_fn: Callable
    batch_size: int | tf.Tensor
    beam_size: int | tf.Tensor
    nbest: int | tf.Tensor
    max_lengths: tf.Tensor  # (B,) int32
    extension_bias: tf.Tensor  # (V,) float32: 0, or -inf for EOS and what is forbidden
    alpha: tf.Tensor  # () float32
    bos_id: int
    eos_id: int
    pad_id: int

    def init(self, state: Any) -> Beams:
        """One live beam per sentence; W equal ones would fill the beam with copies."""
        batch, width, kept = self.batch_size, self.beam_size, self.nbest
        first = tf.where(tf.range(width) == 0, 0.0, DEAD)  # (W,)
        return Beams(
            step=tf.constant(0),
            ids=tf.fill([batch * width, 1], self.bos_id),
            logp=tf.tile(first[None], [batch, 1]),
            state=state,
            finished_ids=tf.fill([batch, kept, 1], self.bos_id),
            scores=tf.fill([batch, kept], DEAD),
        )

    def step(self, beams: Beams) -> Beams:
        """Extends every live hypothesis by one token."""
        logits, state = self.step_fn(beams.ids[:, -1], beams.state, beams.step)
        ends, logp, parents, tokens = self._extend(beams, logits)
        finished_ids, scores = self._keep_best(beams, ends)
        logp = self._drop_hopeless(logp, scores, beams.step + 1)
        state, ids = self._follow(parents, (state, beams.ids))
        ids = tf.concat([ids, tf.reshape(tokens, [-1, 1])], axis=1)
        return Beams(beams.step + 1, ids, logp, state, finished_ids, scores)

    def finish(self, beams: Beams) -> Hypotheses:
        """Cuts BOS and what no hypothesis fills."""
        ids = beams.finished_ids[:, :, 1:]
        lengths = tf.math.count_nonzero(ids != self.pad_id, axis=-1, dtype=tf.int32)
        longest = tf.reduce_max(tf.pad(lengths, [[0, 1], [0, 0]]))  # 0 without a row
        return Hypotheses(ids[:, :, :longest], beams.scores, lengths)

    def _extend(self, beams: Beams, logits: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """The extensions of all live beams.

        Returns:
            (B, W) log-probability of each beam with EOS added, and for the best W other
            extensions of the sentence, (B, W) each: log-probability, beam, token.
        """
        width = self.beam_size
        # A beam's log-probabilities are its logits minus one number, so its best tokens
        # can be picked from the logits; W of each beam hold the W best of all.
        log_sum = tf.reduce_logsumexp(logits, axis=-1)  # (N,)
        few = tf.minimum(width, tf.size(self.extension_bias))
        best, tokens = tf.math.top_k(logits + self.extension_bias, k=few)  # (N, few)
        before = tf.reshape(beams.logp, [-1]) - log_sum  # (N,)
        flat = [self.batch_size, width * few]
        logp, index = tf.math.top_k(tf.reshape(before[:, None] + best, flat), k=width)
        tokens = tf.gather(tf.reshape(tokens, flat), index, batch_dims=1)

        ends = tf.reshape(before + logits[:, self.eos_id], [self.batch_size, width])
        has_room = beams.step + 1 < self.max_lengths  # for a token and then EOS
        logp = tf.where(has_room[:, None], logp, DEAD)
        # Greedy search has to choose: its one beam ends where EOS is the best token,
        # and only there.
        greedy = tf.equal(width, 1)
        chosen = ends >= logp[:, :1]
        logp = tf.where(greedy & chosen, DEAD, logp)
        ends = tf.where(greedy & ~chosen, DEAD, ends)
        return ends, logp, index // few, tokens

    def _keep_best(self, beams: Beams, ends: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """The best F of the finished hypotheses and of those that EOS now ends."""
        candidates = ends / length_penalty_divisor(beams.step + 1, self.alpha)
        live_ids = tf.reshape(
            beams.ids, [self.batch_size, self.beam_size, beams.step + 1]
        )
        # Finished ones come first: on a tie top_k keeps what is there.
        scores, index = tf.math.top_k(
            tf.concat([beams.scores, candidates], axis=1), k=self.nbest
        )
        ids = tf.gather(
            tf.concat([beams.finished_ids, live_ids], axis=1), index, batch_dims=1
        )
        last = tf.where(index < self.nbest, self.pad_id, self.eos_id)
        return tf.concat([ids, last[:, :, None]], axis=2), scores

    def _drop_hopeless(
        self, logp: tf.Tensor, scores: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        """Ends every sentence whose live beams cannot enter its best F any more.

        A log-probability only falls, so the best a beam can hope for is what it has now
        under the most favourable length to come: the cap if alpha > 0, else the next.
        """
        divisor = tf.maximum(
            length_penalty_divisor(step + 1, self.alpha),
            length_penalty_divisor(self.max_lengths, self.alpha),
        )
        hopeful = logp[:, 0] / divisor > scores[:, -1]  # (B,)
        return tf.where(hopeful[:, None], logp, DEAD)

    def _follow(self, parents: tf.Tensor, nest: Any) -> Any:
        """Gives each new hypothesis the rows of the one that it extends."""
        offsets = tf.range(self.batch_size)[:, None] * self.beam_size
        rows = tf.reshape(offsets + parents, [-1])  # (N,)
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), nest)


def _growing_shapes(beams: Beams) -> Beams:
    """The shape invariants of the loop: the ids grow, and so do axes of length 0."""

    def growing(tensor: tf.Tensor) -> tf.TensorShape:
        return tf.TensorShape([None] + [size or None for size in tensor.shape[1:]])

    return Beams(
        step=tf.TensorShape([]),
        ids=tf.TensorShape([None, None]),
        logp=tf.TensorShape([None, None]),
        state=tf.nest.map_structure(growing, beams.state),
        finished_ids=tf.TensorShape([None, None, None]),
        scores=tf.TensorShape([None, None]),
    )
