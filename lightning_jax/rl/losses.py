"""Losses over sampled tokens. Each is a sum of weight times token loss, so microbatches simply add.

The weights are normalised on the host, where the whole step is known. Metrics are sums too, over
the tokens of the mask; `mean_metrics` turns the sums of a step into means. A metric whose name ends
in `_max` is a maximum throughout.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lightning_jax.config import AlgorithmConfig
from lightning_jax.rl.calls import sums_to_go
from lightning_jax.rl.ratios import (
    correction_weights,
    importance_ratio,
    kl_estimate,
    level_log_ratio,
)
from lightning_jax.rl.surrogates import SURROGATES
from lightning_jax.types import Batch, InvalidValue

Metrics = dict[str, Float[Array, ""]]
TokenMetrics = dict[str, Float[Array, "B R"]]
_SUMS = frozenset(  # metrics that are no mean over tokens
    {"train/loss", "train/num_tokens", "train/value_loss", "train/value_clip_fraction"}
)


def policy_loss(
    logprobs: Float[Array, "B R"],
    batch: Batch,
    algorithm: AlgorithmConfig,
    *,
    ref_logprobs: Float[Array, "B R"] | None = None,
    entropy: Float[Array, "B R"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """(loss, metric sums): the sum over tokens of `weight * (c * surrogate + kl_coef * KL -
    entropy_coef * entropy)`.

    The surrogate is that of `algorithm.loss`, with a ratio to the policy that `algorithm.proximal`
    names: the one that sampled (`batch.behavior_logprobs`) or the trainer's own before the step's
    first update (`batch.old_logprobs`; where it is None, this is that update). c is the off-policy
    correction. With `kl_in` "reward" the KL lowers the advantages instead: each token's by what it
    and the later tokens of its call cost. `entropy` is in nats, and a bonus needs it with its
    gradient. Values where the mask is False do not matter. Raises ValueError when a coefficient is
    above 0 and what it is for is missing.
    """
    _check_given(algorithm, ref_logprobs, entropy)
    mask = batch.target_mask
    logprobs, advantages = _masked(logprobs, mask), _masked(batch.advantages, mask)
    behavior = _masked(batch.behavior_logprobs, mask)
    is_first = batch.old_logprobs is None
    old = jax.lax.stop_gradient(logprobs) if is_first else _masked(batch.old_logprobs, mask)
    sums: TokenMetrics = {"train/mismatch_kl": kl_estimate(old - behavior)}
    extra = jnp.zeros_like(logprobs)
    if ref_logprobs is not None:
        reference = _masked(ref_logprobs, mask)
        to_reference = kl_estimate(reference - logprobs, algorithm.kl_estimator)
        sums["train/kl_to_reference"] = to_reference
        if algorithm.kl_in == "loss":
            extra = algorithm.kl_coef * to_reference
        else:  # a reward is a fact of the step, so it is the old policy's
            cost = kl_estimate(reference - old, algorithm.kl_estimator)
            advantages = advantages - algorithm.kl_coef * sums_to_go(cost, batch.target_calls)
    proximal = behavior if algorithm.proximal == "behavior" else old
    token_loss, ratio, is_clipped = SURROGATES[algorithm.loss](
        logprobs,
        logprobs - proximal,
        advantages,
        batch,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        clip_dual=algorithm.clip_dual,
    )
    sums |= {
        # By zero advantage no gradient is lost to clipping.
        "train/clip_fraction": (is_clipped & (advantages != 0.0)).astype(jnp.float32),
        "train/ratio_mean": ratio,
        "train/ratio_max": ratio,
    }
    if algorithm.correction != "none":
        current = logprobs if algorithm.proximal == "behavior" else old
        correction, measured = _correction(current - behavior, batch, algorithm)
        token_loss = correction * token_loss
        sums |= measured
    if entropy is not None and algorithm.entropy_coef > 0.0:
        extra = extra - algorithm.entropy_coef * entropy
    return _finish(token_loss + extra, batch, sums, entropy)


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
    """Means over tokens of the metric sums of a step; the loss, the token count and maxima stay."""
    count = max(sums["train/num_tokens"], 1.0)
    return {
        name: value if name in _SUMS or is_maximum(name) else value / count
        for name, value in sums.items()
    }


def add_metrics(sums: Metrics, more: Metrics) -> Metrics:
    """The metric sums of two microbatches together."""
    return {
        name: jnp.maximum(value, more[name]) if is_maximum(name) else value + more[name]
        for name, value in sums.items()
    }


def is_maximum(name: str) -> bool:
    """Whether a metric is a maximum, by its name."""
    return name.endswith("_max")


def _check_given(algorithm: AlgorithmConfig, ref_logprobs: object, entropy: object) -> None:
    if algorithm.kl_coef > 0.0 and ref_logprobs is None:
        raise InvalidValue(
            f"kl_coef is {algorithm.kl_coef} without ref_logprobs; pass them or set it to 0.",
            reason="missing",
            key="ref_logprobs",
        )
    if algorithm.entropy_coef > 0.0 and entropy is None:
        raise InvalidValue(
            f"entropy_coef is {algorithm.entropy_coef} without entropy; pass it or set it to 0.",
            reason="missing",
            key="entropy",
        )


def _correction(
    log_ratio: Float[Array, "B R"], batch: Batch, algorithm: AlgorithmConfig
) -> tuple[Float[Array, "B R"], TokenMetrics]:
    ratio = importance_ratio(level_log_ratio(log_ratio, batch, algorithm.correction_level))
    weights, metrics = correction_weights(
        ratio,
        kind=algorithm.correction,
        low=algorithm.correction_low,
        high=algorithm.correction_high,
    )
    if algorithm.proximal == "behavior" and algorithm.loss != "reinforce":
        # The loss has the ratio to the behavior policy already: what is kept is kept as it is.
        weights = (weights > 0.0).astype(jnp.float32)
    return weights, metrics


def _finish(
    token_loss: Float[Array, "B R"],
    batch: Batch,
    sums: TokenMetrics,
    entropy: Float[Array, "B R"] | None,
) -> tuple[Float[Array, ""], Metrics]:
    mask = batch.target_mask
    if entropy is not None:
        sums = sums | {"train/entropy": entropy}
    loss = (_masked(batch.weights, mask) * _masked(token_loss, mask)).sum()
    metrics = {
        name: _masked(value, mask).max() if is_maximum(name) else _masked(value, mask).sum()
        for name, value in sums.items()
    }
    return loss, metrics | {
        "train/loss": loss,
        "train/num_tokens": mask.sum().astype(jnp.float32),
    }


def _masked(values: Float[Array, "B R"], mask: Bool[Array, "B R"]) -> Float[Array, "B R"]:
    return jnp.where(mask, values, 0.0)
