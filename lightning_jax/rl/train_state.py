"""State that an optimizer step reads and replaces, and its initial value."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lightning_jax.models.lora import frozen_part, overlay, trained_part
from lightning_jax.models.sharding import put_on_mesh
from lightning_jax.models.transformer import Params
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
    def policy(self) -> Params:
        """All weights of the policy, trained and frozen."""
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
    made = None
    if critic is not None:
        whole = functools.partial(_replicate, params)
        made = jax.tree.map(whole, init_critic(critic, norms["scale"].shape[0]))
    step = place_scalar(params, jnp.zeros((), jnp.int32))
    return TrainState(step, params, opt_state, made, base)


def place_scalar(params: Params, value: Any, *, most_axes: int = 0) -> Any:
    """Put a scalar on every device of the weights, so that step two does not recompile.

    jit leaves its scalars there. Arrays with more axes than `most_axes` are returned unchanged.
    """
    return _replicate(params, value) if jnp.ndim(value) <= most_axes else value


def _replicate(params: Params, value: Any) -> Any:
    """Replicate an array on every device of the weights."""
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        return put_on_mesh(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return value
