"""Losses of a token: policy gradients of several algorithms, and the KL to a teacher.

Each constructor takes hyper-parameters and returns a pure function from `LossInputs` to
`TokenLoss`, which is what `algorithm.loss` accepts.

A teacher that names its K likeliest tokens is compared with the policy over K + 1 outcomes: these
tokens, and any other token. What the policy never samples is taught, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import NO_TOKEN, Batch, TeacherBatch
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.ratios import importance_ratio, level_log_ratio

Values = Float[Array, "B R"]
MAX_GAP = 10.0  # nats; a sampled token that the teacher finds less likely has this advantage
# Least probability of all other tokens, which is 1 less a sum in float32, exact to about 1e-7. The
# reverse KL takes no probability of the teacher for less, so that one token costs at most 14 nats.
LEAST = 1e-6


@dataclass(frozen=True)
class LossInputs:
    """Sampled tokens of a microbatch, of shape [B, R], 0 where `batch.target_mask` is False."""

    logprobs: Values  # of the current policy, in nats; the only input with a gradient
    log_ratio: Values  # logprobs minus those of the proximal policy
    advantages: Values
    batch: Batch  # target_calls and target_mask tell calls and padding apart

    @property
    def ratio(self) -> Values:
        """Probability under the current policy, divided by that under the proximal policy."""
        return importance_ratio(self.log_ratio)


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token before its weight, and what the step's metrics report of it."""

    token_loss: Values
    ratio: Values  # that the loss used
    is_clipped: Bool[Array, "B R"] | bool = False  # True where the ratio is beyond a bound


Surrogate = Callable[[LossInputs], TokenLoss]


def clip(low: float = 0.2, high: float = 0.2, dual: float = 3.0) -> Surrogate:
    """Build `-min(r * A, clip(r, 1 - low, 1 + high) * A)` with each token's ratio r.

    This is PPO (arXiv 1707.06347), per token as in GRPO (arXiv 2402.03300), with two bounds as in
    DAPO (arXiv 2503.14476). `dual` bounds the loss for a negative advantage at that ratio (dual
    clip, arXiv 1912.09729). 0 means no bound.
    """

    def loss(inputs: LossInputs) -> TokenLoss:
        return _clipped(inputs.ratio, inputs.advantages, low, high, dual)

    return loss


def gspo(low: float = 0.2, high: float = 0.2, dual: float = 3.0) -> Surrogate:
    """Build the loss of `clip` with one ratio per call (GSPO, arXiv 2507.18071).

    The ratio is the geometric mean over the call's trained tokens. Every token of the call has the
    same value, so the token weights set the weight of a call.
    """

    def loss(inputs: LossInputs) -> TokenLoss:
        log_ratio = level_log_ratio(inputs.log_ratio, inputs.batch, "sequence_mean")
        return _clipped(importance_ratio(log_ratio), inputs.advantages, low, high, dual)

    return loss


def cispo(low: float = 0.2, high: float = 0.2) -> Surrogate:
    """Build `-clip(r, 1 - low, 1 + high) * A * logprob` (CISPO, arXiv 2506.13585).

    The clipped ratio has no gradient. Every token keeps its gradient, and tokens reported as
    clipped only weigh less or more.
    """

    def loss(inputs: LossInputs) -> TokenLoss:
        ratio = inputs.ratio
        bounded = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - low, 1.0 + high))
        return TokenLoss(-bounded * inputs.advantages * inputs.logprobs, ratio, bounded != ratio)

    return loss


def reinforce() -> Surrogate:
    """Build `-A * logprob` (Williams 1992). The ratio is only reported."""
    return lambda inputs: TokenLoss(-inputs.advantages * inputs.logprobs, inputs.ratio)


LOSSES: dict[str, Callable[[AlgorithmConfig], Surrogate]] = {
    "clip": lambda a: clip(a.clip_low, a.clip_high, a.clip_dual),
    "gspo": lambda a: gspo(a.clip_low, a.clip_high, a.clip_dual),
    "cispo": lambda a: cispo(a.clip_low, a.clip_high),
    "reinforce": lambda _: reinforce(),
    "raft": lambda _: reinforce(),  # with advantage 1 for each group's best rollout
    "dpo": lambda _: reinforce(),  # with the advantages of pairs, see rl/dpo.py
}


def _clipped(ratio: Values, advantages: Values, low: float, high: float, dual: float) -> TokenLoss:
    clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    is_too_low = ratio < 1.0 - low
    if dual > 0.0:
        gain = jnp.where(advantages < 0.0, jnp.maximum(gain, dual * advantages), gain)
        is_too_low |= ratio > dual
    return TokenLoss(-gain, ratio, jnp.where(advantages > 0.0, ratio > 1.0 + high, is_too_low))


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
    raise InvalidValue.unknown("kl", f"KL to the teacher is {kl!r}; expected forward or reverse.")
