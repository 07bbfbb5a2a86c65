"""Critic: a value head on the policy's last hidden states, with its loss and optimizer.

It is not part of the policy. It has its own weights and moments in the train state, and is neither
served nor exported.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from lightning_jax.rl.adapters import AdapterPolicies, vmap_optimizer
from lightning_jax.rl.batches.batch import StateBatch
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.types import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueHead:
    """Linear map from a hidden state to a value in reward units, in float32.

    With several policies there may be one for each.
    """

    kernel: Leaf  # [E], or [N, E]
    bias: Leaf  # scalar, or [N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CriticState:
    """State that an update of the critic reads and replaces."""

    head: Leaf  # ValueHead
    opt_state: Leaf


@dataclass(frozen=True)
class Critic:
    """Training settings of the value head.

    The head has its own optimizer because a policy's learning rate is far too small for a head
    that starts at 0. It also keeps the value error out of the norm that clips the policy gradient.
    `trunk_coef` times the value loss is added to the loss of the policy's weights. With the default
    0 their gradient is only the policy gradient, so a badly scaled value loss cannot damage the
    language model.
    """

    optimizer: optax.GradientTransformation
    clip: float = 0.0  # see `value_loss`
    trunk_coef: float = 0.0
    num_heads: int | None = None  # one for each of several policies; None: one for all


def make_critic(
    algorithm: AlgorithmConfig, policies: AdapterPolicies | None = None
) -> Critic | None:
    """Build the critic for these settings, or return None if they need none."""
    if not algorithm.has_critic:
        return None
    optimizer = optax.adam(algorithm.value_learning_rate)
    heads = policies.number if policies and algorithm.value_heads == "per_policy" else None
    if policies and policies.separate:
        optimizer = vmap_optimizer(optimizer, policies.number)
    return Critic(
        optimizer=optimizer,
        clip=algorithm.value_clip,
        trunk_coef=algorithm.value_coef,
        num_heads=heads,
    )


def init_critic(critic: Critic, embed_dim: int) -> CriticState:
    """Build a head that predicts 0 for every state, with fresh moments."""
    stack = () if critic.num_heads is None else (critic.num_heads,)
    head: Any = ValueHead(jnp.zeros((*stack, embed_dim)), jnp.zeros(stack))
    return CriticState(head, critic.optimizer.init(head))


def state_values(
    head: ValueHead,
    nodes: Float[Array, "B T E"],
    where: Int[Array, "B R"],
    chosen: Int[Array, " B"] | None = None,
) -> Float[Array, "B R"]:
    """Return the values x . kernel / sqrt(E) + bias at the nodes `where`, for any dtype of x.

    Due to the division, an optimizer step moves the values of wide and narrow models about equally.
    With several heads, `chosen` is the head index of each row.
    """
    kernel, bias = head.kernel, head.bias
    if kernel.ndim == 2:
        kernel, bias = kernel[chosen][:, None, :], bias[chosen][:, None]
    else:
        kernel = kernel[None, None, :]
    # Multiplying every node and gathering scalars takes less memory than gathering states.
    products = (nodes.astype(jnp.float32) * kernel).sum(axis=-1)
    values = products / math.sqrt(nodes.shape[-1]) + bias
    return jnp.take_along_axis(values, where, axis=1, mode="promise_in_bounds")


def value_loss(
    values: Float[Array, "B R"], states: StateBatch, *, clip: float
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Return (loss, metric sums), where the loss sums weight * (value - return)^2 / 2 over states.

    With `clip` above 0 it uses the larger of two errors: that of the value, and that of the value
    clipped to within `clip` of its value before the step's first update. A value that moved further
    toward its return gets no gradient. PPO is commonly run this way (described in
    arXiv 2005.12729), but arXiv 1707.06347 clips only the policy.
    """
    error = jnp.square(values - states.returns)
    metrics = {}
    if clip > 0.0:
        near = states.values + jnp.clip(values - states.values, -clip, clip)
        bounded = jnp.square(near - states.returns)
        is_cut = (bounded > error).astype(jnp.float32)
        metrics["train/value_clip_fraction"] = (states.weights * is_cut).sum()
        error = jnp.maximum(error, bounded)
    loss = 0.5 * (states.weights * error).sum()
    return loss, metrics | {"train/value_loss": loss}


def scale_gradient(x: Float[Array, "B T E"], factor: float) -> Float[Array, "B T E"]:
    """Return `x`, with its gradient multiplied by `factor`."""
    if factor == 0.0:
        return jax.lax.stop_gradient(x)
    return _scaled(x, factor)


@jax.custom_vjp
def _scaled(x: Array, factor: float) -> Array:
    return x


_scaled.defvjp(
    lambda x, factor: (x, factor),
    lambda factor, grad: (grad * jnp.asarray(factor, grad.dtype), None),
)
