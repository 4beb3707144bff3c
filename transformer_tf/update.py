"""One update: the gradient of a batch, its division by the tokens, Adam (paper, 5.3).

It runs under any `tf.distribute` strategy: replicas, and parts of an update, add up
*sums* of losses, and one division by the number of real target tokens of the whole
update comes last. So the gradient does not depend on how a batch was cut.

An update whose loss or gradient is not finite is left out and counted; the weights stay
as they were. In float16, whose smallest number is 6e-8, the loss is scaled up before it
is derived, as far as the gradients stay finite, and the gradients down again.
"""

from collections.abc import Iterable

import tensorflow as tf

from transformer_tf.config import TrainingConfig
from transformer_tf.devices import choose_xla
from transformer_tf.loss import label_smoothed_loss

# Loss scale of float16: first, lowest (below it an overflow is no matter of scale), and
# the good updates after which twice the scale is tried.
FIRST_SCALE, LOWEST_SCALE, GROW_SCALE_EVERY = 2.0**4, 2.0**-10, 2000


class Counters(tf.Module):
    """What a run has done so far; saved with the weights."""

    def __init__(self):
        super().__init__()

        def count(start=0, dtype=tf.int64):
            return tf.Variable(start, dtype=dtype, trainable=False)

        self.updates = count()  # skipped ones too: the position in the data
        self.skipped = count()
        self.skipped_in_row = count()
        self.since_skipped = count()
        self.loss_scale = count(1.0, tf.float32)
        self.tokens = count()  # real target tokens
        self.seconds = count(0.0, tf.float64)
        self.best_loss = count(float("inf"), tf.float64)
        self.since_best = count()  # validations


class Window(tf.Module):
    """Loss and tokens since the last report, over all replicas; skipped ones apart."""

    def __init__(self):
        super().__init__()
        self.loss = tf.Variable(0.0, trainable=False)
        self.tokens = tf.Variable(0.0, trainable=False)

    def add(self, loss, tokens):
        self.loss.assign_add(loss)
        self.tokens.assign_add(tokens)

    def take(self) -> tuple[float, float]:
        """Loss and tokens; the next window begins."""
        sums = float(self.loss.numpy()), float(self.tokens.numpy())
        self.loss.assign(0.0)
        self.tokens.assign(0.0)
        return sums


