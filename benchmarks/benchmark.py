"""How fast is it? Training, decoding, start-up, beside what users would pick instead.

    python benchmarks/benchmark.py --run runs/ja_en [--against] [--json out.json]

Each kind of work runs in a process of its own. Speeds are real target tokens per second
of the process's CPU time on one thread, per second of the clock on several: CPU time
does not mind the neighbours on a shared machine, but on several threads it would count
waiting. Every figure is the median of `--repeats`, with the lowest and highest beside
it; what stands in one table was measured in turns, so its ratios hold even where the
machine's speed drifts.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


class Row(NamedTuple):
    """One line of a table."""

    name: str
    unit: str
    median: float
    low: float
    high: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run", default="runs/ja_en", help="a finished run: its corpus, size, export")
    add("--work", nargs="+", choices=WORKS, default=list(WORKS))
    add("--against", action="store_true", help="also measure plain Keras / CTranslate2")
    add("--threads", type=int, default=1)
    add("--precision", choices=("float32", "bfloat16"), default="float32")
    add("--xla", choices=("off", "full"), default="off", help="of a training step")
    add("--batch_tokens", type=int, default=4096, help="of a training step")
    add("--sentences", type=int, default=500, help="test sentences to translate")
    add("--repeats", type=int, default=5)
    add("--json", metavar="FILE", help="write the figures there too")
    add("--child", choices=WORKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        rows = WORKS[options.child](options)
        print(json.dumps([row._asdict() for row in rows]))
        return
    figures = {work: measure(work) for work in options.work}
    settings = f"threads {options.threads}, {options.precision}, XLA {options.xla}"
    for work, rows in figures.items():
        print(f"\n{work} ({settings})")
        for row in rows:
            print(
                f"  {row['name']:<42} {row['median']:>10,.1f} "
                f"[{row['low']:,.1f}..{row['high']:,.1f}] {row['unit']}"
            )
    if options.json:
        Path(options.json).write_text(
            json.dumps({"settings": vars(options), "figures": figures}, indent=1)
        )


def measure(work: str) -> list[dict]:
    """The rows of one kind of work, from a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", work]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    result = subprocess.run(command, stdout=subprocess.PIPE, env=environment)
    if result.returncode:
        sys.exit(f"benchmark.py: {work} failed with exit code {result.returncode}")
    return json.loads(result.stdout.splitlines()[-1])


# --- What is measured, in the child -----------------------------------------------


def ceiling(options: argparse.Namespace) -> list[Row]:
    """What the machine's matrix unit gives at best: squares of 2048."""
    use_threads(options)
    contenders = {f"matmul {d}": matmul(d) for d in ("float32", "bfloat16")}
    return in_turns(options, "GFLOP/s", contenders)


def matmul(dtype: str) -> Callable[[], float]:
    """Multiplies two squares; returns the GFLOP."""
    import tensorflow as tf

    size = 2048
    square = tf.cast(tf.random.normal((size, size)), dtype)
    product = tf.function(tf.matmul)
    product(square, square)

    def one() -> float:
        product(square, square).numpy()
        return 2 * size**3 / 1e9

    return one


