"""Which beam size, which length penalty? Scores on validation pairs, never on test.

    python benchmarks/decoding_sweep.py [--model RUN] [--data_dir DIR]

Beam 1 has no length penalty to choose: there is one hypothesis.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", metavar="RUN", help="as translate.py takes it")
    add("--data_dir", help="where TFDS keeps prepared data sets")
    add("--beam_size", type=int, nargs="+", default=[1, 4, 8])
    add("--length_penalty", type=float, nargs="+", default=[0.0, 0.3, 0.6, 1.0, 1.5])
    options = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from train import parse_options
    from transformer_tf.exports import find_export
    from transformer_tf.scores import score
    from transformer_tf.translator import best_translations, load

    export = find_export(options.model)
    config = export.parent.parent / "config.yaml"
    data = parse_options(["--config_path", str(config)]).data
    pairs = _validation_pairs(dataclasses.replace(data, data_dir=options.data_dir))
    source, reference = map(list, zip(*pairs, strict=True))
    translator = load(export)
    print(f"{len(source):,} validation pairs", flush=True)
    signature = ""
    for beam_size in options.beam_size:
        for length_penalty in options.length_penalty if beam_size > 1 else [0.0]:
            chosen = {"beam_size": beam_size, "length_penalty": length_penalty}
            translations = best_translations(translator, source, **chosen)
            scores = score(translations, reference, data.target_lang)
            words = sum(len(line.split()) for line in translations)
            ratio = words / sum(len(line.split()) for line in reference)
            print(
                f"beam {beam_size}  length penalty {length_penalty:<4}  "
                f"BLEU {scores.bleu:.2f}  chrF2 {scores.chrf:.2f}  length {ratio:.3f}",
                flush=True,
            )
            signature = scores.bleu_signature
    print(signature)


def _validation_pairs(config) -> list[tuple[str, str]]:
    from data_pipeline.corpus import open_corpus

    return list(open_corpus(config).validation)


if __name__ == "__main__":
    main()