class Parts:
    """Sums over the parts of an update; each replica keeps its own."""

    def __init__(self, shapes):
        self.sums = [
            tf.Variable(
                tf.zeros(shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for shape in shapes
        ]

    def add(self, tensors) -> list:
        """Adds to the sums and returns them."""
        pairs = zip(self.sums, tensors, strict=True)
        return [total.assign_add(tensor) for total, tensor in pairs]

    def reset(self):
        for total in self.sums:
            total.assign(tf.zeros_like(total))


class Update:
    """Updates a model with one batch, or with several parts of one.

    Args:
        model: a `Transformer` whose variables exist, made under the current
            `tf.distribute` strategy.
        optimizer: a built Keras optimizer.
        config: the recipe.
    """

    def __init__(self, model, optimizer, config: TrainingConfig):
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.strategy = tf.distribute.get_strategy()
        self.counters = Counters()
        self.window = Window()
        self.dynamic_scale = model.encoder.compute_dtype == "float16"
        if self.dynamic_scale:
            self.counters.loss_scale.assign(FIRST_SCALE)
        self.parts = None
        if config.accumulation > 1:
            shapes = [v.shape for v in model.trainable_variables]
            self.parts = Parts([(), (), *shapes])
        self.step = tf.function(self._step)
        self.loss = tf.function(self._loss, reduce_retracing=True)
        tokens = tf.TensorSpec([None, None], tf.int32)
        self._sums = tf.function(
            self._sums,
            input_signature=[((tokens, tokens), tokens)],
            jit_compile=choose_xla(config.xla) == "full",
        )

    def __call__(self, batches, apply: bool) -> None:
        """Takes a batch from the (distributed) iterator; `apply` ends an update."""
        self.step(batches, apply)

    def dropout_states(self) -> list:
        """Variables that dropout draws from; no weight, but part of an exact resume."""
        weights = {id(v) for v in self.model.weights}
        return [v.value for v in self.model.variables if id(v) not in weights]

    def warm_up(self, shapes: Iterable[tuple[int, int, int]]) -> None:
        """Computes one gradient for each shape and forgets it.

        So XLA compiles every shape before the first update, and a shape that needs more
        memory than there is fails at once: name the largest one first.

        Args:
            shapes: (B, S, T).

        Raises:
            tf.errors.ResourceExhaustedError: it does not fit.
        """
        states = [(state, state.numpy()) for state in self.dropout_states()]
        for rows, source_length, target_length in shapes:
            rows = -(-rows // self.strategy.num_replicas_in_sync)
            source = tf.zeros((rows, source_length), tf.int32)
            target = tf.zeros((rows, target_length), tf.int32)
            self.strategy.run(self._sums, args=(((source, target), target),))
        for state, value in states:
            state.assign(value)

    # What follows runs inside tf.function.

    def _step(self, batches, apply):
        # The batch is taken here, where its shape is unknown, so that all shapes share
        # one graph. `apply` is a Python bool that picks one of two graphs.
        check, loss, tokens, gradients = self.strategy.run(
            self._replica_sums, args=(next(batches),)
        )
        if not apply:
            return
        check, loss, tokens = (self._total(x) for x in (check, loss, tokens))
        # The choice is made outside the replicas: inside tf.cond an optimizer could not
        # talk to the other ones.
        tf.cond(
            tf.math.is_finite(check),
            lambda: self._update(gradients, loss, tokens),
            self._skip,
        )
        self.counters.updates.assign_add(1)
        if self.parts is not None:
            self.strategy.run(self.parts.reset)

    def _replica_sums(self, batch):
        sums = self._sums(batch)
        if self.parts is not None:
            sums = self.parts.add(sums)
        loss, tokens, *gradients = sums
        # One number is not finite if any of them is not.
        check = loss + tf.add_n([tf.reduce_sum(g) for g in gradients])
        return check, loss, tokens, gradients

    def _sums(self, batch):
        """Summed loss, number of real tokens, gradients of the (scaled) summed loss."""
        variables = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            loss, tokens = self._summed_loss(self.model, batch, training=True)
            scaled = loss * self.counters.loss_scale
        gradients = tape.gradient(scaled, variables)
        # A gather's gradient is sparse, and Adam needs it dense.
        return [loss, tokens, *(tf.convert_to_tensor(g) for g in gradients)]

    def _update(self, gradients, loss, tokens):
        counters = self.counters
        self.window.add(loss, tokens)
        self.strategy.run(self._apply, args=(gradients, tokens * counters.loss_scale))
        counters.skipped_in_row.assign(0)
        good = counters.since_skipped.assign_add(1)
        if self.dynamic_scale:
            factor = tf.where(good % GROW_SCALE_EVERY == 0, 2.0, 1.0)
            counters.loss_scale.assign(counters.loss_scale * factor)
        return True

    def _skip(self):
        counters = self.counters
        counters.skipped.assign_add(1)
        counters.since_skipped.assign(0)
        if self.dynamic_scale:
            at_lowest = counters.loss_scale <= LOWEST_SCALE
            counters.skipped_in_row.assign_add(tf.cast(at_lowest, tf.int64))
            scale = tf.maximum(counters.loss_scale / 2.0, LOWEST_SCALE)
            counters.loss_scale.assign(scale)
        else:
            counters.skipped_in_row.assign_add(1)
        return True

    def _apply(self, gradients, divisor):
        """The optimizer adds up what the replicas bring; each divides by all tokens."""
        gradients = [tf.math.divide_no_nan(g, divisor) for g in gradients]
        self.optimizer.apply(gradients, self.model.trainable_variables)

    def _loss(self, batch, model):
        sums = self.strategy.run(self._summed_loss, args=(model, batch, False))
        return [self._total(x) for x in sums]

    def _total(self, value):
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    def _summed_loss(self, model, batch, training):
        inputs, target = batch
        logits = model(inputs, training=training)
        return label_smoothed_loss(logits, target, self.config.label_smoothing)
