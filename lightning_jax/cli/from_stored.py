"""Shared parts of commands that begin a run from the stored rollouts of another one."""

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


def print_policy(console: Console, run_dir: str) -> None:
    """Say where the new run's policy is, and how to evaluate it."""
    console.print(f"policy: {run_dir}/policy", markup=False)
    console.print(f"next: lightning-jax eval --run {run_dir}", markup=False)
