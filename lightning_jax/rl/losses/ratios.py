"""Functions of the ratio of two policies: KL estimates and off-policy correction.

A log-ratio is the difference of two log-probabilities of one token, in nats. It is 0 where masked.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batch import Batch
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.segments import call_means, call_sums

# From the ratio w of the old policy to the behavior policy to the factor of each token's loss.
Correction = Callable[[Float[Array, "B R"]], Float[Array, "B R"]]

# Keeps exp() finite in float32. A token beyond it is hopelessly off-policy and gets no gradient.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0  # nats of one token; above it k3 gets no gradient, which would grow like k3 itself


def importance_ratio(log_ratio: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """Return exp(log_ratio), clipped to stay finite."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_estimate(log_ratio: Float[Array, "B R"], estimator: str = "k3") -> Float[Array, "B R"]:
    """Estimate KL(p, q) from samples of p, given x = log q - log p.

    From Schulman 2020, "Approximating KL divergence". k1 = -x is unbiased. k2 = x^2 / 2 is biased
    and never negative. k3 = exp(x) - 1 - x is unbiased and never negative, up to a bound of MAX_K3.
    Raises ValueError for another estimator.
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio)
    if estimator == "k3":
        # Near x = 0, where sampler and trainer agree, exp(x) - 1 would be only rounding error.
        log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return jnp.minimum(jnp.expm1(log_ratio) - log_ratio, MAX_K3)
    raise InvalidValue(
        f"KL estimator is {estimator!r}; expected k1, k2 or k3.", reason="unknown", key="estimator"
    )


def level_log_ratio(
    log_ratio: Float[Array, "B R"], batch: Batch, level: str
) -> Float[Array, "B R"]:
    """Return the log-ratio of each token at a level.

    "token": the token's own. "sequence": the sum over the call's tokens. "sequence_mean": the mean
    over the call's tokens, which is the geometric mean of their ratios. Raises ValueError for
    another level.
    """
    if level == "token":
        return log_ratio
    if level == "sequence":
        return call_sums(log_ratio, batch.target_calls)
    if level == "sequence_mean":
        return call_means(log_ratio, batch.target_calls, batch.target_mask)
    raise InvalidValue(
        f"level is {level!r}; expected token, sequence or sequence_mean.",
        reason="unknown",
        key="level",
    )


def truncate(high: float = 2.0) -> Correction:
    """Build `min(w, high)`, truncated importance sampling (V-trace's rho, arXiv 1802.01561)."""
    return lambda ratio: jnp.minimum(ratio, high)


def mask(low: float = 0.5, high: float = 2.0) -> Correction:
    """Build `w` if it is in [low, high], otherwise 0."""
    return lambda ratio: jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


CORRECTIONS: dict[str, Callable[[AlgorithmConfig], Correction]] = {
    "truncate": lambda a: truncate(a.correction_bounds[1]),
    "mask": lambda a: mask(*a.correction_bounds),
}
