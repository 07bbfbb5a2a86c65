"""Functions of the ratio of two policies: KL estimates and off-policy correction.

A log-ratio is the difference of two log-probabilities of one token, in nats. It is 0 where masked.
Ratios of a whole call are sums over its targets, which are contiguous in a row:

calls        4   4   4   7   7  -1
values       1   2   3   4   5   0
call_sums    6   6   6   9   9   0
sums_to_go   6   5   3   9   5   0
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.config import AlgorithmConfig

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
    raise InvalidValue.unknown(
        "estimator", f"KL estimator is {estimator!r}; expected k1, k2 or k3."
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
    raise InvalidValue.unknown(
        "level", f"level is {level!r}; expected token, sequence or sequence_mean."
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


def call_sums(values: Float[Array, "B R"], calls: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """Return at each target the sum over the targets of its call."""
    segments = jnp.cumsum(_starts(calls).astype(jnp.int32), axis=1) - 1

    def one_row(values: Float[Array, " R"], segments: Int[Array, " R"]) -> Float[Array, " R"]:
        return jax.ops.segment_sum(values, segments, num_segments=len(values))[segments]

    return jax.vmap(one_row)(values, segments)


def call_means(
    values: Float[Array, "B R"], calls: Int[Array, "B R"], mask: Bool[Array, "B R"]
) -> Float[Array, "B R"]:
    """Return at each target the mean over its call's targets; `values` must be 0 where masked."""
    counts = call_sums(mask.astype(jnp.float32), calls)
    return call_sums(values, calls) / jnp.maximum(counts, 1.0)


def sums_to_go(values: Float[Array, "B R"], calls: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """Return at each target the sum over it and the later targets of its call."""
    is_last = _starts(calls[:, ::-1])[:, ::-1]

    # Of two neighbouring ranges, the left one adds the sum at the start of the right one, unless
    # it ends its call. A reverse scan passes the right range first.
    def join(right: tuple[Array, Array], left: tuple[Array, Array]) -> tuple[Array, Array]:
        total, ends = left
        return jnp.where(ends, total, total + right[0]), ends | right[1]

    return jax.lax.associative_scan(join, (values, is_last), reverse=True, axis=1)[0]


def _starts(calls: Int[Array, "B R"]) -> Bool[Array, "B R"]:
    """Return a mask of targets whose call index differs from that of the target before."""
    first = jnp.ones_like(calls[:, :1], dtype=jnp.bool_)
    return jnp.concatenate([first, calls[:, 1:] != calls[:, :-1]], axis=1)
