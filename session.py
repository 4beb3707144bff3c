"""One sitting of a run: what `train.py` does once its flags are understood.

Here text and model meet: corpus -> vocabulary -> ids -> batches -> updates -> average
of the last checkpoints -> SavedModel -> score on the test set. Every worker of a
cluster comes this way; the chief alone writes.
"""

import contextlib
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.corpus import DataConfig, open_corpus
from export import save_checked
from transformer_tf.cluster import Cluster
from transformer_tf.config import DecodingConfig, ModelConfig, TrainingConfig
from transformer_tf.flags import settings_of
from transformer_tf.interrupt import Interrupt
from transformer_tf.run_directory import RunDirectory, log, write_text

if TYPE_CHECKING:
    from data_pipeline.encoded import EncodedPairs
    from data_pipeline.tokenizer import Tokenizer
    from transformer_tf.model import Transformer

# Between two updates after which the workers ask each other whether somebody was told
# to stop. That waits for all devices.
UPDATES_BETWEEN_QUESTIONS = 10


@dataclass(frozen=True)
class Options:
    """All that a run is made of."""

    preset: str
    output_dir: Path
    fresh: bool
    explain_config: bool
    model: ModelConfig
    training: TrainingConfig
    decoding: DecodingConfig
    data: DataConfig

    def settings(self) -> dict:
        """Every setting by its flag's name."""
        return settings_of([self.data, self.model, self.training, self.decoding])


def train(options: Options, run: RunDirectory) -> int:
    """From the corpus to the export; returns the exit code."""
    cluster = Cluster(options.training.strategy)
    with cluster.watch():
        session = Session(options, run, cluster)
        with Interrupt() as interrupt:
            session.train(interrupt)
            stopped_by = max(cluster.gather(interrupt.signal))
            session.export(check=not stopped_by)  # who waits for the end?
        if stopped_by:
            log(
                f"stopped after update {session.trainer.step}; the same command goes on"
            )
        elif cluster.is_chief:
            session.test()
        cluster.gather(0)  # who leaves early is taken for lost
    return 128 + stopped_by if stopped_by else 0


