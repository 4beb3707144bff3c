"""How do the fields of a configuration become flags and keys of a file?

One name everywhere: the field `d_model` is the flag `--d_model` and the key `d_model`.
A file is flags written down: it is read as such, before those of the command.
"""

import argparse
import dataclasses
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Iterable
from typing import Any

import yaml

from transformer_tf.config import ConfigError


class OneLineErrors:
    """For an argument parser: a mistake is one line, not the whole usage."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


class OneLineParser(OneLineErrors, argparse.ArgumentParser):
    """For the flags that are no fields of a configuration."""


def one_line(error: object) -> str:
    """What an error says, without line breaks."""
    return " ".join(str(error).split())


def make_parser(description: str | None, groups: dict[str, Any]):
    """An argument parser with a flag for each field of the groups.

    Args:
        description: what `--help` says first.
        groups: name -> dataclass instance whose values are the defaults. The parsed
            arguments have an attribute of that name with a new instance.
    """
    from simple_parsing import ArgumentParser

    class Parser(OneLineErrors, ArgumentParser):
        pass

    parser = Parser(
        description=description,
        allow_abbrev=False,
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    for name, default in groups.items():
        parser.add_arguments(type(default), dest=name, default=default)
    return parser


def file_flags(path: str, groups: Iterable[Any]) -> list[str]:
    """The flags that a flat YAML file of `field: value` lines stands for.

    Raises:
        ConfigError: the file cannot be read, or a key is no field of the groups.
    """
    try:
        with open(path, encoding="utf-8") as file:
            settings = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds no `field: value` lines")
    fields = settings_of(groups)
    for key in settings:
        if key not in fields:
            raise ConfigError(f"{path} sets {key!r}, which is no field; see --help")
    return [f"--{key}={value}" for key, value in settings.items() if value is not None]


def settings_of(groups: Iterable[Any]) -> dict[str, Any]:
    """Every field of every group by its name."""
    return {k: v for group in groups for k, v in dataclasses.asdict(group).items()}
