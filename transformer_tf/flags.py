"""How do the fields of a configuration become flags and keys of a file?

One name everywhere: the field `d_model` is the flag `--d_model` and the key `d_model`.
"""

import dataclasses
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Sequence
from typing import Any

import yaml

from transformer_tf.config import ConfigError


class OneLineErrors:
    """For an argument parser: a mistake is one line, not the whole usage."""

    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


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


def with_file(groups: dict[str, Any], path: str) -> dict[str, Any]:
    """The groups with what a flat YAML file of `field: value` sets.

    Raises:
        ConfigError: the file cannot be read, or a key or a value is wrong.
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
    groups = dict(groups)
    for key, value in settings.items():
        name = _owner(groups, key, path)
        value = _converted(getattr(groups[name], key), key, value, path)
        groups[name] = dataclasses.replace(groups[name], **{key: value})
    return groups


def settings_of(groups: Sequence[Any]) -> dict[str, Any]:
    """Every field of every group by its name."""
    return {k: v for group in groups for k, v in dataclasses.asdict(group).items()}


def _owner(groups: dict[str, Any], key: str, path: str) -> str:
    for name, group in groups.items():
        if key in {field.name for field in dataclasses.fields(group)}:
            return name
    raise ConfigError(f"{path} sets {key!r}, which is no field; --help lists them")


def _converted(default: Any, key: str, value: Any, path: str) -> Any:
    """YAML reads 1e-4 as text and 1 as an integer; the default knows what is meant."""
    kind = str if default is None else type(default)
    if isinstance(value, kind) or (value is None and default is None):
        return value
    try:
        if kind is float or (kind is int and float(value) == int(float(value))):
            return kind(float(value))
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{path} sets {key} to {value!r}, expected {kind.__name__}")