class Session:
    """One sitting of a run: everything that is open while it trains."""

    def __init__(self, options: Options, run: RunDirectory, cluster: Cluster):
        import keras
        import tensorflow as tf

        from data_pipeline.batches import Batches
        from transformer_tf.checkpoints import Checkpoints
        from transformer_tf.devices import choose_precision, choose_xla
        from transformer_tf.training import Trainer
        from transformer_tf.translator import Translator

        training = options.training
        self.options, self.run, self.cluster = options, run, cluster
        cluster.check_agreement("the flags", _shared_settings(options))
        keras.utils.set_random_seed(training.seed)
        if not tf.config.list_physical_devices("GPU"):
            # The same run twice gives the same bits. A GPU would pay for it dearly.
            tf.config.experimental.enable_op_determinism()
        with cluster.chief_first():
            encoded = self._prepare()
        self.xla = choose_xla(training.xla)
        sizes = dict(
            batch_tokens=training.batch_tokens // training.accumulation,
            seed=training.seed,
            # More shapes mean less padding; only XLA has to pay for each.
            max_shapes=12 if self.xla == "full" else 32,
            row_multiple=cluster.replicas,
        )
        self.batches, self.validation = (Batches(pairs, **sizes) for pairs in encoded)
        self.precision = choose_precision(training.precision)
        with cluster.strategy.scope():
            self.model = self._model(self.precision)
            self.trainer = Trainer(
                self.model, training, options.model.d_model, cluster.any
            )
            self.checkpoints = Checkpoints(
                run.checkpoints, self.trainer, training.keep_checkpoints
            )
        self.translator = Translator(self.model, self.tokenizer, options.decoding)
        self._describe()

    def _prepare(self) -> list["EncodedPairs"]:
        """Corpus, vocabulary, and the ids of the training and validation pairs."""
        self.corpus = open_corpus(self.options.data, cache_dir=self.run.ids)
        self.run.begin()
        log(f"corpus: {self.corpus.description}")
        self.tokenizer = self._vocabulary()
        self.run.check_unchanged(
            corpus_fingerprint=self.corpus.fingerprint,
            vocabulary_sha256=self.tokenizer.fingerprint,
        )
        return [self._encode(split) for split in ("train", "validation")]

    def train(self, interrupt: Interrupt) -> None:
        """Goes on from the newest checkpoint, or begins."""
        trainer, cluster = self.trainer, self.cluster
        with cluster.chief_first():  # who sets aside what is damaged
            if self.checkpoints.restore(report=log):
                log(f"going on after update {trainer.step}")
        cluster.check_agreement("the newest checkpoint", trainer.step)
        self._warm_up()
        with (
            self.batches.failures(),
            self.validation.failures(),
            self._reporter() as callbacks,
        ):
            start = trainer.step * self.options.training.accumulation
            trainer.train(
                cluster.distribute(self.batches, start),
                should_stop=self._stopper(interrupt),
                validate=self._validate,
                **callbacks,
            )
        weights = _fingerprint(self.model)
        log(f"weights after update {trainer.step:,}: {weights:08x}")
        cluster.check_agreement("the weights", weights)
        self.run.note(
            updates=trainer.step,
            target_tokens=int(trainer.counters.tokens.numpy()),
            minutes=round(float(trainer.counters.seconds.numpy()) / 60, 1),
        )

    @contextlib.contextmanager
    def _reporter(self) -> Iterator[dict[str, Callable]]:
        """What is told and kept while it trains: by the chief."""
        if not self.cluster.is_chief:
            nothing = dict.fromkeys(("after_update", "checkpoint"), lambda: None)
            yield {**nothing, "report": lambda progress: None}
            return
        from transformer_tf.reporting import Reporter

        training, step = self.options.training, self.trainer.step
        self.run.metrics.rewind(step)
        sentences = training.validation_sentences
        self.sample = list(itertools.islice(self.corpus.validation, sentences))
        with Reporter(self.run.log, self.run.metrics, training, step) as self.reporter:
            yield {
                "after_update": self.reporter.after_update,
                "report": self.reporter.progress,
                "checkpoint": self.checkpoints.save,
            }

    def _stopper(self, interrupt: Interrupt) -> Callable[[], bool]:
        """Whether somebody told this worker, or another one, to stop."""
        if self.cluster.workers == 1:
            return lambda: interrupt.signal > 0
        updates = itertools.count(1)
        return lambda: (
            next(updates) % UPDATES_BETWEEN_QUESTIONS == 0
            and self.cluster.any(interrupt.signal > 0)
        )

    def export(self, check: bool) -> None:
        """Saves the translator: the average of the last checkpoints (6.1), or the last
        weights where those are better, as they are while the model still learns fast.
        """
        from transformer_tf.checkpoints import load_average
        from transformer_tf.translator import Translator

        self.cluster.gather(0)  # the last checkpoint is written
        model = self._model("float32")
        training = self.options.training
        count = load_average(self.run.checkpoints, model, training.average_checkpoints)
        losses = [self._validation_loss(weights) for weights in (model, self.model)]
        what = f"the average of {count} checkpoints"
        if losses[1] < losses[0]:
            model.set_weights(self.model.get_weights())
            what = "the last weights"
        average, last = losses
        log(
            f"exporting {what} (validation loss of average {average:.3f}, of last "
            f"{last:.3f})"
        )
        if self.cluster.is_chief:
            translator = Translator(model, self.tokenizer, self.options.decoding)
            save_checked(translator, self.run.export, check)

    def test(self) -> None:
        """Scores what was exported, on the test pairs; kept for a second look."""
        from transformer_tf.scores import score
        from transformer_tf.translator import best_translations, load

        pairs = list(self.corpus.test)
        if not pairs:
            return log("no test pairs: nothing scored")
        source, reference = map(list, zip(*pairs, strict=True))
        translations = best_translations(load(self.run.export), source)
        self.run.test.mkdir(exist_ok=True)
        texts = {"source": source, "reference": reference, "translation": translations}
        for name, lines in texts.items():
            write_text(self.run.test / f"{name}.txt", "\n".join(lines) + "\n")
        scores = score(translations, reference, self.options.data.target_lang)
        log(f"test, {len(source):,} sentences: {scores}")
        self.run.note(test={"sentences": len(source), **scores._asdict()})

    def _vocabulary(self) -> "Tokenizer":
        """The vocabulary of the run, learnt from the training pairs if it is new."""
        from data_pipeline.tokenizer import Tokenizer, train_vocabulary

        path = self.run.vocabulary
        if not path.exists():
            sentences = itertools.chain.from_iterable(self.corpus.train)
            log("learning the vocabulary")
            Tokenizer(train_vocabulary(sentences, self.options.model.vocab_size)).save(
                path
            )
        return Tokenizer.load(path)

    def _encode(self, split: str) -> "EncodedPairs":
        from data_pipeline.encoded import encode_pairs

        pairs = getattr(self.corpus, split)
        max_length = self.options.model.max_length
        encoded = encode_pairs(
            pairs, self.tokenizer, self.run.ids, max_length, report=log
        )
        counts = ", ".join(f"{n:,} {why}" for why, n in encoded.counts.items() if n)
        log(f"{split} pairs: {counts}")
        return encoded

    def _model(self, precision: str) -> "Transformer":
        """A model with all its variables."""
        import keras

        from transformer_tf.model import build_transformer

        policy = "float32" if precision == "float32" else f"mixed_{precision}"
        keras.config.set_dtype_policy(policy)
        return build_transformer(self.options.model, self.tokenizer.vocab_size)

    def _describe(self) -> None:
        """Says once what the run is made of, and keeps it in run.json."""
        import keras
        import tensorflow as tf

        devices = tf.config.list_physical_devices("GPU") or ["CPU"]
        facts = {
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "devices": [getattr(d, "name", d) for d in devices],
            "workers": self.cluster.workers,
            "replicas": self.cluster.replicas,
            "precision": self.precision,
            "xla": self.xla,
            "seed": self.options.training.seed,
            "parameters": self.model.count_params(),
            "vocabulary": self.tokenizer.vocab_size,
            "vocabulary_sha256": self.tokenizer.fingerprint,
            "corpus": self.corpus.description,
            "corpus_fingerprint": self.corpus.fingerprint,
            "pairs": self.batches.encoded.counts,
            "shapes": len(self.batches.buckets),
            "padding": round(self.batches.padding_share, 3),
            "updates_per_epoch": round(
                self.batches.steps_per_epoch / self.options.training.accumulation, 1
            ),
            "target_tokens_per_update": round(
                self.batches.mean_target_tokens * self.options.training.accumulation
            ),
        }
        self.run.note(**facts)
        for name, value in facts.items():
            log(f"{name}: {value}")

    def _warm_up(self) -> None:
        """The largest batch first: if it does not fit, that is known at once."""
        shapes = self.batches.shapes
        start = time.monotonic()
        self.trainer.warm_up(shapes if self.xla == "full" else shapes[:1])
        log(f"first gradients: {time.monotonic() - start:.1f} s")

    def _validate(self) -> None:
        """Loss, and scores of a greedy sample."""
        loss = self._validation_loss(self.model)
        if self.cluster.is_chief:
            self._report_validation(loss)
        self.trainer.note_validation(loss)

    def _validation_loss(self, model: "Transformer") -> float:
        batches = self.cluster.distribute(self.validation, 0, 1)
        return self.trainer.validation_loss(batches, model)

    def _report_validation(self, loss: float) -> None:
        from transformer_tf.scores import score
        from transformer_tf.translator import best_translations

        guessing = math.log(self.tokenizer.vocab_size)
        warm = self.trainer.step >= self.options.training.warmup_steps
        if warm and loss > 0.9 * guessing:
            log(
                f"hint: after the warm-up a loss of {loss:.1f} is hardly better than "
                f"guessing ({guessing:.1f}): the rate is too high for so small a batch;"
                " lower --learning_rate_scale or raise --batch_tokens"
            )
        scores, example = None, ""
        if self.sample:
            source, reference = map(list, zip(*self.sample, strict=True))
            translations = best_translations(self.translator, source, beam_size=1)
            scores = score(translations, reference, self.options.data.target_lang)
            example = f"{source[0]} -> {translations[0]} ({reference[0]})"
        self.reporter.validation(loss, scores, example)


def _fingerprint(model: "Transformer") -> int:
    fingerprint = 0
    for weight in model.get_weights():
        fingerprint = zlib.crc32(weight.tobytes(), fingerprint)
    return fingerprint


def _shared_settings(options: Options) -> dict:
    """What the workers have to agree on: all but where each finds things."""
    own = ("data_dir", "manual_dir")
    return {k: v for k, v in options.settings().items() if k not in own}
