"""Objectives that a training step minimises, as functions of a microbatch's log-probabilities."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lightning_jax.rl.batches.batch import Batch, StateBatch, TeacherBatch
from lightning_jax.rl.choices import load_choices
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.critic import Critic, value_loss
from lightning_jax.rl.losses import policy
from lightning_jax.rl.losses.policy import Metrics

# (logprobs, entropy, batch, ref_logprobs or None, teacher_kl or None) -> (loss, metric sums)
Objective = Callable[..., tuple[Float[Array, ""], Metrics]]


def policy_objective(algorithm: AlgorithmConfig | None = None, **changes: Any) -> Objective:
    """Build an objective from `policy.policy_loss` with these settings, overridden by `changes`.

    Raises ConfigError if a function that they name cannot be loaded.
    """
    settings = load_choices(dataclasses.replace(algorithm or AlgorithmConfig(), **changes))

    def objective(
        logprobs: Any, entropy: Any, batch: Batch, ref_logprobs: Any, teacher_kl: Any = None
    ) -> Any:
        return policy.policy_loss(
            logprobs,
            batch,
            settings,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            teacher_kl=teacher_kl,
        )

    return objective


def supervised_objective() -> Objective:
    """Build an objective from `policy.supervised_loss`."""

    def objective(
        logprobs: Any, entropy: Any, batch: Batch, ref_logprobs: Any, teacher_kl: Any = None
    ) -> Any:
        return policy.supervised_loss(logprobs, batch, entropy=entropy)

    return objective


def metric_names(
    objective: Objective, critic: Critic | None, with_reference: bool, with_top: bool = False
) -> list[str]:
    """Return the metric names of objective and critic, found from shapes without the model.

    `with_top`: a teacher named its likeliest tokens.
    """
    floats, ints = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.float32, jnp.int32))
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    teacher = TeacherBatch(floats, floats) if with_top else None
    batch = Batch(ints, ints, ints, ints, ints, mask, ints, floats, floats, floats, teacher=teacher)
    reference, teacher_kl = (floats if has else None for has in (with_reference, with_top))
    reported = jax.eval_shape(objective, floats, floats, batch, reference, teacher_kl)[1]
    if critic is not None:
        states = StateBatch(ints, floats, floats, floats)
        error = functools.partial(value_loss, clip=critic.clip)
        reported |= jax.eval_shape(error, floats, states)[1]
    return sorted(reported)
