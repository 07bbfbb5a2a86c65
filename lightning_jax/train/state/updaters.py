"""Updaters of a run, built from its settings."""

from collections.abc import Sequence
from typing import Any

from lightning_jax.models.config import AUTO
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.rl.adapters import AdapterPolicies
from lightning_jax.rl.update.updater import Updater, make_updater
from lightning_jax.train.config import Config


def phase_updater(
    model: DecoderConfig,
    config: Config,
    *,
    supervised: bool,
    devices: Sequence[Any] | None = None,
) -> Updater:
    """Return the updater of the warm-up (`supervised`) or of the policy phase.

    It uses a mesh of `devices`, by default of all devices. With `model.remat: auto`, which a run's
    memory plan replaces, nothing is recomputed. Raises ConfigError if the mesh does not divide
    batch.rows.
    """
    table, policies = config.policy_table, None
    if table.adapters:  # a supervised warm-up trains all of them separately
        separate = supervised or config.algorithm.policy_updates == "independent"
        trained = tuple(supervised or policy.trains for policy in table.named.values())
        policies = AdapterPolicies(tuple(table.adapters), trained, separate)
    return make_updater(
        model,
        None if supervised else config.algorithm,
        config.warmup.optimizer if supervised else config.optimizer,
        config.batch,
        mesh=make_mesh(config.mesh, devices),
        dtype=config.model.dtype,
        remat="none" if config.model.remat == AUTO else config.model.remat,
        policies=policies,
        seed=config.seed,
    )