def reading(options: argparse.Namespace) -> list[Row]:
    """The batches alone: plan, padding, tf.data; nothing is computed with them."""
    import numpy as np

    use_threads(options)
    batches = Session(options).batches()
    iterator = iter(batches.dataset())

    def read() -> float:
        count = max(batches.steps_per_epoch // 4, 1)
        targets = (next(iterator)[1].numpy() for _ in range(count))
        return float(sum(np.count_nonzero(target) for target in targets))

    read()
    rows = in_turns(options, "target tokens/s", {"batches": read})
    padding = 100 * batches.padding_share
    shapes = f"padding, {len(batches.buckets)} shapes"
    return [*rows, Row(shapes, "%", padding, padding, padding)]


def training(options: argparse.Namespace) -> list[Row]:
    """Updates on the run's own batches; plain Keras's `fit` beside it."""
    use_threads(options)
    session = Session(options)
    batches, steps = session.batches(), 8
    trainer, iterator = session.trainer(), iter(batches.dataset())

    def ours() -> float:
        trainer.update.window.take()
        for _ in range(steps):
            trainer.update(iterator, apply=True)
        return trainer.update.window.take()[1]

    contenders: dict[str, Callable[[], float]] = {"ours": ours}
    if options.against:
        contenders["plain Keras fit"] = session.keras_fit(batches, steps)
    for run in contenders.values():
        run()  # traced
    rows = in_turns(options, "target tokens/s", contenders)
    per_token = session.flops_per_target_token(batches) / 1e9
    speed = Row("ours", "GFLOP/s", *(per_token * x for x in rows[0][2:]))
    name = f"matmul {options.precision}"
    [best] = in_turns(options, "GFLOP/s", {name: matmul(options.precision)})
    share = 100 * speed.median / best.median
    rows += [speed, best, Row("ours / matmul", "%", share, share, share)]
    return [*rows, peak_memory()]


def decoding(options: argparse.Namespace) -> list[Row]:
    """The test sentences through the export; CTranslate2 beside it."""
    use_threads(options)
    session = Session(options)
    source = session.test_sentences()
    rows = []
    for beam_size in (1, 4):
        for batch_size in (1, 32, 64):
            some = source[: 60 if batch_size == 1 else None]
            contenders = {"ours": session.ours(some, beam_size, batch_size)}
            if options.against:
                contenders["CTranslate2"] = session.theirs(some, beam_size, batch_size)
            if options.against and (beam_size, batch_size) == (1, 64):
                contenders["no cache"] = session.without_cache(some, batch_size)
            for run in contenders.values():
                run()
            title = f"beam {beam_size}, batch {batch_size}: "
            named = {title + name: run for name, run in contenders.items()}
            rows += in_turns(options, "target tokens/s", named)
            if batch_size == 1:
                rows += [
                    Row(
                        row.name,
                        "ms a sentence",
                        *(1e3 * session.length / x for x in row[2:]),
                    )
                    for row in rows[-len(contenders) :]
                ]
    return [*rows, peak_memory()]


def startup(options: argparse.Namespace) -> list[Row]:
    """One sentence from a cold process, on the clock."""
    rows = []
    sentence = [
        sys.executable,
        ROOT / "translate.py",
        "--model",
        options.run,
        "明日は天気",
    ]
    for name, command in {
        "translate.py, one sentence": sentence,
        "import tensorflow": [sys.executable, "-c", "import tensorflow"],
        "translate.py --help": [sys.executable, ROOT / "translate.py", "--help"],
    }.items():
        seconds = []
        for _ in range(options.repeats):
            start = time.monotonic()
            subprocess.run(command, check=True, capture_output=True)
            seconds.append(time.monotonic() - start)
        rows.append(Row(name, "s", *spread(seconds)))
    return rows


WORKS = {
    "ceiling": ceiling,
    "reading": reading,
    "training": training,
    "decoding": decoding,
    "startup": startup,
}


# --- How it is measured -----------------------------------------------------------


def use_threads(options: argparse.Namespace) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.threads)


def in_turns(
    options: argparse.Namespace, unit: str, contenders: dict[str, Callable[[], float]]
) -> list[Row]:
    """Speeds of contenders that return how much they did, measured A B A B …"""
    clock = time.process_time if options.threads == 1 else time.monotonic
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.repeats):
        for name, run in contenders.items():
            start = clock()
            done = run()
            speeds[name].append(done / (clock() - start))
    return [Row(name, unit, *spread(values)) for name, values in speeds.items()]


def spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def peak_memory() -> Row:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Row("peak memory of this process", "MB", peak, peak, peak)


