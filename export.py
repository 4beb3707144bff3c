"""Exports a run again: `python export.py runs/ja_en --version 2`.

`train.py` exports when it ends. This makes another version from the checkpoints, for a
server that takes up new versions by itself, and looks at it as a server would. With
--bundle it makes a run in miniature, to be given away: settings, vocabulary, metrics,
and an export with 16 bits a weight.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_tf.config import ConfigError, DecodingConfig, ModelConfig
from transformer_tf.exports import versions
from transformer_tf.flags import OneLineParser, one_line
from transformer_tf.run_directory import log, write_settings

if TYPE_CHECKING:
    from data_pipeline.tokenizer import Tokenizer
    from transformer_tf.model import Transformer
    from transformer_tf.translator import Translator


def make_parser() -> OneLineParser:
    parser = OneLineParser(
        prog="export.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 2 wrong use, 5 damaged checkpoint, disk or export",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="directory that train.py wrote")
    add(
        "--version",
        type=int,
        metavar="N",
        help="number of the export (default: the newest one and 1)",
    )
    add(
        "--average_checkpoints",
        type=int,
        metavar="N",
        help="newest checkpoints averaged, 1 = the last (default: as configured)",
    )
    add("--bundle", metavar="DIR", help="make a run in miniature there instead")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = make_parser().parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        export_again(options)
    except (ConfigError, OSError) as error:
        print(f"export.py: {one_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 5)
    return 0


def export_again(options: argparse.Namespace) -> None:
    """Makes `RUN/export/VERSION`, or a bundle, from the newest checkpoints of a run."""
    run = Path(options.run)
    settings = _settings(run)
    newest = versions(run / "export")[:1]
    version = int(newest[0].name) + 1 if newest else 1
    chosen = {
        "version": version if options.version is None else options.version,
        "average_checkpoints": settings["average_checkpoints"]
        if options.average_checkpoints is None
        else options.average_checkpoints,
    }
    for name, value in chosen.items():
        if value < 1:
            raise ConfigError(f"--{name} is {value}, expected a number from 1 on")
    from transformer_tf.checkpoints import load_average
    from transformer_tf.translator import Translator

    model, tokenizer, decoding = _parts(run, settings)
    count = load_average(run / "checkpoints", model, chosen["average_checkpoints"])
    log(f"exporting the average of {count} checkpoints")
    if options.bundle:
        bundle = Path(options.bundle)
        copy_record(run, bundle, settings)
        translator = Translator(model, tokenizer, decoding, dtype="float16")
        save_checked(translator, bundle / "export" / "1")
    else:
        translator = Translator(model, tokenizer, decoding)
        save_checked(translator, run / "export" / str(chosen["version"]))


def copy_record(run: Path, bundle: Path, settings: dict) -> None:
    """What says where the weights of a bundle come from.

    The directories that the corpus was read from are somebody's own and left out.
    """
    bundle.mkdir(parents=True, exist_ok=True)
    shared = {**settings, "data_dir": None, "manual_dir": None}
    write_settings(bundle / "config.yaml", shared)
    for name in ("vocab.model", "metrics.csv", "run.json"):
        shutil.copyfile(run / name, bundle / name)


def load_run(export: Path) -> tuple["Transformer", "Tokenizer", "Translator"]:
    """The model of an export, with its layers: what a SavedModel does not show.

    Args:
        export: an export in the directory of its run.
    """
    run = export.resolve().parent.parent
    settings = _settings(run)
    from transformer_tf.translator import Translator, load

    model, tokenizer, decoding = _parts(run, settings)
    for weight, value in zip(model.weights, load(export).weights, strict=True):
        weight.assign(value)
    return model, tokenizer, Translator(model, tokenizer, decoding)


def save_checked(translator: "Translator", path: Path, check: bool = True) -> None:
    """Saves a translator, with what a server wants beside it, and looks at it.

    Raises:
        ExportError: it cannot be written, or does not say what the model says.
    """
    from transformer_tf.self_check import self_check
    from transformer_tf.serving import write_serving_files
    from transformer_tf.translator import ExportError

    translator.save(path)
    log(f"saved {path}")
    write_serving_files(path.parent)
    if not check:
        return
    for name, fault in self_check(path, translator):
        log(f"  {name}: {fault or 'ok'}")
        if fault:
            raise ExportError(f"the export {path} is not sound, {name}: {fault}")


def _settings(run: Path) -> dict:
    import yaml

    try:
        text = (run / "config.yaml").read_text(encoding="utf-8")
        settings = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"no run in {run}, expected its config.yaml ({type(error).__name__}); name "
            "a directory that `python train.py` wrote"
        ) from error
    missing = {
        field.name for kind in (ModelConfig, DecodingConfig) for field in fields(kind)
    } - set(settings if isinstance(settings, dict) else {})
    if missing or "average_checkpoints" not in settings:
        raise ConfigError(f"{run}/config.yaml lacks {', '.join(sorted(missing))}")
    return settings


def _parts(
    run: Path, settings: dict
) -> tuple["Transformer", "Tokenizer", DecodingConfig]:
    """A run's model, with new weights, its vocabulary, and how it decodes."""
    from data_pipeline.tokenizer import Tokenizer
    from transformer_tf.model import build_transformer

    tokenizer = Tokenizer.load(run / "vocab.model")
    model = build_transformer(_config(ModelConfig, settings), tokenizer.vocab_size)
    return model, tokenizer, _config(DecodingConfig, settings)


def _config(kind: type, settings: dict):
    return kind(**{field.name: settings[field.name] for field in fields(kind)})


if __name__ == "__main__":
    sys.exit(main())
