"""Loading of settings from layers, checked by a schema.

Layers are YAML files, the base files of these, and `dotted.key=value`. OmegaConf is imported where
it is used, because --help and wrong flags need only the types of settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from yaml import YAMLError

from lightning_jax.settings.errors import (
    Argument,
    ConfigError,
    as_config_error,
    is_secret,
    one_sentence,
)
from lightning_jax.settings.paths import below, map_paths
from lightning_jax.settings.saved import flatten
from lightning_jax.settings.schema import HIDDEN, defaults, from_plain, has_names, plain

T = TypeVar("T")


def load_config(schema: type[T], argv: Sequence[str], *, only: Sequence[str] | None = None) -> T:
    """Load settings from YAML paths and `dotted.key=value` pairs; later arguments win.

    A file may name a base file, relative to itself (`base: spider_cpu.yaml`). The base is read
    first, unless `argv` already named it. Files, folders and functions in a file are relative to
    its folder, those of key=value to the working directory. `only` names the sections to read; the
    others keep their defaults. A reader of an older run then ignores settings it does not use and
    secrets that were not saved.

    Raises ConfigError for an invalid setting, or if a file requires a key (`key: ???`) that is not
    set.
    """
    return load_with_derived(schema, argv, only=only)[0]


def load_with_derived(
    schema: type[T], argv: Sequence[str], *, only: Sequence[str] | None = None
) -> tuple[T, dict[str, Any]]:
    """Load settings like `load_config`. Return also the values, by key, that follow from others."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    layers = read_layers(argv, schema)
    merged = reduce(_merged, (layer.settings for layer in layers), {})
    _check_removals(layers, schema)
    settings = {key: value for key, value in merged.items() if only is None or key in only}

    def argument_of(key: str) -> Argument | None:
        """Return the last argument that sets the key or something in it."""
        setters = (
            layer.argument
            for layer in reversed(layers)
            if any(f"{name}.".startswith(f"{key}.") for name in flatten(layer.settings))
        )
        return next(setters, None)

    # A reader of a run does not need its secrets.
    missing = [key for key, value in flatten(settings).items() if value == HIDDEN]
    if unset := sorted(key for key in missing if only is None or not is_secret(key)):
        message = f"{unset[0]} is required; add {unset[0]}=VALUE."
        raise ConfigError.missing(unset[0], message)
    try:
        # References also lead to defaults.
        values = OmegaConf.to_container(
            OmegaConf.create(_merged(defaults(schema), settings)), resolve=True
        )
        config = from_plain(schema, values)
    except (OmegaConfBaseException, ValidationError) as error:
        raise as_config_error(error, schema, argument_of) from error
    unset_values = {key for key, value in flatten(values).items() if value is None}
    derived = {key: value for key, value in flatten(plain(config)).items() if key in unset_values}
    return config, {key: value for key, value in derived.items() if value is not None}


def _merged(low: Any, high: Any) -> Any:
    """Return nested settings with those of `high` over those of `low`, which it may require."""
    if isinstance(low, dict) and isinstance(high, dict):
        return low | {name: _merged(low.get(name, HIDDEN), value) for name, value in high.items()}
    return low if high == HIDDEN else high


def _check_removals(layers: Sequence["Layer"], schema: type) -> None:
    """Raise ConfigError for a named entry that is null and that no earlier layer sets."""
    tables = {field.name for field in fields(schema) if has_names(field.type)}
    names: set[str] = set()
    for layer in layers:
        for table in tables & layer.settings.keys():
            entries = layer.settings[table]
            if not isinstance(entries, dict):
                continue  # the schema refuses it
            keys = {f"{table}.{name}": entry for name, entry in entries.items()}
            for key, entry in keys.items():
                if entry is None and key not in names:
                    message = f"{layer.argument} removes {key}, which is not set; correct the name."
                    raise ConfigError.not_found(key, message)
            names |= keys.keys()


@dataclass(frozen=True)
class Layer:
    """Settings that one argument gives, nested and without resolved references."""

    argument: Argument
    settings: dict[str, Any]


def read_layers(argv: Sequence[str], schema: type) -> list[Layer]:
    """Return a layer for each argument. The base files of a file come before it.

    Paths in a file are relative to its folder, and `~` is the user's. Raises ConfigError.
    """
    layers: list[Layer] = []
    for argument in map(Argument, argv):
        if argument.is_setting:
            layers.append(Layer(argument, _read(argument)))
        else:
            layers += _file_layers(argument, [layer.argument.text for layer in layers], schema)
    return layers


def _read(argument: Argument) -> dict[str, Any]:
    """Return the settings of an argument. Raises ConfigError if it is not readable."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = argument.text
    if not argument.is_setting and not Path(text).is_file():
        raise ConfigError.not_found(
            text,
            f"config {text} does not exist; expected a YAML file or key=value. Check the path.",
        )
    try:
        read = OmegaConf.from_dotlist([text]) if argument.is_setting else OmegaConf.load(text)
        settings = _from_home(OmegaConf.to_container(read))
    except (YAMLError, OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        message = f"{argument} is not readable YAML: {one_sentence(error)}"
        raise ConfigError.malformed(argument.key, message) from error
    if not isinstance(settings, dict):
        raise ConfigError.wrong_type(
            argument.key,
            f"{argument} is a list or a value; expected named settings, such as `num_steps: 20`.",
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
        raise ConfigError.not_found(
            str(under),
            f"config {path} has base: {base}, but {under} does not exist; the path is relative to "
            "the config.",
        )
    if under.resolve() in {Path(name).resolve() for name in before}:
        return [layer]
    return [*_file_layers(Argument(str(under)), [*before, path], schema), layer]
