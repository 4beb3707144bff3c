"""Trains a translator: `python train.py`, and the same command again goes on.

Here text and model meet: corpus -> vocabulary -> ids -> batches -> updates -> average
of the last checkpoints -> SavedModel -> score on the test set.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.corpus import DataConfig
from session import Options, train
from transformer_tf.cluster import read_task
from transformer_tf.config import PRESETS, DecodingConfig
from transformer_tf.flags import OneLineParser, file_flags, make_parser, one_line
from transformer_tf.paper import explain_config
from transformer_tf.run_directory import RunDirectory


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
    """Returns the exit code: 0 done, 2 configuration, 3 data, 4 diverged, 5 disk, 6
    another worker lost, 130 and 143 interrupted after saving."""
    try:
        options = parse_options(argv)
        if options.explain_config:
            print(explain_config(options.preset, options.settings()))
            return 0
        task = read_task(options.training.strategy)
        run = RunDirectory(
            options.output_dir,
            options.settings(),
            options.fresh,
            writes=task.index == 0,
        )
        # Where workers are lost, TensorFlow would tell the story once more.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "23"[task.workers > 1])
        return train(options, run)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        exit_code = getattr(error, "exit_code", 5 if isinstance(error, OSError) else 0)
        if not exit_code:
            raise
        print(f"train.py: {one_line(error)}", file=sys.stderr)
        return exit_code


if __name__ == "__main__":
    sys.exit(main())
