"""Files in a run's directory, and what can be told from them without JAX."""

import json
from pathlib import Path

from lightning_jax.settings import ConfigError

SETTINGS, SOURCES, METRICS = "config.yaml", "sources.json", "metrics.jsonl"
STORE, CHECKPOINTS = "store.sqlite", "checkpoints"
LOCK, ENDED = "run.lock", "ended.json"
SINKS_OPENED = "sinks.json"  # id of the run for metric sinks, and those that know it
EXPORTED = "policy.json"  # step of the weights in `policy`; absent while they are written


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


def trained_step(directory: Path) -> int:
    """Return the step of the run's trained policy. Raises ConfigError if there is none."""
    exported = directory / EXPORTED
    if not exported.is_file():
        fact = "has no trained policy yet" if directory.is_dir() else "does not exist"
        fix = "let the run end" if directory.is_dir() else "check the path"
        raise ConfigError(f"run {directory} {fact}; {fix}.", reason="not_found", key=str(directory))
    return json.loads(exported.read_text())["step"]
