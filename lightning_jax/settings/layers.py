"""Layers of settings: YAML files, the files they stand on, and `dotted.key=value`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_jax.settings.errors import Argument, ConfigError, one_sentence
from lightning_jax.settings.paths import below, map_paths


@dataclass(frozen=True)
class Layer:
    """Settings that one argument gives, nested and without resolved references."""

    argument: Argument
    settings: dict[str, Any]


def read_layers(argv: Sequence[str], schema: type) -> list[Layer]:
    """Return a layer for each argument. The base files of a file come before it.

    Paths in a file are relative to its folder, and `~` is the user's. Raises ConfigError.
    """
    found: list[Layer] = []
    for argument in map(Argument, argv):
        if argument.is_setting:
            found.append(Layer(argument, _read(argument)))
        else:
            found += _file_layers(argument, [layer.argument.text for layer in found], schema)
    return found


def _read(argument: Argument) -> dict[str, Any]:
    """Return the settings of an argument. Raises ConfigError if it is not readable."""
    text = argument.text
    if not argument.is_setting and not Path(text).is_file():
        raise ConfigError(
            f"config {text} does not exist; expected a YAML file or key=value. Check the path.",
            reason="not_found",
            key=text,
        )
    try:
        read = OmegaConf.from_dotlist([text]) if argument.is_setting else OmegaConf.load(text)
        settings = _from_home(OmegaConf.to_container(read))
    except (YAMLError, OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        message = f"{argument} is not readable YAML: {one_sentence(error)}"
        raise ConfigError(message, reason="malformed", key=argument.key) from error
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{argument} is a list or a value; expected named settings, such as `num_steps: 20`.",
            reason="wrong_type",
            key=argument.key,
        )
    return settings


def _from_home(node: Any) -> Any:
    """Expand paths that begin with ~, because no shell has done so."""
    if isinstance(node, dict):
        return {str(key): _from_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_from_home(value) for value in node]
    is_path = isinstance(node, str) and node.startswith("~/")
    return str(Path(node).expanduser()) if is_path else node


def _file_layers(argument: Argument, before: Sequence[str], schema: type) -> list[Layer]:
    """Return a file and its base files, lowest first, without the files in `before`.

    A cycle of bases ends where it returns to a file.
    """
    path, settings = argument.text, _read(argument)
    base = settings.pop("base", None)
    layer = Layer(argument, map_paths(settings, schema, below(Path(path).parent)))
    if base is None:
        return [layer]
    under = Path(path).parent / str(base)
    if not under.is_file():
        raise ConfigError(
            f"config {path} has base: {base}, but {under} does not exist; the path is relative to "
            "the config.",
            reason="not_found",
            key=str(under),
        )
    if under.resolve() in {Path(name).resolve() for name in before}:
        return [layer]
    return [*_file_layers(Argument(str(under)), [*before, path], schema), layer]
