"""Updaters of a run, built from its settings."""

from collections.abc import Sequence
from typing import Any

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

    It uses a mesh of `devices`, by default of all devices. Raises ConfigError if the mesh does not
    divide batch.rows.
    """
    return make_updater(
        model,
        None if supervised else config.algorithm,
        config.warmup.optimizer if supervised else config.optimizer,
        config.batch,
        mesh=make_mesh(config.mesh, devices),
        dtype=config.model.dtype,
        remat=config.model.remat,
        policies=adapter_policies(config, supervised=supervised),
        seed=config.seed,
    )


def adapter_policies(config: Config, *, supervised: bool) -> AdapterPolicies | None:
    """Return the adapter policies of a run, or None if there are none.

    A supervised warm-up trains all of them separately.
    """
    table = config.policy_table
    if not table.adapters:
        return None
    trained = tuple(supervised or policy.trains for policy in table.named.values())
    separate = supervised or config.algorithm.policy_updates == "independent"
    return AdapterPolicies(tuple(table.adapters), trained, separate)
