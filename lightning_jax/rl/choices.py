"""Functions that the settings `loss`, `credit`, `baseline` and `correction` choose.

A setting is the name of a constructor in the module's table, FILE:FUNCTION, or from Python the
function itself. docs/algorithms.md says what each function receives and returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.config import AlgorithmConfig, is_custom
from lightning_jax.settings.loading import load_function


def choose(
    algorithm: AlgorithmConfig,
    setting: str,
    constructors: Mapping[str, Callable[[AlgorithmConfig], Callable[..., Any]]],
) -> Callable[..., Any]:
    """Return the function that `algorithm.<setting>` chooses.

    Raises ConfigError if FILE:FUNCTION cannot be loaded.
    """
    chosen = getattr(algorithm, setting)
    if callable(chosen):
        return chosen
    return load_function(chosen) if is_custom(chosen) else constructors[chosen](algorithm)


def load_choices(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the settings with functions in place of FILE:FUNCTION.

    Later edits of a file then change nothing. Raises ConfigError like `choose`.
    """
    chosen = {s: getattr(algorithm, s) for s in ("loss", "credit", "baseline", "correction")}
    named = {s: v for s, v in chosen.items() if isinstance(v, str) and is_custom(v)}
    return replace(algorithm, **{s: load_function(v) for s, v in named.items()})


def check_shape(
    function: Callable[..., Any], setting: str, values: Any, shape: tuple[int, ...]
) -> None:
    """Raise ValueError if the result of a chosen function has another shape."""
    if np.shape(values) != shape:
        raise wrong_result(function, setting, f"shape {np.shape(values)}", f"{shape}")


def wrong_result(
    function: Callable[..., Any], setting: str, returned: str, expected: str
) -> InvalidValue:
    """Return the error for a chosen function whose result cannot be used."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return InvalidValue.mismatch(
        f"algorithm.{setting}",
        f"algorithm.{setting} {name} returned {returned}; expected {expected}",
    )
