"""What does a run say while it trains? A bar or lines, a table, and TensorBoard."""

import datetime
import math
import sys
from pathlib import Path

import tensorflow as tf
from tqdm import tqdm

from transformer_tf.config import TrainingConfig
from transformer_tf.run_directory import Metrics, log
from transformer_tf.scores import Scores
from transformer_tf.training import Progress


class Reporter:
    """Tells of one sitting; a context manager.

    Args:
        board: directory for TensorBoard.
        metrics: gets a line for each validation.
        config: how long the run will be.
        step: updates already done.
    """

    def __init__(
        self, board: Path, metrics: Metrics, config: TrainingConfig, step: int
    ):
        self.board = tf.summary.create_file_writer(str(board))
        self.metrics = metrics
        self.config = config
        self.bar = tqdm(
            total=config.max_steps,
            initial=step,
            file=sys.stdout,
            # Our own estimate of what is left knows of max_minutes.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            disable=None,  # where there is no terminal; lines take its place
        )
        self.latest: Progress | None = None

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()
        self.board.close()

    def after_update(self) -> None:
        self.bar.update()

    def progress(self, progress: Progress) -> None:
        """Tells how the updates since the last report went."""
        self.latest = progress
        self._plot(
            progress.step,
            "train",
            loss=progress.loss,
            learning_rate=progress.learning_rate,
            tokens_per_second=progress.tokens_per_second,
        )
        left = datetime.timedelta(seconds=round(self._seconds_left()))
        state = (
            f"loss {progress.loss:.3f} rate {progress.learning_rate:.2e} "
            f"{progress.tokens_per_second:,.0f} target tokens/s {left} left"
        )
        if progress.skipped:
            state += f", {progress.skipped} updates skipped (not finite)"
        self.bar.set_postfix_str(state)
        if self.bar.disable:
            log(f"update {progress.step:,} {state}")

    def validation(self, loss: float, scores: Scores | None, example: str) -> None:
        """Tells how good the model is after the update of the latest progress."""
        step, latest = self.latest.step, self.latest
        bleu, chrf = (scores.bleu, scores.chrf) if scores else (math.nan, math.nan)
        self._plot(step, "validation", loss=loss, bleu=bleu, chrf=chrf)
        minutes = latest.seconds / 60
        self.metrics.add(
            step, minutes, latest.learning_rate, latest.loss, loss, bleu, chrf
        )
        log(f"validation after update {step:,}: loss {loss:.3f}")
        if scores:
            log(f"  greedy sample: {scores}\n  {example}")

    def _plot(self, step: int, group: str, **values: float) -> None:
        with self.board.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(f"{group}/{name}", value)

    def _seconds_left(self) -> float:
        updates = self.config.max_steps - self.latest.step
        left = updates * self.latest.seconds_per_update
        if self.config.max_minutes:
            left = min(left, self.config.max_minutes * 60 - self.latest.seconds)
        return max(left, 0)
