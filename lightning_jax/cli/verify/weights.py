"""Sources of the weights of a run's versions.

Version s of the weights is the result of s trainer steps. Version 0 (the initial model), the kept
checkpoints and the exported policy can be loaded.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_jax.models.config import ModelConfig
from lightning_jax.models.formats.load import ModelReader, open_configured
from lightning_jax.models.lora import open_policy, overlay, trained_part
from lightning_jax.models.model_files import MERGED
from lightning_jax.models.policies import Policy
from lightning_jax.models.transformer import Params
from lightning_jax.train.config import Config
from lightning_jax.train.directory import CHECKPOINTS, exported_step
from lightning_jax.train.state.checkpoint import Checkpointer


@dataclass(frozen=True)
class WeightsSource:
    """Source of one version of the weights."""

    label: str
    load: Callable[[Params], Params]  # the result has the shapes and shardings of the argument


def find_sources(
    run_dir: Path, config: Config, last_version: int, row: Policy
) -> dict[int, WeightsSource]:
    """Return the versions that the run directory still holds.

    Each source's `load` takes the weights of `config.model`. `row` has weights of its own.
    """
    policy, base = row.name, row.base
    label = f"{policy}: " if policy else ""
    if base is None or base == config.model.name:
        weights_sources = {0: WeightsSource(label + config.model.name, lambda initial: initial)}
    else:
        load = _loads(open_configured, base, config)
        weights_sources = {0: WeightsSource(label + base, load)}
    # Several adapters are each exported in a separate copy, so no export holds them all.
    exported = run_dir / MERGED / policy
    if (
        exported_step(run_dir) == last_version > 0
        and not config.policy_table.adapters
        and exported.is_dir()
    ):
        # If a single adapter is merged in the weights, the fresh one on top of them is zero.
        name = f"{label}policy{f'/{policy}' if policy else ''}"
        load = _loads(open_policy, str(exported), config)
        weights_sources[last_version] = WeightsSource(name, load)
    directory = run_dir / CHECKPOINTS
    if directory.is_dir():

        def restore(initial: Params, step: int) -> Params:
            with contextlib.closing(Checkpointer(directory, config.checkpoint)) as checkpointer:
                trained = checkpointer.restore_params(trained_part(initial), step, policy)
                return overlay(initial, trained)

        with contextlib.closing(Checkpointer(directory, config.checkpoint)) as checkpointer:
            for step in checkpointer.steps:
                name = f"{label}checkpoints/{step}"
                weights_sources[step] = WeightsSource(name, partial(restore, step=step))
    return weights_sources


def _loads(
    open_model: Callable[[ModelConfig], ModelReader], name: str, config: Config
) -> Callable[[Params], Params]:
    """Return a function that lays the named model's weights over its argument."""
    model = ModelConfig(name, config.model.dtype)
    return lambda initial: overlay(initial, open_model(model).load().params)
