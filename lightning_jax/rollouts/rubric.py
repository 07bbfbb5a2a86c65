"""Rubric of a judge: a YAML file of weighted criteria."""

import math
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lightning_jax.settings import ConfigError


class Example(BaseModel):
    """Text and the score that it deserves."""

    model_config = ConfigDict(extra="forbid")
    text: str
    score: int


class Criterion(BaseModel):
    """Question about an attempt, answered by a number of its scale."""

    model_config = ConfigDict(extra="forbid")
    text: str
    weight: float = Field(allow_inf_nan=False)  # below 0: high scores are bad
    scale: tuple[int, int] = (0, 4)
    examples: tuple[Example, ...] = ()


class Rubric(BaseModel):
    """Criteria by name."""

    model_config = ConfigDict(extra="forbid")
    criteria: dict[str, Criterion] = Field(min_length=1)

    def value(self, scores: Mapping[str, int]) -> float:
        """Return the weighted mean of the scores, each as a share of its scale.

        With weights above 0 it is between 0 and 1.
        """
        total = math.fsum(abs(criterion.weight) for criterion in self.criteria.values())
        parts = []
        for name, criterion in self.criteria.items():
            low, high = criterion.scale
            parts.append(criterion.weight * (scores[name] - low) / (high - low))
        return math.fsum(parts) / total


def read_rubric(path: str) -> Rubric:
    """Return the rubric in a YAML file. Raises ConfigError if it has none that can be used."""
    try:
        rubric = Rubric.model_validate(yaml.safe_load(Path(path).read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _bad_rubric(path, " ".join(str(error).split()), "not_readable") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        reason = "missing" if first["type"] == "missing" else "invalid"
        raise _bad_rubric(path, f"{key}: {first['msg'].lower()}", reason) from error
    for name, criterion in rubric.criteria.items():
        low, high = criterion.scale
        if not low < high <= low + 100:
            fact = f"the scale of {name} is {low} to {high}"
            raise _bad_rubric(path, fact, "invalid")
        if any(not low <= example.score <= high for example in criterion.examples):
            raise _bad_rubric(path, f"an example of {name} is outside its scale", "invalid")
    if not any(criterion.weight for criterion in rubric.criteria.values()):
        raise _bad_rubric(path, "all weights are 0", "missing")
    return rubric


def _bad_rubric(path: str, fact: str, reason: str) -> ConfigError:
    return ConfigError(
        f"rubric {path} cannot be used ({fact}); expected criteria by name, each with a text, a "
        "weight and a scale such as [0, 4].",
        reason=reason,
        key=path,
    )
