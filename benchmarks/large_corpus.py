"""Does a corpus need more memory because it is larger? From text to batches, by size.

    python benchmarks/large_corpus.py --pairs 200000 1000000 5000000 [--folder DIR]

Made-up sentences with the lengths of everyday ones, each step in a process of its own.
Anonymous memory is what a process cannot do without; resident memory counts mapped
files too, which the kernel keeps only while there is room. The vocabulary is learnt
once, from 200,000 sentences. On a shared machine: `nice -n 10`.
"""

import argparse
import functools
import itertools
import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[200_000, 1_000_000])
    folder = Path(tempfile.gettempdir(), "large_corpus")
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for count in options.pairs:
        text = options.folder / f"{count}.tsv"
        if options.step:
            return print(json.dumps(measured(STEPS[options.step], text)))
        if not text.exists():
            write_corpus(text, count)
        for step in STEPS:
            if step == "vocabulary" and (options.folder / "vocab.model").exists():
                continue
            command = [sys.executable, __file__, "--step", step, "--pairs", str(count)]
            command += ["--folder", str(options.folder)]
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            figures = json.loads(output.splitlines()[-1])
            line = ", ".join(f"{value:,} {name}" for name, value in figures.items())
            print(f"{count:,} pairs, {step}: {line}", flush=True)


def write_corpus(path: Path, count: int) -> None:
    """`count` pairs of two languages, one without spaces; few words are frequent."""
    rng = np.random.default_rng(0)
    kana = [chr(code) for code in range(0x3042, 0x3094)]
    latin = [a + b for a in "bdfghjklmnprstvwz" for b in "aeiou"]
    words = [
        sorted({"".join(rng.choice(each, rng.integers(1, 5))) for _ in range(50_000)})
        for each in (kana, latin)
    ]
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        for start in range(0, count, 10_000):
            length = rng.lognormal(2.0, 0.45, min(10_000, count - start)).clip(2, 60)
            texts = []
            for known, space in zip(words, ("", " "), strict=True):
                lengths = (length * rng.lognormal(0, 0.15, len(length)) + 1).astype(int)
                ranks = len(known) ** rng.random(lengths.sum())  # after Zipf
                parts = np.split(ranks.astype(int) - 1, np.cumsum(lengths)[:-1])
                texts.append([space.join(known[i] for i in part) for part in parts])
            file.writelines(f"{a}。\t{b}.\n" for a, b in zip(*texts, strict=True))
    unfinished.rename(path)


def measured(step, text: Path) -> dict[str, float]:
    """The figures of a step, and the most memory that it had."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.05):
            status = Path("/proc/self/status").read_text()
            most = max(most, int(re.search(r"RssAnon:\s+(\d+)", status)[1]))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    figures = step(text)
    done.set()
    watcher.join()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return figures | {"MB anonymous": most // 1024, "MB resident": resident // 1024}


def learn_vocabulary(text: Path) -> dict[str, float]:
    from data_pipeline.tokenizer import Tokenizer, train_vocabulary

    with text.open(encoding="utf-8") as file:
        sentences = (each for line in file for each in line.split("\t"))
        model = train_vocabulary(itertools.islice(sentences, 200_000), 16_000)
    Tokenizer(model).save(text.parent / "vocab.model")
    return {}


def encoded(text: Path):
    """Ids of the training pairs and of those split off, as train.py asks for them."""
    from data_pipeline.corpus import DataConfig, open_corpus
    from data_pipeline.encoded import encode_pairs
    from data_pipeline.tokenizer import Tokenizer

    cache, log = text.with_suffix(".ids"), functools.partial(print, file=sys.stderr)
    corpus = open_corpus(DataConfig(pairs=str(text)), cache)
    tokenizer = Tokenizer.load(text.parent / "vocab.model")
    splits = (corpus.train, corpus.validation)
    ids = [encode_pairs(s, tokenizer, cache, 256, report=log) for s in splits]
    list(itertools.islice(corpus.validation, 200))  # the sentences that are translated
    return ids


def prepare(text: Path) -> dict[str, float]:
    start = time.monotonic()
    pairs = len(encoded(text)[0])
    seconds = time.monotonic() - start
    return {"s": round(seconds, 1), "pairs/s": round(pairs / seconds)}


def start_again(text: Path, seconds: float = 10) -> dict[str, float]:
    start = time.monotonic()
    train, _ = encoded(text)
    from data_pipeline.batches import Batches

    batches = Batches(train, batch_tokens=25_000, seed=1, max_shapes=32)
    number = batches.steps_per_epoch - 20  # over the end of an epoch
    iterator = batches.dataset(number).as_numpy_iterator()
    next(iterator)
    first = time.monotonic()
    count = 0
    while time.monotonic() - first < seconds:
        next(iterator)
        count += 1
    return {
        "s to the first batch": round(first - start, 1),
        "batches/s": round(count / seconds, 1),
        "target tokens/s": round(count / seconds * batches.mean_target_tokens),
        "% padding": round(100 * batches.padding_share, 1),
        "shards": len(train.shards),
    }


STEPS = {
    "vocabulary": learn_vocabulary,
    "preparing": prepare,
    "second start": start_again,
}

if __name__ == "__main__":
    main()
