"""Shared parts of commands that begin a run from the stored rollouts of another one."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lightning_jax.settings import load_config
from lightning_jax.train.check import check_new
from lightning_jax.train.config import Config
from lightning_jax.train.directory import SETTINGS


def settings_of_new_run(source: Path, suffix: str, settings: Sequence[str]) -> Config:
    """Return the settings of the run in `source`, with these, for a run directory beside it.

    Raises ConfigError if no new run can have them.
    """
    beside = f"run_dir={source.with_name(source.resolve().name + suffix)}"
    config = load_config(Config, [str(source / SETTINGS), beside, *settings])
    check_new(config)
    return config


def settings_of_offline_run(source: Path, suffix: str, settings: Sequence[str]) -> Config:
    """Return the same for a run whose policy steps use stored samples.

    These come from weights that differ more and more from those in training. PPO's clip against the
    policy that sampled would ignore most tokens, so by default the ratio is to the trainer's own
    `old` policy, and a truncated importance weight corrects for the rest. A correction of the run
    stays. DPO has no ratio.
    """
    config = settings_of_new_run(source, suffix, settings)
    if config.algorithm.loss == "dpo":
        return config
    changes = ["algorithm.proximal=old"]
    config = settings_of_new_run(source, suffix, [*changes, *settings])
    if config.algorithm.correction == "none" and config.algorithm.proximal == "old":
        changes.append("algorithm.correction=truncate")
    return settings_of_new_run(source, suffix, [*changes, *settings])


def print_policy(console: Console, run_dir: str) -> None:
    """Say where the new run's policy is, and how to evaluate it."""
    console.print(f"policy: {run_dir}/policy", markup=False)
    console.print(f"next: lightning-jax eval --run {shlex.quote(run_dir)}", markup=False)
