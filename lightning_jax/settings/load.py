"""Loading of settings from layers, checked by a schema."""

from collections.abc import Sequence
from functools import reduce
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from lightning_jax.settings.errors import Argument, ConfigError, as_config_error, is_secret
from lightning_jax.settings.layers import read_layers
from lightning_jax.settings.saved import flatten
from lightning_jax.settings.schema import HIDDEN, defaults, from_plain, plain

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
    layers = read_layers(argv, schema)
    merged = reduce(_merged, (layer.settings for layer in layers), {})
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
        raise ConfigError(message, reason="missing", key=unset[0])
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
