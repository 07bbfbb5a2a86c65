"""Checks of a run's settings that need neither JAX nor the agent's own imports."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_jax.cluster.ray_session import require_ray
from lightning_jax.loading import check_reference, find_program
from lightning_jax.models.formats.names import ModelError, local_path, read_chat_template
from lightning_jax.rollouts.config import key_of, require_agent
from lightning_jax.schema import PathKind, inner_section, path_kind
from lightning_jax.settings import ConfigError, changed_keys, read_saved
from lightning_jax.train.config import Config
from lightning_jax.train.directory import CHECKPOINTS, SETTINGS
from lightning_jax.train.sinks import check_sinks


def check_start(config: Config) -> None:
    """Raise UserError for a run that could not start, as far as that can be told in a moment.

    Files, functions and programs that the settings name must exist, the packages of metric sinks
    must be installed, and the run directory must be usable and hold no checkpoint of other weights.
    """
    check_model(config)
    if not config.agent.external:
        require_agent(config.agent)
    check_files(config)
    require_ray(config.cluster)
    check_sinks(config.metrics.sinks)
    _check_directory(config)


def check_new(config: Config) -> None:
    """Raise ConfigError if the run directory exists or the policies cannot be trained."""
    if Path(config.run_dir).exists():
        raise ConfigError(
            f"run directory {config.run_dir} already exists; pass another run_dir.",
            reason="exists",
            key="run_dir",
        )
    if config.policies and not config.model.lora.rank:
        raise ConfigError(
            "this run has policies with weights of their own, which cannot learn from stored "
            "attempts; set model.lora.rank.",
            reason="unsupported",
            key="policies",
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
    check_judges(config)
    has_other_workers = config.agent.remote_workers or config.cluster.workers > 0
    needs_program = bool(config.agent.workers) or not has_other_workers
    for key, kind, value in named_files(config):
        if kind is PathKind.FUNCTION and isinstance(value, str) and ":" in value:
            check_reference(value)
        if kind is PathKind.PROGRAM and needs_program:
            find_program(value, key)
        if kind is PathKind.COMMAND and needs_program:
            find_program(value[0], key)


def check_judges(config: Config) -> None:
    """Raise ConfigError for a judge whose rubric cannot be used or whose key is not set."""
    for reward in config.rewards.values():
        if reward.judge:
            key_of(reward.judge)
            if reward.judge.rubric:
                from lightning_jax.rollouts.rewards.verdicts import read_rubric  # imports pydantic

                read_rubric(reward.judge.rubric)


def check_model(config: Config) -> None:
    """Raise ModelError if a file or folder with weights or the chat template does not exist."""
    bases = {f"policies.{name}.base": policy.base for name, policy in config.policies.items()}
    models = {"model.name": config.model.name, "distill.teacher": config.teacher_model, **bases}
    for key, name in models.items():
        if name is None:
            continue
        try:
            local_path(name)
        except ModelError as error:
            raise ModelError(f"{key}: {error}", reason=error.reason, key=error.key) from error
    if config.model.chat_template is not None:
        read_chat_template(config.model.chat_template)


def named_files(section: Any, prefix: str = "") -> Iterator[tuple[str, PathKind, Any]]:
    """Yield the key, kind and value of each setting that names a file."""
    for field in fields(section):
        value, kind = getattr(section, field.name), path_kind(field.type)
        if value is None:
            continue
        if kind is not None:
            yield prefix + field.name, kind, value
        elif inner := inner_section(field.type):
            below = value if inner.is_dict else {"": value}
            for name, held in below.items():
                yield from named_files(held, f"{prefix}{field.name}.{name and f'{name}.'}")


def _check_directory(config: Config) -> None:
    """Raise ConfigError if the run's directory is none, or of a run with other weights."""
    directory = Path(config.run_dir)
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(
                f"run_dir is {config.run_dir}, but {path} is a file; set another run_dir.",
                reason="not_a_directory",
                key="run_dir",
            )
    saved, checkpoints = directory / SETTINGS, directory / CHECKPOINTS
    if not saved.exists():
        return
    changed = _changed_weights(saved, config)
    if changed and checkpoints.is_dir() and any(p.name.isdecimal() for p in checkpoints.iterdir()):
        raise ConfigError(
            f"{directory} holds a run with another {', '.join(changed)}, whose checkpoint does "
            "not fit; use the settings that it began with, or another run_dir.",
            reason="mismatch",
            key=changed[0],
        )


def _changed_weights(saved: Path, config: Config) -> list[str]:
    """Return the changed settings that decide which weights a checkpoint holds."""
    changed = [key for key in changed_keys(saved, config) if key.startswith("model.lora.")]
    if not config.model.lora.rank and "model.lora.rank" not in changed:
        changed = []  # without adapters the rest has no effect
    old = read_saved(saved).get("policies") or {}
    return changed + ["policies"] * (set(old) != set(config.policies))
