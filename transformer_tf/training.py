"""How it learns: the loss, the learning rate, and the update (paper, section 5).

The loop is our own, because a step must be able to resume anywhere and to run under any
`tf.distribute` strategy: replicas and parts of an update add up *sums* of losses, and
one division by the number of real target tokens of the whole update comes last. So the
gradient does not depend on how a batch was cut.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import keras
import tensorflow as tf

from transformer_tf.config import PAD_ID, TrainingConfig

ADAM = dict(beta_1=0.9, beta_2=0.98, epsilon=1e-9)  # paper, 5.3


class DivergedError(Exception):
    """The loss is no longer a number."""

    exit_code = 4


def label_smoothed_loss(logits, target, smoothing: float):
    """Cross entropy against (1 - smoothing) on the target, the rest on all V alike.

    With z the logits this is (1 - e) * (lse(z) - z_y) + e * (lse(z) - mean(z)), so no
    one-hot table is needed. Padding counts for nothing (5.4). Well-known codes spread
    the rest over V - 1 or V - 2 pieces instead; the difference is below 1e-3.

    Args:
        logits: (B, T, V) float32.
        target: (B, T) ids.
        smoothing: epsilon_ls.

    Returns:
        The summed loss, and the number of real target tokens, both float32 scalars.
    """
    real = tf.cast(tf.not_equal(target, PAD_ID), tf.float32)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)  # (B, T)
    if smoothing:
        chosen = tf.gather(logits, target, batch_dims=2)
        loss += smoothing * (chosen - tf.reduce_mean(logits, axis=-1))
    return tf.reduce_sum(loss * real), tf.reduce_sum(real)


@keras.saving.register_keras_serializable("transformer_tf")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), steps from 1 (5.3)."""

    def __init__(self, d_model: int, warmup_steps: int, scale: float = 1.0):
        self.d_model = d_model
        self.warmup_steps = warmup_steps
        self.scale = scale

    def __call__(self, step):
        step = tf.cast(step, tf.float32) + 1.0  # Keras counts finished updates
        rise = step * self.warmup_steps**-1.5
        return self.scale * self.d_model**-0.5 * tf.minimum(step**-0.5, rise)

    def get_config(self):
        return dict(
            d_model=self.d_model, warmup_steps=self.warmup_steps, scale=self.scale
        )


def choose_precision(precision: str) -> str:
    """ "auto" -> bfloat16 if every visible GPU computes it (Ampere or later)."""
    if precision != "auto":
        return precision
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    capable = [d.get("compute_capability", (0, 0)) >= (8, 0) for d in details]
    return "bfloat16" if gpus and all(capable) else "float32"


class Counters(tf.Module):
    """What a run has done so far; saved with the weights."""

    def __init__(self):
        super().__init__()
        self.tokens = tf.Variable(0, dtype=tf.int64, trainable=False)  # real, target
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self.best_loss = tf.Variable(float("inf"), dtype=tf.float64, trainable=False)
        self.since_best = tf.Variable(0, dtype=tf.int64, trainable=False)


class Progress(NamedTuple):
    """What happened since the last report."""

    step: int
    loss: float  # label-smoothed, per real target token, mean since the last report
    learning_rate: float
    tokens_per_second: float  # real target tokens
    seconds_per_update: float
    seconds: float  # of the whole run, over all its sittings


