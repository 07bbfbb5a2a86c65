"""Sampling of tokens from logits, with their log-probabilities.

Nothing here sorts: on a CPU, sorting 16 x 49,152 logits takes longer than the whole forward pass. A
filter keeps the logits above a threshold, which is found by bisection on the bits of the float.

On a CPU, branches skip work that no row needs. Other devices would wait at each branch until the
host has read its condition, so their programs have none. The host, which knows what the requests
ask for, chooses among programs with and without filters and likeliest tokens.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key, UInt8, UInt32

from lightning_jax.engine.types import MAX_TOP_LOGPROBS
from lightning_jax.types import Leaf

BLOCK = 256  # tokens per block of the two-level draw
_Drawn = tuple[Int32[Array, " S"], Float[Array, " S"]]  # tokens and their log-probabilities


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Likeliest:
    """Most likely tokens of the policy at temperature 1, best first.

    N is at most MAX_TOP_LOGPROBS.
    """

    ids: Leaf  # int32 [S, N]
    logprobs: Leaf  # float32 [S, N], nats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """One token per slot and its log-probabilities in nats."""

    tokens: Leaf  # int32 [S]
    behavior_logprobs: Leaf  # float32 [S], of the policy at temperature 1, unfiltered and unbiased
    sampling_logprobs: Leaf  # float32 [S], of the sampling distribution; 0 if greedy
    # float32 [S], of the policy at the row's temperature (1 if greedy), unfiltered and unbiased
    tempered_logprobs: Leaf
    likeliest: Likeliest | None = None  # adjusted steps only; zeros or None if no request asks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adjustment:
    """Changes to the logits of one step, for the rows that need them."""

    allowed: Leaf  # uint8 [S, V/8], 8 tokens a byte, lowest bit first; all ones: no mask
    has_likeliest: Leaf  # bool, True to return the likeliest tokens
    bias: Leaf = None  # float32 [S, V], added before the mask; None: no row has one


@dataclass(frozen=True)
class Work:
    """Work of a sampling program without branches. It is done for all rows or for none."""

    filters: bool = False  # False: no row filters
    likeliest: bool = False  # of a step with an adjustment


def unpack_mask(packed: UInt8[Array, "S V8"], vocab_size: int) -> Bool[Array, "S V"]:
    """Return the mask of packed bits, like NumPy's `unpackbits` in little-endian order."""
    bits = packed[:, :, None] >> jnp.arange(8, dtype=jnp.uint8)[None, None] & 1
    return bits.reshape(len(packed), -1)[:, :vocab_size].astype(bool)


def likeliest(logits: Float[Array, "S V"]) -> Likeliest:
    """Return the best tokens of each row and their log-probabilities. Ties are in order of id."""
    logits = logits.astype(jnp.float32)
    values, ids = jax.lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[-1]))
    return Likeliest(ids, values - jax.nn.logsumexp(logits, axis=-1, keepdims=True))


def sample(
    logits: Float[Array, "S V"],
    keys: Key[Array, " S"],
    temperature: Float[Array, " S"],
    top_p: Float[Array, " S"],
    top_k: Int32[Array, " S"],
    min_p: Float[Array, " S"],
    adjustment: Adjustment | None = None,
    work: Work | None = None,
) -> Sampled:
    """Sample one token per row with the row's own key, so that no row affects another.

    Filters apply in this order: bias, mask, temperature, top_k, top_p, min_p. Logits equal to the
    last one kept are kept, too. Each row must have a token that neither a bias of -inf nor the mask
    forbids. Branches skip what no row needs: the draw if all rows are greedy, the best token if
    none is, the thresholds if no row filters, and the likeliest tokens. With `work` there are no
    branches.
    """
    logits = logits.astype(jnp.float32)
    biased = logits
    if adjustment is not None:
        if adjustment.bias is not None:
            biased = logits + adjustment.bias
        allowed = unpack_mask(adjustment.allowed, logits.shape[-1])
        biased = jnp.where(allowed, biased, -jnp.inf)
    greedy = temperature == 0
    # Below 1e-5 the quotient could overflow, and the draw is practically greedy.
    divisor = jnp.where(greedy, 1.0, jnp.maximum(temperature, 1e-5))[:, None]
    scaled = biased / divisor
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
    filtered = ~greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))

    def draw(scaled: Float[Array, "S V"]) -> _Drawn:
        return _draw(scaled, uniform)

    def filter_and_draw(scaled: Float[Array, "S V"]) -> _Drawn:
        keep = keep_mask(scaled, top_p, top_k, min_p, has_loop=work is None)
        keep |= ~filtered[:, None]
        return _draw(jnp.where(keep, scaled, -jnp.inf), uniform)

    def nothing(scaled: Float[Array, "S V"]) -> _Drawn:
        return jnp.zeros(len(scaled), jnp.int32), jnp.zeros(len(scaled), jnp.float32)

    if work is None:
        kind = jnp.where(jnp.any(filtered), 2, jnp.where(jnp.all(greedy), 0, 1))
        drawn, drawn_logprobs = jax.lax.switch(kind, (nothing, draw, filter_and_draw), scaled)
    else:
        drawn, drawn_logprobs = filter_and_draw(scaled) if work.filters else draw(scaled)

    def best() -> Int32[Array, " S"]:
        return jnp.argmax(biased, axis=-1).astype(jnp.int32)

    # If no row is greedy, these tokens are not used.
    likely = best() if work is not None else jax.lax.cond(jnp.any(greedy), best, lambda: drawn)
    tokens = jnp.where(greedy, likely, drawn)
    behavior = _logprobs(logits, tokens)

    def temper() -> Float[Array, " S"]:
        return jnp.where(divisor[:, 0] == 1.0, behavior, _logprobs(logits / divisor, tokens))

    if work is None:
        tempered = jax.lax.cond(jnp.all(divisor == 1.0), lambda: behavior, temper)
    else:
        tempered = temper()
    return Sampled(
        tokens=tokens,
        behavior_logprobs=behavior,
        sampling_logprobs=jnp.where(greedy, 0.0, drawn_logprobs),
        tempered_logprobs=tempered,
        likeliest=None if adjustment is None else _asked_likeliest(logits, adjustment, work),
    )


