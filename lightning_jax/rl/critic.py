"""A critic: a value head on the policy's last hidden states, its loss and its optimizer.

It is no part of the policy: it has weights and moments of its own in the train state, and is
neither served nor exported.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from lightning_jax.config import AlgorithmConfig
from lightning_jax.rl.several import Several, separately
from lightning_jax.types import Leaf, StateBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueHead:
    """A linear map from a hidden state to a number in reward units; float32. Of several policies
    there may be one each.
    """

    kernel: Leaf  # [E], or [N, E]
    bias: Leaf  # scalar, or [N]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CriticState:
    """What an update of the critic reads and replaces."""

    head: Leaf  # ValueHead
    opt_state: Leaf


@dataclass(frozen=True)
class Critic:
    """How the head learns.

    Its optimizer is its own because a policy's learning rate is far too small for a head that
    begins at 0, and so that the error of the values has no part in the norm by which the policy's
    gradient is clipped. `trunk_coef` times the value loss joins the loss of the policy's weights.
    It is 0 by default: then their gradient is the policy gradient and nothing else, and a value
    loss of the wrong scale cannot spoil a language model.
    """

    optimizer: optax.GradientTransformation
    clip: float = 0.0  # see `value_loss`
    trunk_coef: float = 0.0
    num_heads: int | None = None  # one for each of several policies; None: one for all


def make_critic(algorithm: AlgorithmConfig, several: Several | None = None) -> Critic | None:
    """The critic these settings ask for, None if none."""
    if not algorithm.has_critic:
        return None
    optimizer = optax.adam(algorithm.value_learning_rate)
    heads = several.number if several and algorithm.value_heads == "per_policy" else None
    if several and several.separate:
        optimizer = separately(optimizer, several.number)
    return Critic(
        optimizer=optimizer,
        clip=algorithm.value_clip,
        trunk_coef=algorithm.value_coef,
        num_heads=heads,
    )


def init_critic(critic: Critic, embed_dim: int) -> CriticState:
    """A head that says 0 of every state, with fresh moments."""
    stack = () if critic.num_heads is None else (critic.num_heads,)
    head: Any = ValueHead(jnp.zeros((*stack, embed_dim)), jnp.zeros(stack))
    return CriticState(head, critic.optimizer.init(head))


def state_values(
    head: ValueHead,
    nodes: Float[Array, "B T E"],
    where: Int[Array, "B R"],
    chosen: Int[Array, " B"] | None = None,
) -> Float[Array, "B R"]:
    """The values at the nodes `where`, of hidden states in whatever type: x . kernel / sqrt(E) +
    bias.

    The division makes an optimizer's step move the values of a wide model about as far as those of
    a narrow one. Of several heads each row has the `chosen` one.
    """
    kernel, bias = head.kernel, head.bias
    if kernel.ndim == 2:
        kernel, bias = kernel[chosen][:, None, :], bias[chosen][:, None]
    else:
        kernel = kernel[None, None, :]
    # A product with every node and a gather of numbers: less memory than gathering states.
    products = (nodes.astype(jnp.float32) * kernel).sum(axis=-1)
    values = products / math.sqrt(nodes.shape[-1]) + bias
    return jnp.take_along_axis(values, where, axis=1, mode="promise_in_bounds")


def value_loss(
    values: Float[Array, "B R"], states: StateBatch, *, clip: float
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """(loss, metric sums): the sum over states of weight * (value - return)^2 / 2.

    With `clip` above 0 the larger of the errors of the value and of the value held within `clip` of
    what it was before the step's first update, as PPO is commonly run (arXiv 1707.06347 clips only
    the policy; arXiv 2005.12729 describes this): a value that moved further has no gradient.
    """
    error = jnp.square(values - states.returns)
    metrics = {}
    if clip > 0.0:
        held = states.values + jnp.clip(values - states.values, -clip, clip)
        bounded = jnp.square(held - states.returns)
        is_cut = (bounded > error).astype(jnp.float32)
        metrics["train/value_clip_fraction"] = (states.weights * is_cut).sum()
        error = jnp.maximum(error, bounded)
    loss = 0.5 * (states.weights * error).sum()
    return loss, metrics | {"train/value_loss": loss}


def scale_gradient(x: Float[Array, "B T E"], factor: float) -> Float[Array, "B T E"]:
    """`x`, through which `factor` times the gradient comes back."""
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
