"""Which model answers? An export by name, the newest of a run, or the bundled one."""

from pathlib import Path

from transformer_tf.config import ConfigError

DEFAULT_RUN = Path("runs/ja_en")
BUNDLED = Path(__file__).parent / "pretrained" / "ja_en"  # a run in miniature


def find_export(model: str | Path | None = None) -> Path:
    """The SavedModel to translate with.

    Args:
        model: a run directory, its `export/`, or one export. Without it the default
            run, and where that has not exported yet, the model that comes along.

    Raises:
        ConfigError: there is none.
    """
    for place in [Path(model)] if model else [DEFAULT_RUN, BUNDLED]:
        for export in [place, *versions(place), *versions(place / "export")]:
            if (export / "saved_model.pb").is_file():
                return export
    raise ConfigError(
        f"no model in {model or DEFAULT_RUN}, expected the directory of a finished "
        "run: run `python train.py` first, or name one with --model"
    )


def versions(base_path: Path) -> list[Path]:
    """The numbered exports in a directory, newest first."""
    paths = [path for path in base_path.glob("[0-9]*") if path.name.isdecimal()]
    return sorted(paths, key=lambda path: int(path.name), reverse=True)
