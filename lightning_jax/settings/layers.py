"""Layers of settings: YAML files, the files they stand on, and `dotted.key=value`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from lightning_jax.settings.errors import Argument, ConfigError, config_errors
from lightning_jax.settings.paths import below, map_paths


@dataclass(frozen=True)
class Layer:
    """Settings that one argument gives."""

    argument: Argument
    settings: Any


def read_layers(argv: Sequence[str], schema: type) -> list[Layer]:
    """Return a layer for each argument. The base files of a file come before it.

    Paths in a file are relative to its folder, and `~` is the user's. Raises ConfigError.
    """
    found: list[Layer] = []
    for argument in map(Argument, argv):
        if argument.is_setting:
            with config_errors(argument):
                settings = OmegaConf.from_dotlist([argument.text])
            found.append(Layer(argument, _mapped(settings, schema, None)))
        else:
            found += _file_layers(argument, [layer.argument.text for layer in found], schema)
    return found


def _mapped(settings: Any, schema: type, folder: Path | None) -> Any:
    """Return settings whose paths are relative to this directory, given a file's folder."""
    if not isinstance(settings, DictConfig):
        return settings  # merging raises
    plain = _from_home(OmegaConf.to_container(settings))
    return OmegaConf.create(map_paths(plain, schema, below(folder)) if folder else plain)


def _from_home(node: Any) -> Any:
    """Expand paths that begin with ~, because no shell has done so."""
    if isinstance(node, dict):
        return {key: _from_home(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_from_home(value) for value in node]
    is_path = isinstance(node, str) and node.startswith("~/")
    return str(Path(node).expanduser()) if is_path else node


def _file_layers(argument: Argument, before: Sequence[str], schema: type) -> list[Layer]:
    """Return a file and its base files, lowest first, without the files in `before`.

    A cycle of bases ends where it returns to a file.
    """
    path = argument.text
    with config_errors(argument):
        settings = _load_yaml(path)
        base = settings.pop("base", None) if isinstance(settings, DictConfig) else None
        layer = Layer(argument, _mapped(settings, schema, Path(path).parent))
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


def _load_yaml(path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(
            f"config {path} does not exist; expected a YAML file or key=value. Check the path.",
            reason="not_found",
            key=path,
        )
    try:
        return OmegaConf.load(path)
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        message = f"config {path} is not readable YAML: {error}"
        raise ConfigError(message, reason="malformed", key=path) from error
