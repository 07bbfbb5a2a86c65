"""Functions of a user's own that compute what the package's do, for tests/rl/test_choices.py."""

import jax.numpy as jnp
import numpy as np

from lightning_jax.rl.advantages import per_group
from lightning_jax.rl.losses import LossInputs, TokenLoss


def clip(inputs: LossInputs) -> TokenLoss:
    """Do the same as clip with its default bounds."""
    ratio, advantages = inputs.ratio, inputs.advantages
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
    gain = jnp.where(advantages < 0.0, jnp.maximum(gain, 3.0 * advantages), gain)
    is_beyond = jnp.where(advantages > 0.0, ratio > 1.2, (ratio < 0.8) | (ratio > 3.0))
    return TokenLoss(-gain, ratio, is_beyond)


def per_step(trajectory):
    """Do the same as per_step with a discount of 0.5."""
    credits, later = [], trajectory.reward / 0.5
    for call in reversed(trajectory.transitions):
        later = call.reward + 0.5 * later
        credits.insert(0, later)
    return credits


@per_group
def leave_one_out(returns):
    """Do the same as leave_one_out."""
    return (returns.sum() - returns) / (len(returns) - 1)


def mask(ratio):
    """Do the same as mask with bounds of 0.9 and 1.1."""
    return jnp.where((ratio >= 0.9) & (ratio <= 1.1), ratio, 0.0)


def only_loss(inputs):
    return inputs.advantages


def twice_the_rows(inputs):
    both = jnp.concatenate([inputs.ratio, inputs.ratio])
    return TokenLoss(both, both)


def one_credit_too_few(trajectory):
    return [0.0] * (len(trajectory.transitions) - 1)


def tokens_miscounted(trajectory):
    return [(0.0,) * 9 for _ in trajectory.transitions]


def no_list(trajectory):
    return trajectory.reward


def one_number(returns, group_ids):
    return returns.mean()


def flat(ratio):
    return np.ones(3)
