"""Loading of settings from layers, checked by a schema."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_jax.errors import FieldError, InvalidValue
from lightning_jax.schema import inner_section
from lightning_jax.settings.errors import (
    ConfigError,
    config_errors,
    error_fields,
    is_secret,
    one_sentence,
)
from lightning_jax.settings.layers import read_layers

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
    merged, given = OmegaConf.structured(schema), OmegaConf.create()
    for layer in read_layers(argv, schema):
        with config_errors(layer.argument, schema):
            settings = layer.settings
            if only is not None:
                settings = OmegaConf.masked_copy(settings, list(only))
            merged = OmegaConf.merge(merged, settings)
            given = OmegaConf.merge(given, settings)
    try:
        # `merged` has defaults for missing keys. A reader of a run does not need its secrets.
        missing = OmegaConf.missing_keys(given)
        unset = sorted(key for key in missing if only is None or not is_secret(key))
        if not unset:
            config = _to_object(merged)
            return config, dict(_derived(config, merged))
    except OmegaConfBaseException as error:
        raise ConfigError(one_sentence(error), **error_fields(error)) from error
    except InvalidValue as error:
        raise ConfigError(str(error), reason=error.reason, key=error.key) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    message = f"{unset[0]} is required; add {unset[0]}=VALUE."
    raise ConfigError(message, reason="missing", key=unset[0])


def _to_object(node: Any, key: str = "") -> Any:
    """Convert the section at `key`.

    Raises FieldError with the full key of a field that is invalid.
    """
    try:
        return OmegaConf.to_object(node)
    except FieldError as error:
        for name in node:
            if OmegaConf.is_dict(node[name]):  # its own error has the longer key
                _to_object(node[name], f"{key}.{name}" if key else str(name))
        if not key:
            raise
        raise FieldError(f"{key}.{error}", reason=error.reason, key=f"{key}.{error.key}") from error


def _derived(section: Any, merged: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the settings of a section that are None as given, and are not in the section."""
    found: list[tuple[str, Any]] = []
    for field in fields(section):
        value, as_given = getattr(section, field.name), merged[field.name]
        inner = inner_section(field.type)
        if as_given is None and value is not None:
            found.append((prefix + field.name, value))
        elif inner and not inner.is_dict and value is not None:
            found += _derived(value, as_given, f"{prefix}{field.name}.")
    return found
