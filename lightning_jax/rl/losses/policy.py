"""Losses over sampled tokens, as sums of weight times token loss, so that microbatches just add.

The weights are normalised on the host, which knows the whole step. Metrics are also sums, over the
tokens in the mask. `mean_metrics` turns the sums of a step into means. A metric whose name ends in
`_max` is always a maximum.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.choices import check_shape, choose, wrong_result
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.ratios import (
    CORRECTIONS,
    call_sums,
    importance_ratio,
    kl_estimate,
    level_log_ratio,
    sums_to_go,
)
from lightning_jax.rl.losses.surrogates import LOSSES, LossInputs, TokenLoss, teacher_advantages

Metrics = dict[str, Float[Array, ""]]
TokenMetrics = dict[str, Float[Array, "B R"]]
NUM_TOKENS = "train/num_tokens"
_SUMS = frozenset(  # metrics that are not a mean over tokens
    {"train/loss", NUM_TOKENS, "train/value_loss", "train/value_clip_fraction"}
)
_BY_LENGTH = "/length="  # begins the last part of a metric over the tokens of some responses
# Classes of responses by their number of trained tokens: (more than this, at most this).
LENGTHS = {"short": (0, 256), "medium": (256, 1024), "long": (1024, math.inf)}


def policy_loss(
    logprobs: Float[Array, "B R"],
    batch: Batch,
    algorithm: AlgorithmConfig,
    *,
    ref_logprobs: Float[Array, "B R"] | None = None,
    entropy: Float[Array, "B R"] | None = None,
    teacher_kl: Float[Array, "B R"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Return (loss, metric sums).

    The loss is the sum over tokens of `weight * (c * surrogate + kl_coef * KL - entropy_coef *
    entropy + coef * teacher_kl)`. The surrogate is that of `algorithm.loss`. Its ratio is to the
    policy named by `algorithm.proximal`: the sampling policy (`batch.behavior_logprobs`) or the
    trainer's own before the step's first update (`batch.old_logprobs`). If `old_logprobs` is None,
    this is the first update. c is the off-policy correction.

    With `kl_in` "reward" the KL lowers the advantages instead. Each token pays for itself and for
    the later tokens of its call. `teacher_kl` is the KL to a teacher that named its likeliest
    tokens. Scores of only the sampled tokens raise or lower the advantages instead. `entropy` is in
    nats, and an entropy bonus needs its gradient. Values where the mask is False are ignored.
    Raises ValueError if a coefficient is above 0 and its input is missing.
    """
    _check_given(algorithm, ref_logprobs, entropy, batch, teacher_kl)
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
        else:  # a reward is fixed for the step, so it uses the old policy
            cost = kl_estimate(reference - old, algorithm.kl_estimator)
            advantages = advantages - algorithm.kl_coef * sums_to_go(cost, batch.target_calls)
    if teacher_kl is not None:
        to_teacher = _masked(teacher_kl, mask)
        sums["train/distill_kl"] = to_teacher
        extra = extra + batch.teacher.coefs * to_teacher
    elif batch.teacher is not None:
        advantages = advantages + teacher_advantages(logprobs, batch.teacher)
    proximal = behavior if algorithm.proximal == "behavior" else old
    loss = _token_loss(LossInputs(logprobs, logprobs - proximal, advantages, batch), algorithm)
    token_loss = loss.token_loss
    sums |= {
        # With zero advantage, clipping loses no gradient.
        "train/clip_fraction": (loss.is_clipped & (advantages != 0.0)).astype(jnp.float32),
        "train/ratio_mean": loss.ratio,
        "train/ratio_max": loss.ratio,
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
    """Return (weighted negative log-likelihood of the targets in nats, metric sums)."""
    token_loss = -_masked(logprobs, batch.target_mask)
    return _finish(token_loss, batch, {"train/nll": token_loss}, entropy)


def mean_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step as means over tokens, except maxima and the sums in `_SUMS`.

    Metrics of responses of one length are means over their tokens, and left out if there are none.
    """
    means = {}
    for name, value in sums.items():
        over = tokens_metric(name)
        if name in _SUMS or is_maximum(name):
            means[name] = value
        elif over == NUM_TOKENS or sums[over]:
            means[name] = value if name == over else value / max(sums[over], 1.0)
    return means


def tokens_metric(name: str) -> str:
    """Return the metric that counts the tokens over which the metric `name` is a mean."""
    _, by_length, length = name.partition(_BY_LENGTH)
    return f"{NUM_TOKENS}{by_length}{length.partition('/')[0]}"


def add_metrics(sums: Metrics, more: Metrics) -> Metrics:
    """Combine the metric sums of two microbatches."""
    return {
        name: jnp.maximum(value, more[name]) if is_maximum(name) else value + more[name]
        for name, value in sums.items()
    }


def is_maximum(name: str) -> bool:
    """Return whether the metric with this name is a maximum."""
    return name.endswith("_max")


def _check_given(
    algorithm: AlgorithmConfig,
    ref_logprobs: object,
    entropy: object,
    batch: Batch,
    teacher_kl: object,
) -> None:
    if algorithm.kl_coef > 0.0 and ref_logprobs is None:
        raise InvalidValue.missing(
            "ref_logprobs",
            f"kl_coef is {algorithm.kl_coef} without ref_logprobs; pass them or set it to 0.",
        )
    if algorithm.entropy_coef > 0.0 and entropy is None:
        raise InvalidValue.missing(
            "entropy",
            f"entropy_coef is {algorithm.entropy_coef} without entropy; pass it or set it to 0.",
        )
    if batch.teacher is not None and batch.teacher.top is not None and teacher_kl is None:
        raise InvalidValue.missing(
            "teacher_kl",
            "a teacher named its likeliest tokens without teacher_kl; pass the KL to it.",
        )


def _token_loss(inputs: LossInputs, algorithm: AlgorithmConfig) -> TokenLoss:
    surrogate = choose(algorithm, "loss", LOSSES)
    loss = surrogate(inputs)
    if not isinstance(loss, TokenLoss):
        raise wrong_result(surrogate, "loss", type(loss).__name__, "TokenLoss")
    for values in (loss.token_loss, loss.ratio):
        check_shape(surrogate, "loss", values, inputs.logprobs.shape)
    return loss


def _correction(
    log_ratio: Float[Array, "B R"], batch: Batch, algorithm: AlgorithmConfig
) -> tuple[Float[Array, "B R"], TokenMetrics]:
    """Return (factor of each token's policy gradient, without a gradient itself; metrics)."""
    ratio = importance_ratio(level_log_ratio(log_ratio, batch, algorithm.correction_level))
    ratio = jax.lax.stop_gradient(ratio)
    correct = choose(algorithm, "correction", CORRECTIONS)
    weights = correct(ratio)
    check_shape(correct, "correction", weights, ratio.shape)
    changed = {"truncate": "truncated", "mask": "masked"}.get(str(algorithm.correction), "changed")
    name, is_changed = f"train/correction_{changed}_share", (weights != ratio).astype(jnp.float32)
    metrics = {
        "train/correction_ratio_mean": ratio,
        "train/correction_ratio_max": ratio,
        name: is_changed,
    }
    lengths = call_sums(batch.target_mask.astype(jnp.float32), batch.target_calls)
    for length, (low, high) in LENGTHS.items():
        is_one = ((lengths > low) & (lengths <= high)).astype(jnp.float32)
        metrics |= {
            f"{NUM_TOKENS}{_BY_LENGTH}{length}": is_one,
            f"{name}{_BY_LENGTH}{length}": is_one * is_changed,
        }
    if algorithm.proximal == "behavior" and algorithm.loss not in ("reinforce", "raft"):
        # The loss already contains the ratio to the behavior policy, so kept tokens get weight 1.
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
        NUM_TOKENS: mask.sum().astype(jnp.float32),
    }


def _masked(values: Float[Array, "B R"], mask: Bool[Array, "B R"]) -> Float[Array, "B R"]:
    return jnp.where(mask, values, 0.0)
