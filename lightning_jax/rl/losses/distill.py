"""Advantages of sampled tokens from a teacher's log-probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lightning_jax.rl.batch import TeacherBatch

MAX_GAP = 10.0  # nats; a token that the teacher finds less likely than that has this advantage


def teacher_advantages(logprobs: Float[Array, "B R"], teacher: TeacherBatch) -> Float[Array, "B R"]:
    """Return `coef * (log p_teacher - log p)` of each target, without a gradient.

    Weighted with these, the gradient of `-log p` is on average that of the reverse KL to the
    teacher at each token, given the tokens before it. That is on-policy distillation (GKD, arXiv
    2306.13649) with one sample per token. A token does not pay for later ones.
    """
    gap = teacher.logprobs - jax.lax.stop_gradient(logprobs)
    return teacher.coefs * jnp.clip(gap, -MAX_GAP, MAX_GAP)