def _asked_likeliest(
    logits: Float[Array, "S V"], adjustment: Adjustment, work: Work | None
) -> Likeliest | None:
    if work is not None:
        return likeliest(logits) if work.likeliest else None
    shapes = jax.eval_shape(likeliest, logits)

    def nothing(_: Float[Array, "S V"]) -> Likeliest:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.lax.cond(adjustment.has_likeliest, likeliest, nothing, logits)


def _logprobs(logits: Float[Array, "S V"], tokens: Int32[Array, " S"]) -> Float[Array, " S"]:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


SMALLEST_TOP_P = 1e-7  # below it the target could round to 0, and no token would be kept


def keep_mask(
    scaled: Float[Array, "S V"],
    top_p: Float[Array, " S"],
    top_k: Int32[Array, " S"],
    min_p: Float[Array, " S"],
    *,
    has_loop: bool = True,
) -> Bool[Array, "S V"]:
    """Return True for tokens kept by top_k, then top_p of the rest, then min_p.

    At least one per row. Thresholds are found with or without a loop.
    """
    threshold = partial(_threshold, has_loop=has_loop)
    ranks = _sortable(scaled)
    vocab = scaled.shape[-1]
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab).astype(jnp.float32)
    keep = ranks >= threshold(ranks, jnp.ones_like(scaled), k)[:, None]
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    kept_weights = jnp.where(keep, weights, 0.0)
    # At top_p 1 the sum may miss the target because of rounding, so such rows skip this filter.
    top_p = jnp.maximum(top_p, SMALLEST_TOP_P)
    nucleus = threshold(ranks, kept_weights, top_p * jnp.sum(kept_weights, axis=-1))
    keep &= (ranks >= nucleus[:, None]) | (top_p >= 1)[:, None]
    return keep & (weights >= min_p[:, None])  # the largest weight is 1


def _sortable(values: Float[Array, "S V"]) -> UInt32[Array, "S V"]:
    """Return integers in the same order as the floats.

    All bits of negative floats are flipped. For other floats, only the sign bit is flipped.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(
    ranks: UInt32[Array, "S V"],
    weights: Float[Array, "S V"],
    target: Float[Array, " S"],
    *,
    has_loop: bool,
) -> UInt32[Array, " S"]:
    """Return the largest rank such that the tokens at or above it weigh at least `target` in total.

    It is found bit by bit from the top, in a loop or in as many steps without one. Ranks 7 5 5 2
    with weights 1 1 1 1 and target 2 give 5, which keeps three tokens.
    """

    def try_bit(index: Int32[Array, ""], prefix: UInt32[Array, " S"]) -> UInt32[Array, " S"]:
        candidate = prefix | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(ranks >= candidate[:, None], weights, 0.0), axis=-1)
        return jnp.where(weight >= target, candidate, prefix)

    return jax.lax.fori_loop(
        0, 32, try_bit, jnp.zeros(len(ranks), jnp.uint32), unroll=None if has_loop else 32
    )


def _draw(scaled: Float[Array, "S V"], uniform: Float[Array, "S 2"]) -> _Drawn:
    """Return tokens drawn by inverse transform, and their log-probabilities.

    A block is drawn first, then a token in it. Two uniform numbers per row are much cheaper than
    one Gumbel number per logit. A uniform number has 23 bits, so probabilities are exact to 1e-7.
    """
    highest = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - highest)
    rows, vocab = scaled.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    block = _pick(jnp.sum(blocks, axis=-1), uniform[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    tokens = block * BLOCK + _pick(inside, uniform[:, 1])
    chosen = jnp.take_along_axis(scaled - highest, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jnp.log(jnp.sum(weights, axis=-1))


def _pick(weights: Float[Array, "S N"], uniform: Float[Array, " S"]) -> Int32[Array, " S"]:
    """Return an index per row with probability in proportion to its weight, never a weight of 0."""
    cumulative = jnp.cumsum(weights, axis=-1)
    reached = (cumulative > (uniform * cumulative[:, -1])[:, None]) & (weights > 0)
    # If `uniform` is close to 1, rounding can leave no index reached.
    index = jnp.where(reached.any(axis=-1), jnp.argmax(reached, -1), jnp.argmax(weights, -1))
    return index.astype(jnp.int32)
