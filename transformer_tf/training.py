"""How it learns: the learning rate and the update (paper, section 5).

The loop is our own, because a run must be able to end, and to go on, at any update.
What one update computes is in `update.py`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import keras
import tensorflow as tf

from transformer_tf.config import ADAM, TrainingConfig
from transformer_tf.update import Update

MAX_SKIPPED_IN_ROW = 10  # updates; then the run has diverged
MAX_LOSS = 10.0  # so many times the loss of guessing: diverged too


class DivergedError(Exception):
    """The run has left the region where it can learn."""

    exit_code = 4


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


class OutOfMemoryError(Exception):
    """The device has too little memory for a batch."""

    exit_code = 2


class Progress(NamedTuple):
    """What happened since the last report."""

    step: int
    skipped: int  # updates since the last report
    loss: float  # label-smoothed, per real target token, mean since the last report
    learning_rate: float
    tokens_per_second: float  # real target tokens
    seconds_per_update: float
    seconds: float  # of the whole run, over all its sittings


class Reported(NamedTuple):
    """Where the last report was."""

    step: int
    skipped: int


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
        agree: whether any worker of a cluster says yes, where their clocks may differ.
    """

    def __init__(
        self,
        model,
        config: TrainingConfig,
        d_model: int,
        agree: Callable[[bool], bool] = bool,
    ):
        self.model = model
        self.config = config
        self.agree = agree
        self.strategy = tf.distribute.get_strategy()
        self.schedule = WarmupSchedule(
            d_model, config.warmup_steps, config.learning_rate_scale
        )
        self.optimizer = keras.optimizers.Adam(self.schedule, **ADAM)
        self.optimizer.build(model.trainable_variables)
        self.update = Update(model, self.optimizer, config)
        self.counters = self.update.counters
        self.reported = Reported(0, 0)

    @property
    def step(self) -> int:
        """Finished updates, skipped ones too."""
        return int(self.counters.updates.numpy())

    def warm_up(self, shapes: list[tuple[int, int, int]]) -> None:
        """Computes the gradient of a batch of each shape (B, S, T), and forgets it.

        Raises:
            OutOfMemoryError: one does not fit. Name the largest first.
        """
        try:
            self.update.warm_up(shapes)
        except tf.errors.ResourceExhaustedError as error:
            rows, source_length, target_length = shapes[0]
            tokens, parts = self.config.batch_tokens, self.config.accumulation
            raise OutOfMemoryError(
                f"a batch of {rows} x ({source_length} + {target_length}) tokens does "
                f"not fit into memory, try --batch_tokens {tokens // 2} or "
                f"--accumulation {2 * parts}"
            ) from error

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
            batches: of the strategy, endless, from the position that `step` says.
            should_stop: asked after each update.
            after_update: called after each update.
            report: given the progress each `log_every` updates, before a validation or
                a checkpoint, and at the end.
            validate: called each `validate_every` updates; calls `note_validation`.
            checkpoint: called each `checkpoint_every` updates and at the end; not after
                a skipped update, so that what is kept is sound.

        Raises:
            DivergedError: ten updates in a row had to be skipped, or the loss is far
                worse than guessing. It comes before a checkpoint would be written.
        """
        config = self.config
        batches = iter(batches)
        clock = _Clock(self.counters.seconds)
        step = self.step  # counted here: asking a GPU would wait for it
        self.reported = Reported(step, int(self.counters.skipped.numpy()))
        done = step >= config.max_steps or self._is_over(clock)
        while not done:
            for part in range(config.accumulation):
                self.update(batches, apply=part == config.accumulation - 1)
            step += 1
            self._check_skipped(step)
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
                if (done or checkpoint_due) and not self._skipped_in_row():
                    checkpoint()

    def validation_loss(self, batches: Iterable, model=None) -> float:
        """Label-smoothed loss per real target token, without dropout.

        Args:
            batches: of the strategy, one pass.
            model: another one than that in training, of the same size.
        """
        total, tokens = 0.0, 0.0
        for batch in batches:
            batch_total, batch_tokens = self.update.loss(batch, model or self.model)
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
        time_is_up = config.max_minutes > 0 and self.agree(
            seconds >= config.max_minutes * 60
        )
        since_best = int(self.counters.since_best.numpy())
        return time_is_up or 0 < config.patience <= since_best

    def _check_skipped(self, step: int) -> None:
        """Now and then, since it waits for the device."""
        if step % MAX_SKIPPED_IN_ROW == 0:
            skipped = self._skipped_in_row()
            if skipped >= MAX_SKIPPED_IN_ROW:
                raise _diverged(
                    step, f"loss or gradient was not finite {skipped} times in a row"
                )

    def _skipped_in_row(self) -> int:
        return int(self.counters.skipped_in_row.numpy())

    def _progress(self, step: int, clock) -> Progress:
        loss_sum, tokens = self.update.window.take()
        self.counters.tokens.assign_add(int(tokens))
        loss = loss_sum / max(tokens, 1.0)
        guessing = math.log(self.model.vocab_size)
        if loss > MAX_LOSS * guessing:
            raise _diverged(
                step, f"the loss is {loss:.4g}, guessing would give {guessing:.1f}"
            )
        skipped = int(self.counters.skipped.numpy())
        updates, elapsed = step - self.reported.step, max(clock.lap(), 1e-9)
        before, self.reported = self.reported, Reported(step, skipped)
        return Progress(
            step=step,
            skipped=skipped - before.skipped,
            loss=loss,
            learning_rate=float(self.schedule(step - skipped - 1)),
            tokens_per_second=tokens / elapsed,
            seconds_per_update=elapsed / max(updates, 1),
            seconds=clock.read(),
        )


def _diverged(step: int, what: str) -> DivergedError:
    return DivergedError(
        f"diverged at update {step}: {what}; no checkpoint was made since; begin "
        "anew in another --output_dir with a lower --learning_rate_scale or more "
        "--warmup_steps"
    )