class _Sums:
    """Sums that each replica keeps for itself and a reader adds up."""

    def __init__(self, shapes=()):
        def zeros(shape=()):
            return tf.Variable(
                tf.zeros(shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

        self.loss, self.tokens = zeros(), zeros()
        self.gradients = [zeros(shape) for shape in shapes]

    def add(self, loss, tokens, gradients=()):
        self.loss.assign_add(loss)
        self.tokens.assign_add(tokens)
        for total, gradient in zip(self.gradients, gradients, strict=True):
            total.assign_add(gradient)

    def read(self) -> tuple[float, float]:
        """Loss and tokens over all replicas."""
        return tuple(float(tf.convert_to_tensor(x)) for x in (self.loss, self.tokens))

    def reset(self):
        for total in (self.loss, self.tokens, *self.gradients):
            total.assign(tf.zeros_like(total))


class _Clock:
    """Seconds of a run over all its sittings, and laps that leave out the pauses."""

    def __init__(self, seconds: tf.Variable):
        self.seconds = seconds
        self.before = float(seconds.numpy())
        self.start = self.lap_start = time.monotonic()

    def read(self) -> float:
        self.seconds.assign(self.before + time.monotonic() - self.start)
        return float(self.seconds.numpy())

    def lap(self) -> float:
        now = time.monotonic()
        self.lap_start, elapsed = now, now - self.lap_start
        return elapsed

    @contextlib.contextmanager
    def pause(self):
        """What happens inside is no part of the lap."""
        start = time.monotonic()
        yield
        self.lap_start += time.monotonic() - start


class Trainer:
    """Updates a model, one batch (or `accumulation` parts of it) at a time.

    Args:
        model: a `Transformer` whose variables exist, made under the current
            `tf.distribute` strategy.
        config: the recipe.
        d_model: width of the model, for the learning rate.
    """

    def __init__(self, model, config: TrainingConfig, d_model: int):
        self.model = model
        self.config = config
        self.strategy = tf.distribute.get_strategy()
        self.schedule = WarmupSchedule(
            d_model, config.warmup_steps, config.learning_rate_scale
        )
        self.optimizer = keras.optimizers.Adam(self.schedule, **ADAM)
        self.optimizer.build(model.trainable_variables)
        self.counters = Counters()
        self.window = _Sums()  # loss and tokens since the last report
        self.reported = 0  # updates at the last report
        self.parts = None  # sums over the parts of an update
        if config.accumulation > 1:
            self.parts = _Sums([v.shape for v in model.trainable_variables])
        self._step = tf.function(self._distributed_step)
        self._loss = tf.function(self._distributed_loss, reduce_retracing=True)
        if config.xla == "full":
            self._gradients = tf.function(self._gradients, jit_compile=True)

    @property
    def step(self) -> int:
        """Finished updates."""
        return int(tf.convert_to_tensor(self.optimizer.iterations.value))

    def dropout_states(self) -> list:
        """Variables that dropout draws from; no weight, but part of an exact resume."""
        weights = {id(v) for v in self.model.weights}
        return [v.value for v in self.model.variables if id(v) not in weights]

    def train(
        self,
        batches: Iterable,
        *,
        should_stop: Callable[[], bool],
        after_update: Callable[[], None],
        report: Callable[[Progress], None],
        validate: Callable[[], None],
        checkpoint: Callable[[], None],
    ) -> None:
        """Runs updates until max_steps, max_minutes, patience or `should_stop`.

        Args:
            batches: endless, from the position that `step` says.
            should_stop: asked after each update.
            after_update: called after each update.
            report: given the progress each `log_every` updates, before a validation or
                a checkpoint, and at the end.
            validate: called each `validate_every` updates; calls `note_validation`.
            checkpoint: called each `checkpoint_every` updates and at the end.

        Raises:
            DivergedError: the loss since the last report is not finite. It comes before
                a checkpoint would be written.
        """
        config = self.config
        batches = iter(self.strategy.experimental_distribute_dataset(batches))
        clock = _Clock(self.counters.seconds)
        step = self.reported = self.step  # counted here: asking a GPU would wait for it
        done = step >= config.max_steps or self._is_over(clock)
        while not done:
            for part in range(config.accumulation):
                self._step(batches, apply=part == config.accumulation - 1)
            step += 1
            after_update()
            stop = should_stop()
            done = stop or step >= config.max_steps or self._is_over(clock)
            validation_due = step % config.validate_every == 0 and not stop
            checkpoint_due = step % config.checkpoint_every == 0
            log_due = step % config.log_every == 0
            if done or log_due or validation_due or checkpoint_due:
                report(self._progress(step, clock))
            with clock.pause():
                if validation_due:
                    validate()
                    done = done or self._is_over(clock)
                if done or checkpoint_due:
                    checkpoint()

    def validation_loss(self, batches: Iterable, model=None) -> float:
        """Label-smoothed loss per real target token, without dropout.

        Args:
            batches: one pass.
            model: another one than that in training, of the same size.
        """
        total, tokens = 0.0, 0.0
        for batch in self.strategy.experimental_distribute_dataset(batches):
            batch_total, batch_tokens = self._loss(batch, model or self.model)
            total += float(batch_total)
            tokens += float(batch_tokens)
        return total / max(tokens, 1.0)

    def note_validation(self, loss: float) -> None:
        """Remembers the best loss and how many validations brought no better."""
        if loss < self.counters.best_loss.numpy():
            self.counters.best_loss.assign(loss)
            self.counters.since_best.assign(0)
        else:
            self.counters.since_best.assign_add(1)

    def _is_over(self, clock) -> bool:
        """Whether the run's time or its patience is at an end."""
        config = self.config
        seconds = clock.read()
        time_is_up = 0 < config.max_minutes * 60 <= seconds
        since_best = int(self.counters.since_best.numpy())
        return time_is_up or 0 < config.patience <= since_best

    def _progress(self, step: int, clock) -> Progress:
        loss_sum, tokens = self.window.read()
        self.window.reset()
        self.counters.tokens.assign_add(int(tokens))
        loss = loss_sum / max(tokens, 1.0)
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {loss} at update {step}, expected a finite number; the "
                f"last checkpoint is from before update {self.reported + 1}; begin "
                "anew in another --output_dir with a lower --learning_rate_scale or "
                "longer --warmup_steps"
            )
        updates, elapsed = step - self.reported, max(clock.lap(), 1e-9)
        self.reported = step
        return Progress(
            step=step,
            loss=loss,
            learning_rate=float(self.schedule(step - 1)),
            tokens_per_second=tokens / elapsed,
            seconds_per_update=elapsed / max(updates, 1),
            seconds=clock.read(),
        )

    # What follows runs inside tf.function.

    def _distributed_step(self, batches, apply):
        # The batch is taken here, where its shape is unknown, so that all shapes share
        # one graph. `apply` is a Python bool that picks one of two graphs: an optimizer
        # inside tf.cond could not talk to the other replicas.
        self.strategy.run(self._replica_step, args=(next(batches), apply))

    def _replica_step(self, batch, apply):
        gradients, loss, tokens = self._gradients(batch)
        self.window.add(loss, tokens)
        if self.parts is not None:
            self.parts.add(loss, tokens, gradients)
            gradients, tokens = self.parts.gradients, self.parts.tokens
        if apply:
            self._apply(gradients, tokens)
            if self.parts is not None:
                self.parts.reset()

    def _gradients(self, batch):
        """Gradients of the summed loss, the summed loss, the number of real tokens."""
        variables = [v.value for v in self.model.trainable_variables]
        with tf.GradientTape() as tape:
            loss, tokens = self._summed_loss(self.model, batch, training=True)
        gradients = tape.gradient(loss, variables)
        # A gather's gradient is sparse, and Adam needs it dense.
        return [tf.convert_to_tensor(g) for g in gradients], loss, tokens

    def _apply(self, gradients, tokens):
        """The optimizer adds up what the replicas bring; each divides by all tokens."""
        replica = tf.distribute.get_replica_context()
        tokens = replica.all_reduce(tf.distribute.ReduceOp.SUM, tokens)
        gradients = [tf.math.divide_no_nan(g, tokens) for g in gradients]
        self.optimizer.apply(gradients, self.model.trainable_variables)

    def _distributed_loss(self, batch, model):
        sums = self.strategy.run(self._summed_loss, args=(model, batch, False))
        return [
            self.strategy.reduce(tf.distribute.ReduceOp.SUM, x, axis=None) for x in sums
        ]

    def _summed_loss(self, model, batch, training):
        inputs, target = batch
        logits = model(inputs, training=training)
        return label_smoothed_loss(logits, target, self.config.label_smoothing)