class Session:
    """The corpus, the vocabulary and the model of a finished run."""

    def __init__(self, options: argparse.Namespace):
        import dataclasses

        import yaml

        from data_pipeline.corpus import DataConfig, open_corpus
        from data_pipeline.tokenizer import Tokenizer
        from transformer_tf.config import ModelConfig, TrainingConfig

        self.options = options
        self.run = Path(options.run)
        settings = yaml.safe_load((self.run / "config.yaml").read_text("utf-8"))
        settings |= {"batch_tokens": options.batch_tokens, "xla": options.xla}

        def read(kind):
            names = [field.name for field in dataclasses.fields(kind)]
            return kind(**{name: settings[name] for name in names})

        self.tokenizer = Tokenizer.load(self.run / "vocab.model")
        settings["vocab_size"] = self.tokenizer.vocab_size
        self.model_config = read(ModelConfig)
        self.training_config = read(TrainingConfig)
        self.corpus = open_corpus(read(DataConfig))

    def batches(self):
        from data_pipeline.batches import Batches
        from data_pipeline.encoded import encode_pairs

        encoded = encode_pairs(
            self.corpus.train,
            self.tokenizer,
            self.run / "ids",
            self.model_config.max_length,
            report=lambda line: print(line, file=sys.stderr),
        )
        return Batches(encoded, batch_tokens=self.options.batch_tokens, seed=1)

    def trainer(self):
        import keras

        from transformer_tf.model import build_transformer
        from transformer_tf.training import Trainer

        if self.options.precision != "float32":
            keras.config.set_dtype_policy(f"mixed_{self.options.precision}")
        model = build_transformer(self.model_config)
        keras.config.set_dtype_policy("float32")
        return Trainer(model, self.training_config, self.model_config.d_model)

    def keras_fit(self, batches, steps: int) -> Callable[[], float]:
        """`fit` in float32 on the next `steps` batches; returns their target tokens."""
        import numpy as np
        from keras_reference import make_reference, weighted

        reference = make_reference(self.model_config, self.training_config)
        position = 0

        def fit() -> float:
            nonlocal position
            dataset = weighted(batches.dataset(position).take(steps))
            numbers = range(position, position + steps)
            position += steps
            reference.fit(dataset, verbose=0)
            per_epoch = batches.steps_per_epoch
            targets = (batches.batch(*divmod(n, per_epoch))[1] for n in numbers)
            return float(sum(np.count_nonzero(target) for target in targets))

        return fit

    def flops_per_target_token(self, batches) -> float:
        """Of the matrix products, forward and twice as much backward, padding apart.

        Attention's own products are left out: at a dozen tokens they are 1 %.
        """
        config = self.model_config
        d, ff = config.d_model, config.d_ff
        ratio = batches.source_tokens_per_epoch / batches.tokens_per_epoch
        source = config.num_layers * (4 * d * d + 2 * d * ff + 2 * d * d)
        target = config.num_layers * (6 * d * d + 2 * d * ff) + d * config.vocab_size
        return 3 * 2 * (source * ratio + target)

    def test_sentences(self) -> list[str]:
        from itertools import islice

        pairs = islice(self.corpus.test, self.options.sentences)
        return [source for source, _ in pairs]

    def ours(self, source: list[str], beam_size: int, batch_size: int):
        """Translates through the export; returns the target tokens."""
        import tensorflow as tf

        from transformer_tf.translator import load

        if not hasattr(self, "export"):
            self.export = load(self.run / "export" / "1")
        batches = in_batches(source, batch_size)

        def translate() -> float:
            texts = []
            for batch in batches:
                found = self.export.translate(tf.constant(batch), beam_size=[beam_size])
                texts += found["translation"][:, 0].numpy().tolist()
            return self.count_tokens(texts)

        return translate

    def theirs(self, source: list[str], beam_size: int, batch_size: int):
        """Translates with CTranslate2; returns the target tokens."""
        import ctranslate2
        import tensorflow as tf

        if not hasattr(self, "engine"):
            self.engine = ctranslate2.Translator(
                str(self.converted()),
                inter_threads=1,
                intra_threads=self.options.threads,
            )
        batches = []
        for batch in in_batches(source, batch_size):
            ids = self.tokenizer.tokenize(tf.constant(batch)).to_list()
            batches.append([self.tokenizer.pieces(row) + ["</s>"] for row in ids])

        def translate() -> float:
            pieces = 0
            for batch in batches:
                for result in self.engine.translate_batch(batch, beam_size=beam_size):
                    pieces += len(result.hypotheses[0]) + 1
            self.length = pieces / len(source)
            return pieces

        return translate

    def without_cache(self, source: list[str], batch_size: int):
        """Translates greedily, each step from the whole prefix; as `theirs`."""
        import tensorflow as tf
        from no_cache_reference import greedy

        from transformer_tf.graphs import read_source

        model = self.exported_model()
        decode = tf.function(greedy(model), reduce_retracing=True)
        max_length = self.model_config.max_length
        batches = [
            read_source(tf.constant(batch), self.tokenizer, max_length)[0]
            for batch in in_batches(source, batch_size)
        ]
        return lambda: float(sum(decode(batch) for batch in batches))

    def exported_model(self):
        """A model with the weights of the run's export."""
        from export import load_run

        return load_run(self.run / "export" / "1")[0]

    def converted(self) -> Path:
        """The run's export as a CTranslate2 model."""
        from ctranslate2_reference import convert

        model = self.exported_model()
        directory = Path(tempfile.mkdtemp()) / "model"
        pieces = self.tokenizer.pieces(range(self.tokenizer.vocab_size))
        convert(model, pieces, self.model_config.num_heads, directory)
        return directory

    def count_tokens(self, texts: list[bytes]) -> float:
        """Pieces of the translations, end tokens included."""
        import tensorflow as tf

        ids = self.tokenizer.tokenize(tf.constant(texts))
        tokens = float(ids.flat_values.shape[0] + len(texts))
        self.length = tokens / len(texts)
        return tokens


def in_batches(lines: list[str], size: int) -> list[list[str]]:
    """By length, so that little of a batch is padding."""
    lines = sorted(lines, key=len)
    return [lines[i : i + size] for i in range(0, len(lines), size)]


if __name__ == "__main__":
    main()
