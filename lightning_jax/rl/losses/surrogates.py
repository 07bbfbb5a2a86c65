"""Token losses whose gradients are the policy gradients of several algorithms.

Each function takes `log_ratio`, the current log-probability minus that of the proximal policy (0
where masked). It returns (token loss, the ratio used, mask of tokens beyond a bound). `clip_dual`
bounds the loss for a negative advantage at the ratio `clip_dual` (dual clip, arXiv 1912.09729).
0 means no bound.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lightning_jax.rl.batch import Batch
from lightning_jax.rl.losses.ratios import importance_ratio, level_log_ratio

Values = Float[Array, "B R"]
Surrogate = tuple[Values, Values, Bool[Array, "B R"]]


def clip_surrogate(
    logprobs: Values,
    log_ratio: Values,
    advantages: Values,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Surrogate:
    """Return `-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)` with each token's ratio r.

    This is PPO (arXiv 1707.06347), per token as in GRPO (arXiv 2402.03300), with two bounds as in
    DAPO (arXiv 2503.14476).
    """
    return _clipped(importance_ratio(log_ratio), advantages, clip_low, clip_high, clip_dual)


def gspo_surrogate(
    logprobs: Values,
    log_ratio: Values,
    advantages: Values,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Surrogate:
    """Return the clipped loss with one ratio per call (GSPO, arXiv 2507.18071).

    The ratio is the geometric mean over the call's trained tokens. Every token of the call has the
    same value, so the token weights set the weight of a call.
    """
    ratio = importance_ratio(level_log_ratio(log_ratio, batch, "sequence_mean"))
    return _clipped(ratio, advantages, clip_low, clip_high, clip_dual)


def cispo_surrogate(
    logprobs: Values,
    log_ratio: Values,
    advantages: Values,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Surrogate:
    """Return `-clip(r, 1 - clip_low, 1 + clip_high) * A * logprob` (CISPO, arXiv 2506.13585).

    The clipped ratio has no gradient. Every token keeps its gradient, and tokens reported as
    clipped only weigh less or more.
    """
    ratio = importance_ratio(log_ratio)
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    return -bounded * advantages * logprobs, ratio, bounded != ratio


def reinforce_surrogate(
    logprobs: Values,
    log_ratio: Values,
    advantages: Values,
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> Surrogate:
    """Return `-A * logprob` (Williams 1992). The ratio is only reported, and bounds are ignored."""
    ratio = importance_ratio(log_ratio)
    return -advantages * logprobs, ratio, jnp.zeros_like(ratio, dtype=jnp.bool_)


SURROGATES: dict[str, Callable[..., Surrogate]] = {
    "clip": clip_surrogate,
    "gspo": gspo_surrogate,
    "cispo": cispo_surrogate,
    "reinforce": reinforce_surrogate,
    "dpo": reinforce_surrogate,  # with the advantages of pairs, see rl/dpo.py
}


def _clipped(
    ratio: Values, advantages: Values, clip_low: float, clip_high: float, clip_dual: float
) -> Surrogate:
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    is_too_low = ratio < 1.0 - clip_low
    if clip_dual > 0.0:
        gain = jnp.where(advantages < 0.0, jnp.maximum(gain, clip_dual * advantages), gain)
        is_too_low |= ratio > clip_dual
    beyond = jnp.where(advantages > 0.0, ratio > 1.0 + clip_high, is_too_low)
    return -gain, ratio, beyond
