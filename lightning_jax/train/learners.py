"""Learners of a run, built from its settings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from lightning_jax.models.sharding import (
    make_gather,
    make_mesh,
    num_row_shards,
)
from lightning_jax.models.transformer import DecoderConfig
from lightning_jax.rl import train_step
from lightning_jax.rl.critic import make_critic
from lightning_jax.rl.learner import Learner
from lightning_jax.rl.losses.objectives import policy_objective, supervised_objective
from lightning_jax.rl.multi_policy.adapters import (
    AdapterPolicies,
    vmap_optimizer,
)
from lightning_jax.rl.optimizer import make_optimizer
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config


def make_learner(
    model: DecoderConfig,
    config: Config,
    *,
    supervised: bool,
    devices: Sequence[Any] | None = None,
) -> Learner:
    """Return the learner of the warm-up (`supervised`) or of the policy phase.

    It uses a mesh of `devices`, by default of all devices. Raises ConfigError if the mesh does not
    divide batch.rows.
    """
    algorithm, mesh = config.algorithm, make_mesh(config.mesh, devices)
    if config.batch.rows % num_row_shards(mesh):
        raise ConfigError(
            f"batch.rows is {config.batch.rows}; must be a multiple of {num_row_shards(mesh)}, the "
            "number of devices that share a batch (mesh.data * mesh.fsdp)",
            reason="mismatch",
            key="batch.rows",
        )
    objective = supervised_objective() if supervised else policy_objective(algorithm)
    optimizer = make_optimizer(config.warmup.optimizer if supervised else config.optimizer)
    policies = adapter_policies(config, supervised=supervised)
    if policies is not None and policies.separate:
        optimizer = vmap_optimizer(optimizer, policies.number)
    has_reward_kl = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    functions = train_step.make_train_functions(
        dataclasses.replace(model, scans_layers=mesh.devices.flat[0].platform == "cpu"),
        optimizer,
        objective,
        head_chunk=config.batch.head_chunk,
        remat=config.model.remat,
        compute_dtype=jnp.dtype(config.model.dtype),
        entropy_gradient=not supervised and algorithm.entropy_coef > 0,
        critic=None if supervised else make_critic(algorithm, policies),
        gather=make_gather(model, mesh),
        policies=policies,
    )
    return Learner(
        model=model,
        mesh=mesh,
        optimizer=optimizer,
        functions=functions,
        batch=config.batch,
        skip_zero_advantage=algorithm.skip_zero_advantage and algorithm.has_only_policy_gradient,
        num_epochs=1 if supervised else algorithm.num_epochs,
        num_minibatches=1 if supervised else algorithm.num_minibatches,
        needs_old_logprobs=not supervised and algorithm.needs_old_logprobs,
        values_per_token=algorithm.credit == "learned_token",
        policies=policies,
        reward_kl=algorithm if has_reward_kl and not supervised else None,
        seed=config.seed,
        dpo_beta=algorithm.dpo_beta if not supervised and algorithm.loss == "dpo" else None,
    )


def adapter_policies(config: Config, *, supervised: bool) -> AdapterPolicies | None:
    """Return the adapter policies of a run, or None if there are none.

    A supervised warm-up trains all of them separately.
    """
    if not config.adapters:
        return None
    trained = tuple(supervised or policy.trains for policy in config.policies.values())
    separate = supervised or config.algorithm.policy_updates == "independent"
    return AdapterPolicies(tuple(config.policies), trained, separate)
