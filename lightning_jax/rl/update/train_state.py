"""State that an optimizer step reads and replaces, its initial value, and the optimizer."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lightning_jax.models.blocks.experts import ROUTER
from lightning_jax.models.lora import frozen_part, overlay, trained_part
from lightning_jax.models.sharding import put_on_mesh
from lightning_jax.models.transformer import Params
from lightning_jax.rl.config import OptimizerConfig
from lightning_jax.rl.critic import Critic, init_critic
from lightning_jax.types import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State of training, in float32 for any dtype of the model's computation.

    If the model has adapters (`models/lora.py`), `params` holds only the adapters. The other
    weights are `base`, in the dtype they were loaded in. No update changes or donates them.
    """

    step: Leaf  # int32 scalar, number of optimizer updates
    params: Any
    opt_state: Any
    critic: Any = None  # CriticState, None without a critic
    base: Any = None  # None: all weights are trained

    @property
    def weights(self) -> Params:
        """All weights, trained and frozen."""
        return overlay(self.base, self.params)


def init_state(
    params: Params, optimizer: optax.GradientTransformation, critic: Critic | None = None
) -> TrainState:
    """Build a state at step 0.

    The moments are sharded like the weights. Scalars and the critic are replicated on the weights'
    devices. The first update donates the trained part of `params`, so other users need a copy.
    """
    norms, base = params["final_norm"], frozen_part(params)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained_part(params))
    # The update counts of several adapters are a vector. No other array of adapters has one axis.
    small = functools.partial(place_scalar, params, most_axes=0 if base is None else 1)
    opt_state = jax.tree.map(small, optimizer.init(params))
    critic_state = None
    if critic is not None:
        whole = functools.partial(_replicate, params)
        critic_state = jax.tree.map(whole, init_critic(critic, norms["scale"].shape[0]))
    step = place_scalar(params, jnp.zeros((), jnp.int32))
    return TrainState(step, params, opt_state, critic_state, base)


def place_scalar(params: Params, value: Any, *, most_axes: int = 0) -> Any:
    """Put a scalar on every device of the weights, so that step two does not recompile.

    jit leaves its scalars there. Arrays with more axes than `most_axes` are returned unchanged.
    """
    return _replicate(params, value) if jnp.ndim(value) <= most_axes else value


def _replicate(params: Params, value: Any) -> Any:
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        return put_on_mesh(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return value


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Build the learning-rate schedule: linear warm-up, then constant or a cosine decay to a tenth.

    With `warmup_steps` n, update i < n runs at (i + 1) / (n + 1) of the rate. No update is wasted
    at rate 0.
    """
    top = config.learning_rate
    rise = optax.linear_schedule(top / (config.warmup_steps + 1), top, max(config.warmup_steps, 1))
    if config.decay_steps is None:
        after = optax.constant_schedule(top)
    else:
        after = optax.cosine_decay_schedule(top, config.decay_steps, alpha=0.1)
    return optax.join_schedules([rise, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Build AdamW after a clip of the gradient norm.

    Only matrices decay, not norms, biases or the routers of experts, which are mostly frozen.

    Second moments are float32 for any `mu_dtype`. With 8 bits of precision, a running mean over
    1 / (1 - b2) updates would stop moving.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            make_schedule(config),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            mu_dtype=config.mu_dtype,
            weight_decay=config.weight_decay,
            mask=_find_decayed,
        ),
    )


def _find_decayed(params: Any) -> Any:
    router = jax.tree_util.DictKey(ROUTER)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.ndim(leaf) >= 2 and router not in path, params
    )
