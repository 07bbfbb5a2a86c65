"""Tests of sections: which values a type allows, and the errors for others."""

import math
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Le
from coded import raises_coded

from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import FieldError
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.settings.schema import Count, Finite, FinitePositive, Section, describe, section
from lightning_jax.train.config import Config


@section
class _Example(Section):
    size: Count = 1
    limit: Count | None = None
    share: Annotated[float, Ge(0), Le(1)] = 0.5
    score: Finite = 0.0
    mode: Literal["fast", "exact"] | None = "fast"
    text: str | None = None


@pytest.mark.parametrize(
    "values",
    [
        {"size": 3, "limit": 1, "share": 0, "score": -1e30, "mode": "exact"},
        {"limit": None, "share": 1, "mode": None, "text": "any"},
    ],
)
def test_allowed_values_are_kept(values: dict[str, Any]) -> None:
    section = _Example(**values)
    assert {name: getattr(section, name) for name in values} == values


@pytest.mark.parametrize(
    ("name", "value", "reason", "expected"),
    [
        ("size", 0, "out_of_range", "at least 1"),
        ("size", None, "wrong_type", "an integer"),
        ("limit", 0, "out_of_range", "at least 1"),
        ("share", -0.1, "out_of_range", "at least 0"),
        ("share", 1.1, "out_of_range", "at most 1"),
        ("share", math.nan, "out_of_range", "at most 1"),
        ("score", math.inf, "out_of_range", "a finite number"),
        ("score", math.nan, "out_of_range", "a finite number"),
        ("mode", "slow", "unknown", "'fast' or 'exact'"),
    ],
)
def test_other_values_are_refused(name: str, value: Any, reason: str, expected: str) -> None:
    with raises_coded(FieldError, reason, name) as caught:
        _Example(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; expected {expected}."


def test_descriptions_name_bounds_and_choices() -> None:
    assert describe(FinitePositive) == "above 0 and finite"
    assert describe(Literal["a", "b", "c"]) == "a, b or c"
    assert describe(str) == ""


def test_types_are_checked_before_rules_between_fields() -> None:
    with raises_coded(FieldError, "out_of_range", "clip_low"):
        AlgorithmConfig(clip_low=-1.0, correction_high=0.0)
    with raises_coded(FieldError, "conflict", "correction_high"):
        AlgorithmConfig(correction_high=0.4)


def test_a_copy_with_other_values_is_checked_again() -> None:
    with raises_coded(FieldError, "out_of_range", "serve.slots"):
        replace(Config(), serve={"slots": 0})  # pyright: ignore[reportArgumentType]
    with raises_coded(FieldError, "conflict", "batch.row_len"):
        replace(Config(), batch=BatchConfig(row_len=16))
    with raises_coded(FieldError, "unknown_key", "slotz"):
        ServeConfig(slotz=1)  # pyright: ignore[reportCallIssue]
