"""Losses of a token from a teacher's log-probabilities.

A teacher that names its K likeliest tokens is compared with the policy over K + 1 outcomes: these
tokens, and any other token. What the policy never samples is taught, too.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batch import TeacherBatch

MAX_GAP = 10.0  # nats; a sampled token that the teacher finds less likely has this advantage
NO_TOKEN = -1e9  # log-probability of a place without a token, if a teacher named fewer than K
# Least probability of all other tokens, which is 1 less a sum in float32, exact to about 1e-7. The
# reverse KL takes no probability of the teacher for less, so that one token costs at most 14 nats.
LEAST = 1e-6


def teacher_advantages(logprobs: Float[Array, "B R"], teacher: TeacherBatch) -> Float[Array, "B R"]:
    """Return `coef * (log p_teacher - log p)` of each target, without a gradient.

    Weighted with these, the gradient of `-log p` is on average that of the reverse KL to the
    teacher at each token, given the tokens before it. That is on-policy distillation (GKD, arXiv
    2306.13649) with one sample per token. A token does not pay for later ones.
    """
    gap = teacher.logprobs - jax.lax.stop_gradient(logprobs)
    return teacher.coefs * jnp.clip(gap, -MAX_GAP, MAX_GAP)


def kl_to_top(
    logprobs: Float[Array, "*places K"], top_logprobs: Float[Array, "*places K"], kl: str
) -> Float[Array, "*places"]:
    """Return the KL between policy and teacher in nats, with a gradient for the policy.

    Both arguments are at the teacher's K likeliest tokens, `logprobs` those of the policy.
    "forward" is KL(teacher, policy). Its gradient for the policy's logits is `p - q` at these
    tokens, so it pulls up what the policy never samples. "reverse" is KL(policy, teacher), whose
    gradient fades with the policy's own probability. All other tokens count as one outcome, so both
    are at most the KL over the vocabulary. Raises ValueError for another name.
    """
    is_token = top_logprobs > NO_TOKEN
    log_q = jnp.where(is_token, top_logprobs, NO_TOKEN)
    log_p = jnp.where(is_token, logprobs, NO_TOKEN)
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    rest_q, rest_p = (jnp.maximum(1.0 - some.sum(axis=-1), LEAST) for some in (q, p))
    rest = jnp.log(rest_q) - jnp.log(rest_p)
    if kl == "forward":
        return (q * (log_q - log_p)).sum(axis=-1) + rest_q * rest
    if kl == "reverse":
        gap = log_p - jnp.maximum(log_q, math.log(LEAST))
        return (p * gap).sum(axis=-1) - rest_p * rest
    raise InvalidValue(
        f"KL to the teacher is {kl!r}; expected forward or reverse.", reason="unknown", key="kl"
    )
