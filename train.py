"""Trains a translator: `python train.py`, and the same command again goes on.

Here text and model meet: corpus -> vocabulary -> ids -> batches -> updates -> average
of the last checkpoints -> SavedModel -> score on the test set.
"""

import argparse
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.corpus import Corpus, DataConfig, open_corpus
from export import save_checked
from transformer_tf.config import (
    PRESETS,
    DecodingConfig,
    ModelConfig,
    TrainingConfig,
)
from transformer_tf.flags import (
    OneLineParser,
    file_flags,
    make_parser,
    one_line,
    settings_of,
)
from transformer_tf.interrupt import Interrupt
from transformer_tf.paper import explain_config
from transformer_tf.run_directory import RunDirectory, log, write_text

if TYPE_CHECKING:
    from data_pipeline.encoded import EncodedPairs
    from data_pipeline.tokenizer import Tokenizer
    from transformer_tf.model import Transformer


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


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Flags win over the file, the file wins over the preset."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # These decide what the defaults of the others are.
    early = OneLineParser(prog="train.py", add_help=False, allow_abbrev=False)
    _add_run_flags(early)
    run, _ = early.parse_known_args(argv)
    preset = PRESETS[run.preset]
    groups = {
        "data": DataConfig(),
        "model": preset.model,
        "training": preset.training,
        "decoding": DecodingConfig(),
    }
    if run.config_path is not None:
        argv = file_flags(run.config_path, groups.values()) + argv
    parser = make_parser(__doc__, groups)
    _add_run_flags(parser)
    parsed = parser.parse_args(argv)
    names = (*groups, "preset", "fresh", "explain_config")
    chosen = {name: getattr(parsed, name) for name in names}
    return Options(output_dir=Path(parsed.output_dir), **chosen)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--preset",
        choices=PRESETS,
        default="small",
        help="size and recipe to start from",
    )
    add("--output_dir", default="runs/ja_en", help="where the run lives and goes on")
    add("--config_path", help="YAML file of any of the fields below")
    add("--fresh", action="store_true", help="remove the run that is there, start anew")
    add(
        "--explain_config",
        action="store_true",
        help="only print, beside the paper's, what this command would do, and why",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 configuration, 3 data, 4 diverged, 5 disk, 130
    and 143 interrupted after saving."""
    try:
        options = parse_options(argv)
        if options.explain_config:
            print(explain_config(options.preset, options.settings()))
            return 0
        run = RunDirectory(options.output_dir, options.settings(), options.fresh)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        return train(options, run)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        exit_code = getattr(error, "exit_code", 5 if isinstance(error, OSError) else 0)
        if not exit_code:
            raise
        print(f"train.py: {one_line(error)}", file=sys.stderr)
        return exit_code


def train(options: Options, run: RunDirectory) -> int:
    """From the corpus to the export; returns the exit code."""
    corpus = open_corpus(options.data, cache_dir=run.ids)
    run.begin()
    log(f"corpus: {corpus.description}")
    session = Session(options, run, corpus)
    with Interrupt() as interrupt:
        session.train(should_stop=lambda: interrupt.signal > 0)
        session.export(check=not interrupt.signal)  # who waits for the end?
    if interrupt.signal:
        log(f"stopped after update {session.trainer.step}; the same command goes on")
        return 128 + interrupt.signal
    session.test()
    return 0


class Session:
    """One sitting of a run: everything that is open while it trains."""

    def __init__(self, options: Options, run: RunDirectory, corpus: Corpus):
        import keras
        import tensorflow as tf

        from data_pipeline.batches import Batches
        from transformer_tf.checkpoints import Checkpoints
        from transformer_tf.devices import choose_precision, choose_xla
        from transformer_tf.training import Trainer
        from transformer_tf.translator import Translator

        training = options.training
        self.xla = choose_xla(training.xla)
        self.options, self.run, self.corpus = options, run, corpus
        keras.utils.set_random_seed(training.seed)
        if not tf.config.list_physical_devices("GPU"):
            # The same run twice gives the same bits. A GPU would pay for it dearly.
            tf.config.experimental.enable_op_determinism()
        self.tokenizer = self._vocabulary()
        self.run.check_unchanged(
            corpus_fingerprint=corpus.fingerprint,
            vocabulary_sha256=self.tokenizer.fingerprint,
        )
        sizes = dict(
            batch_tokens=training.batch_tokens // training.accumulation,
            seed=training.seed,
            # More shapes mean less padding; only XLA has to pay for each.
            max_shapes=12 if self.xla == "full" else 32,
        )
        self.batches = Batches(self._encode("train"), **sizes)
        self.validation = Batches(self._encode("validation"), **sizes)
        self.precision = choose_precision(training.precision)
        self.model = self._model(self.precision)
        self.trainer = Trainer(self.model, training, options.model.d_model)
        self.checkpoints = Checkpoints(
            run.checkpoints, self.trainer, training.keep_checkpoints
        )
        self.translator = Translator(self.model, self.tokenizer, options.decoding)
        self._describe()

    def train(self, should_stop: Callable[[], bool]) -> None:
        """Goes on from the newest checkpoint, or begins."""
        from transformer_tf.reporting import Reporter

        trainer = self.trainer
        if self.checkpoints.restore(report=log):
            log(f"going on after update {trainer.step}")
        self.run.metrics.rewind(trainer.step)
        sentences = self.options.training.validation_sentences
        self.sample = list(itertools.islice(self.corpus.validation, sentences))
        self.reporter = Reporter(
            self.run.log, self.run.metrics, self.options.training, trainer.step
        )

        self._warm_up()
        with self.reporter:
            trainer.train(
                self.batches.dataset(trainer.step * self.options.training.accumulation),
                should_stop=should_stop,
                after_update=self.reporter.after_update,
                report=self.reporter.progress,
                validate=self._validate,
                checkpoint=self.checkpoints.save,
            )
        self.run.note(
            updates=trainer.step,
            target_tokens=int(trainer.counters.tokens.numpy()),
            minutes=round(float(trainer.counters.seconds.numpy()) / 60, 1),
        )

    def export(self, check: bool) -> None:
        """Saves the translator: the average of the last checkpoints (6.1), or the last
        weights where those are better, as they are while the model still learns fast.
        """
        from transformer_tf.checkpoints import load_average
        from transformer_tf.translator import Translator

        model = self._model("float32")
        training = self.options.training
        count = load_average(self.run.checkpoints, model, training.average_checkpoints)
        losses = [
            self.trainer.validation_loss(self.validation.dataset(epochs=1), weights)
            for weights in (model, self.model)
        ]
        what = f"the average of {count} checkpoints"
        if losses[1] < losses[0]:
            model.set_weights(self.model.get_weights())
            what = "the last weights"
        average, last = losses
        log(
            f"exporting {what} (validation loss of average {average:.3f}, of last "
            f"{last:.3f})"
        )
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
        from transformer_tf.scores import score
        from transformer_tf.translator import best_translations

        loss = self.trainer.validation_loss(self.validation.dataset(epochs=1))
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
        self.trainer.note_validation(loss)


if __name__ == "__main__":
    sys.exit(main())
