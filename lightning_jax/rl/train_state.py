"""What an optimizer step reads and replaces, and what it is at step 0."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lightning_jax.models.lora import frozen_part, overlay, trained_part
from lightning_jax.models.transformer import Params
from lightning_jax.rl.critic import Critic, init_critic
from lightning_jax.types import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What an optimizer step reads and replaces; float32, whatever the model computes in.

    Where the model has adapters (`models/lora.py`) `params` are those alone. The other weights are
    `base`, in the dtype that they were loaded in; no update changes or donates them.
    """

    step: Leaf  # int32 scalar, optimizer updates made
    params: Any
    opt_state: Any
    critic: Any = None  # CriticState, None without a critic
    base: Any = None  # None: all weights are trained

    @property
    def policy(self) -> Params:
        """All weights that the policy computes with."""
        return overlay(self.base, self.params)


def init_state(
    params: Params, optimizer: optax.GradientTransformation, critic: Critic | None = None
) -> TrainState:
    """A state at step 0; the moments lie where the weights lie, scalars and the critic on all
    their devices.

    The first update donates what it trains of `params`: whoever else needs it keeps a copy.
    """
    norms, base = params["final_norm"], frozen_part(params)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained_part(params))
    # The counts of several adapters' optimizers are a list; nothing else of adapters is.
    small = functools.partial(place_scalar, params, most_axes=0 if base is None else 1)
    opt_state = jax.tree.map(small, optimizer.init(params))
    made = None
    if critic is not None:
        whole = functools.partial(_replicate, params)
        made = jax.tree.map(whole, init_critic(critic, norms["scale"].shape[0]))
    step = place_scalar(params, jnp.zeros((), jnp.int32))
    return TrainState(step, params, opt_state, made, base)


def place_scalar(params: Params, value: Any, *, most_axes: int = 0) -> Any:
    """A scalar on every device of the weights, where jit leaves it: else step two recompiles.

    Arrays with more axes than `most_axes` come back as they are.
    """
    return _replicate(params, value) if jnp.ndim(value) <= most_axes else value


def _replicate(params: Params, value: Any) -> Any:
    """An array whole on every device of the weights."""
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        return jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return value
