"""Files in a run's directory, and what can be told from them without JAX."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_jax.settings import ConfigError
from lightning_jax.settings.paths import absolute_paths
from lightning_jax.system.text import in_one_line
from lightning_jax.train.config import Config

SETTINGS, SOURCES, METRICS = "config.yaml", "sources.json", "metrics.jsonl"
STORE, CHECKPOINTS = "store.sqlite", "checkpoints"
REFERENCE = "reference"  # weights that a KL is measured to
WARMUP_BEST = "warmup_best"  # weights of the best probe while a warm-up runs
LOCK, ENDED = "run.lock", "ended.json"
SINKS_OPENED = "sinks.json"  # id of the run for metric sinks, and those that know it
PROMPTS = "prompts.yaml"  # those that searches chose, by step
EXPORTED = "policy.json"  # step of the weights in `policy`; absent while they are written


def with_fixed_paths(config: Config) -> Config:
    """Return settings whose paths lead to the same files if foreign code changes the directory."""
    return replace(absolute_paths(config), run_dir=os.path.abspath(config.run_dir))


def require_run(directory: Path, *names: str) -> None:
    """Raise ConfigError unless this is the directory of a run, with files of these names."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is no directory; expected the directory of a run. Check the path.",
            reason="not_found",
            key=str(directory),
        )
    for name in names:
        if not (directory / name).is_file():
            raise ConfigError(
                f"{directory} has no {name}; expected the directory of a run. Check the path.",
                reason="incomplete",
                key=str(directory / name),
            )


def newest_checkpoint(directory: Path) -> int:
    """Return the step of the run's newest checkpoint, or -1 if it has none."""
    # A checkpoint that is being written has another name.
    names = (path.name for path in (directory / CHECKPOINTS).glob("*"))
    return max((int(name) for name in names if name.isdigit()), default=-1)


def exported_step(directory: Path) -> int | None:
    """Return the step of the weights that a run exported, or None if it has exported none.

    Raises ConfigError if the file that says so is damaged.
    """
    path = directory / EXPORTED
    try:
        return int(json.loads(path.read_text())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({in_one_line(repr(error))}); delete it to use the run's newest "
            "checkpoint.",
            reason="malformed",
            key=str(path),
        ) from error


@dataclass(frozen=True)
class TrainedWeights:
    """Weights of a run on disk: its exported policies, or a checkpoint."""

    step: int
    path: Path
    is_exported: bool


def find_weights(directory: Path) -> TrainedWeights:
    """Return the policy that a run exported, or its newest checkpoint if it has not ended.

    Raises ConfigError if there is neither.
    """
    if (step := exported_step(directory)) is not None:
        return TrainedWeights(step, directory / "policy", is_exported=True)
    if (step := newest_checkpoint(directory)) >= 0:
        return TrainedWeights(step, directory / CHECKPOINTS / str(step), is_exported=False)
    fact, fix = "does not exist", "check the path"
    if directory.is_dir():
        fact = "has neither a trained policy nor a checkpoint yet"
        fix = "let it end, stop it with Ctrl-C after a step, or lower checkpoint.every"
    raise ConfigError(f"run {directory} {fact}; {fix}.", reason="not_found", key=str(directory))
