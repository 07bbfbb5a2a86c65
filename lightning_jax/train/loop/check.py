"""Checks of what settings name, which need neither JAX nor the agent's own imports.

Sections check their values and `rules` when they are made. The checks here are for files, programs,
packages and variables, before a run starts. The trainer checks limits and devices of the process.
"""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_jax.models.model_files import ModelError, local_path, read_chat_template
from lightning_jax.models.policies import TEACHER
from lightning_jax.rl.config import DistillConfig
from lightning_jax.rollouts.config import ChatModel, JudgeConfig, RewardConfig, require_agent
from lightning_jax.rollouts.rewards.verdicts import read_rubric
from lightning_jax.settings import ConfigError, changed_keys, load_config, read_saved
from lightning_jax.settings.loading import check_reference, find_program
from lightning_jax.settings.paths import named_files
from lightning_jax.settings.schema import PathKind
from lightning_jax.train.config import Config, LearnConfig
from lightning_jax.train.directory import CHECKPOINTS, SETTINGS, STORE, require_run
from lightning_jax.train.sinks import check_sinks
from lightning_jax.train.sinks.otlp_client import check_traces


def check_start(config: Config) -> None:
    """Raise UserError for a run that could not start, as far as that can be told in a moment.

    Files, functions and programs that the settings name must exist, the packages of metric sinks
    must be installed, and the run directory must be usable and hold no checkpoint of other weights.
    """
    check_model(config)
    if config.learn.run is not None:
        changed = changed_keys(Path(config.run_dir) / SETTINGS, config)
        _check_learn(config.learn, config.run_dir, changed, config.distill)
    elif not config.agent.external:
        require_agent(config.agent)
    check_files(config)
    if config.cluster.address is not None:
        importlib.import_module("lightning_jax.cluster.ray_session").require_ray(config.cluster)
    check_sinks(config.metrics.sinks)
    check_traces(config.traces)
    _check_directory(config.run_dir, _changed_weights(config))


def _check_learn(
    learn: LearnConfig, run_dir: str, changed: Sequence[str], distill: DistillConfig
) -> None:
    """Raise ConfigError for settings of a run that cannot learn from stored attempts.

    `changed` are the settings that differ from those of a run that has begun.
    """
    require_run(Path(learn.run or ""), SETTINGS, STORE)
    others = [key for key in changed if key.startswith("learn.") and key != "learn.num_steps"]
    if others:
        raise ConfigError(
            f"run directory {run_dir} already exists and has another {others[0]}; pass another "
            "run_dir.",
            reason="exists",
            key="run_dir",
        )
    if distill.has_teacher:
        raise ConfigError.unsupported(
            "distill",
            "stored rollouts are learned without a teacher; set distill.teacher, "
            "distill.teacher_url and distill.hint to null.",
        )


def check_agent(config: Config) -> None:
    """Raise ConfigError if no agent is named, or a file, function or program does not exist.

    Also refuse a judge whose rubric cannot be used or whose key is not set.
    """
    require_agent(config.agent)
    check_files(config)


def check_files(config: Config) -> None:
    """Raise ConfigError if a file, function, program, rubric or key of a judge does not exist.

    Programs of an agent that only runs in workers elsewhere need not be here.
    """
    check_judges(config.chat_models.values())
    has_other_workers = config.agent.remote_workers or config.cluster.workers > 0
    needs_program = bool(config.agent.workers) or not has_other_workers
    for key, kind, value in named_files(config):
        if kind.is_reference and isinstance(value, str) and ":" in value:
            check_reference(value, kind)
        if kind is PathKind.PROGRAM and needs_program:
            find_program(value, key)
        if kind is PathKind.COMMAND and needs_program:
            find_program(value[0], key)


def read_rewards(file: Path) -> dict[str, RewardConfig]:
    """Return the section `rewards` of a YAML file. Raises ConfigError if it has none."""
    rewards = load_config(Config, [str(file)], only=["rewards"]).rewards
    if not rewards:
        raise ConfigError.missing("rewards", f"{file} has no rewards; add a section rewards.")
    return rewards


def check_judges(models: Iterable[ChatModel]) -> None:
    """Raise ConfigError for a rubric that cannot be used, or a key that is not set."""
    for model in models:
        _ = model.key  # raises if it is not set
        if isinstance(model, JudgeConfig) and model.rubric:
            read_rubric(model.rubric)


def check_model(config: Config) -> None:
    """Raise ModelError if a file or folder with weights or the chat template does not exist."""
    bases = {f"policies.{name}.base": policy.base for name, policy in config.policies.items()}
    teacher = config.policy_table.row(TEACHER)
    bases["distill.teacher"] = teacher and teacher.base
    for key, name in {"model.name": config.model.name, **bases}.items():
        if name is None:
            continue
        try:
            local_path(name)
        except ModelError as error:
            raise ModelError(f"{key}: {error}", reason=error.reason, key=error.key) from error
    if config.model.chat_template is not None:
        read_chat_template(config.model.chat_template)


def _check_directory(run_dir: str, changed: Sequence[str]) -> None:
    """Raise ConfigError if the run's directory is none, or of a run with other weights.

    `changed` are settings of the weights that differ from those of a run that has begun.
    """
    directory = Path(run_dir)
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"run_dir is {run_dir}, but {path} is a file; set another run_dir.",
                reason="not_a_directory",
                key="run_dir",
            )
    checkpoints = directory / CHECKPOINTS
    if changed and checkpoints.is_dir() and any(p.name.isdecimal() for p in checkpoints.iterdir()):
        raise ConfigError.mismatch(
            changed[0],
            f"{directory} holds a run with another {', '.join(changed)}, whose checkpoint does "
            "not fit; use the settings that it began with, or another run_dir.",
        )


def _changed_weights(config: Config) -> list[str]:
    """Return the changed settings that decide which weights a checkpoint holds."""
    saved = Path(config.run_dir) / SETTINGS
    if not saved.exists():
        return []
    changed = [key for key in changed_keys(saved, config) if key.startswith("model.lora.")]
    if not config.model.lora.rank and "model.lora.rank" not in changed:
        changed = []  # without adapters the rest has no effect
    old = read_saved(saved).get("policies") or {}
    return changed + ["policies"] * (set(old) != set(config.policies))
