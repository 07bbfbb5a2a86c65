"""Losses over sampled tokens. Each is a sum of weight times token loss, so microbatches simply add.

The weights are normalised on the host, where the whole step is known. Metrics are sums too, over
the tokens of the mask; `mean_metrics` turns the sums of a step into means.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lightning_jax.types import Batch

Metrics = dict[str, Float[Array, ""]]
# exp() of more overflows float32. No gradient comes from beyond it: such a token is hopelessly
# off-policy.
MAX_LOG_RATIO = 20.0
_SUMS = frozenset({"train/loss", "train/num_tokens"})  # metrics that are no mean over tokens


def policy_loss(
    logprobs: Float[Array, "B R"],
    batch: Batch,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    ref_logprobs: Float[Array, "B R"] | None = None,
    entropy: Float[Array, "B R"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """(loss, metric sums): `-sum(weights * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A))`.

    r is the ratio of the current policy to the one that sampled (PPO, arXiv 1707.06347; per token
    as in GRPO, arXiv 2402.03300). `kl_coef` adds the k3 estimate of the KL to the reference policy,
    weighted alike; `entropy` in nats is only reported. Values where the mask is False do not
    matter. Raises ValueError when `kl_coef` is above 0 without `ref_logprobs`.
    """
    if kl_coef > 0.0 and ref_logprobs is None:
        raise ValueError(f"kl_coef is {kl_coef} without ref_logprobs; pass them or set it to 0.")
    mask, advantages = batch.target_mask, batch.advantages
    log_ratio = _masked(logprobs, mask) - _masked(batch.behavior_logprobs, mask)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    token_loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    is_clipped = jnp.where(advantages > 0.0, ratio > 1.0 + clip_high, ratio < 1.0 - clip_low)
    sums = {
        # By zero advantage no gradient is lost to clipping.
        "train/clip_fraction": (is_clipped & (advantages != 0.0)).astype(jnp.float32),
        "train/mismatch_kl": _k3(log_ratio),
    }
    if ref_logprobs is not None:
        to_reference = _k3(_masked(ref_logprobs, mask) - _masked(logprobs, mask))
        token_loss = token_loss + kl_coef * to_reference
        sums["train/kl_to_reference"] = to_reference
    return _finish(token_loss, batch, sums, entropy)


def supervised_loss(
    logprobs: Float[Array, "B R"],
    batch: Batch,
    *,
    entropy: Float[Array, "B R"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """(loss, metric sums): the weighted negative log-likelihood of the targets, in nats."""
    token_loss = -_masked(logprobs, batch.target_mask)
    return _finish(token_loss, batch, {"train/nll": token_loss}, entropy)


def mean_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Means over tokens of the metric sums of a step; the loss and the token count stay sums."""
    count = max(sums["train/num_tokens"], 1.0)
    return {name: value if name in _SUMS else value / count for name, value in sums.items()}


def _finish(
    token_loss: Float[Array, "B R"],
    batch: Batch,
    sums: dict[str, Float[Array, "B R"]],
    entropy: Float[Array, "B R"] | None,
) -> tuple[Float[Array, ""], Metrics]:
    mask = batch.target_mask
    if entropy is not None:
        sums = sums | {"train/entropy": entropy}
    loss = (_masked(batch.weights, mask) * _masked(token_loss, mask)).sum()
    metrics = {name: _masked(value, mask).sum() for name, value in sums.items()}
    return loss, metrics | {
        "train/loss": loss,
        "train/num_tokens": mask.sum().astype(jnp.float32),
    }


def _k3(log_ratio: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """An unbiased estimate of KL(p, q) from samples of p, never negative; takes log q - log p.

    exp(x) - 1 - x (Schulman 2020, "Approximating KL divergence"). expm1, because near x = 0, where
    sampler and trainer agree, exp(x) - 1 would be all rounding error.
    """
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.expm1(log_ratio) - log_ratio


def _masked(values: Float[Array, "B R"], mask: Bool[Array, "B R"]) -> Float[Array, "B R"]:
    return jnp.where(mask, values, 0.0)
