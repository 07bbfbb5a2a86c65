"""Tests of sampling: draws match the filtered distribution, and rows are independent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.engine.sampling import (
    Adjustment,
    Sampled,
    keep_mask,
    likeliest,
    sample,
    unpack_mask,
)

N = 4000


def draw(
    probs: list[float],
    *,
    rows: int = N,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Sampled:
    logits = jnp.broadcast_to(jnp.log(jnp.array(probs)), (rows, len(probs)))
    return jax.jit(sample)(
        logits,
        jax.random.split(jax.random.key(seed), rows),
        jnp.full(rows, temperature),
        jnp.full(rows, top_p),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, min_p),
    )


def adjusted(bias: jax.Array) -> Adjustment:
    """Return an adjustment with this bias and no mask."""
    allowed = np.full((bias.shape[0], (bias.shape[1] + 7) // 8), 0xFF, np.uint8)
    return Adjustment(allowed, np.bool_(False), bias)


PROBS = [0.1, 0.4, 0.05, 0.25, 0.2]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBS),
        # Squares of the probabilities: .01 .16 .0025 .0625 .04, sum .275.
        ({"temperature": 0.5}, [0.0364, 0.5818, 0.0091, 0.2273, 0.1455]),
        ({"top_k": 2}, [0, 0.6154, 0, 0.3846, 0]),  # .4 and .25 of .65
        ({"top_p": 0.6}, [0, 0.6154, 0, 0.3846, 0]),  # .4 is less than .6, .4 + .25 is not
        ({"top_p": 0.4}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.45}, [0, 0.4706, 0, 0.2941, 0.2353]),  # .18 and above
        ({"top_k": 3, "top_p": 0.7}, [0, 0.6154, 0, 0.3846, 0]),  # of .85: .47 .29 .24
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"temperature": 1e-9}, [0, 1, 0, 0, 0]),
    ],
)
def test_frequencies_and_logprobs_follow_the_filtered_distribution(settings, expected):
    sampled = draw(PROBS, **settings)
    counts = np.bincount(sampled.tokens, minlength=5) / N
    # Five standard deviations of a frequency over N draws.
    tolerance = 5 * np.sqrt(np.array(expected) * (1 - np.array(expected)) / N)
    assert np.all(np.abs(counts - expected) <= tolerance + 1e-4)
    wanted = np.log(np.array(expected)[sampled.tokens])
    np.testing.assert_allclose(sampled.sampling_logprobs, wanted, atol=1e-3)
    np.testing.assert_allclose(
        sampled.behavior_logprobs, np.log(np.array(PROBS)[sampled.tokens]), atol=1e-5
    )


def test_filters_agree_with_sorting_on_a_large_vocabulary():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 5000)).astype(np.float32) * 3
    top_p = np.array([1.0, 0.9, 0.5, 1.0, 0.95, 0.999], np.float32)
    top_k = np.array([0, 0, 0, 40, 100, 4999], np.int32)
    min_p = np.array([0.01, 0, 0, 0, 0.02, 0], np.float32)
    kept = np.asarray(jax.jit(keep_mask)(logits, top_p, top_k, min_p))
    for row in range(6):
        order = np.argsort(-logits[row])
        weights = np.exp(logits[row][order].astype(np.float64) - logits[row].max())
        weights[top_k[row] or 5000 :] = 0
        before = (np.cumsum(weights) - weights) / weights.sum()
        keep = (weights > 0) & (before < top_p[row]) & (weights >= min_p[row])
        # The device's float32 sums may move the edge by one token.
        assert abs(int(kept[row].sum()) - int(keep.sum())) <= 1
        assert set(np.flatnonzero(kept[row])) >= set(order[keep][:-1])


def test_a_row_does_not_depend_on_the_others():
    rng = np.random.default_rng(0)
    logits = jnp.array(rng.normal(size=(8, 600)), jnp.float32)
    ones, zeros = jnp.ones(8), jnp.zeros(8)
    none = jnp.zeros(8, jnp.int32)
    plain = jax.jit(sample)(logits, jax.random.split(jax.random.key(1), 8), ones, ones, none, zeros)
    # Row 0 does not change among filtered or greedy rows, which use another branch.
    mixed = jax.jit(sample)(
        logits,
        jax.random.split(jax.random.key(1), 8),
        ones.at[1].set(0.0),
        ones.at[2].set(0.5),
        none.at[3].set(4),
        zeros,
    )
    for name in ("tokens", "behavior_logprobs", "sampling_logprobs"):
        assert getattr(plain, name)[0] == getattr(mixed, name)[0]
        assert getattr(plain, name)[4] == getattr(mixed, name)[4]

    assert plain.tempered_logprobs.tolist() == plain.behavior_logprobs.tolist()


def test_tempered_logprobs_are_the_policys_at_the_rows_temperature_whatever_filters():
    temperature = jnp.array([0.5, 2.0, 1.0, 0.0])
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.25, 0.25])), (4, 3))
    bias = jnp.zeros((4, 3)).at[:, 0].set(-jnp.inf)
    keys, ones = jax.random.split(jax.random.key(0), 4), jnp.ones(4)
    top_k = jnp.ones(4, jnp.int32)
    sampled = jax.jit(sample)(logits, keys, temperature, ones, top_k, ones * 0, adjusted(bias))
    # A square weighs 1/4, 1/16 and 1/16; a root 0.7071, 0.5 and 0.5.
    expected = np.log([1 / 6, 0.5 / 1.7071, 0.25, 0.25])
    np.testing.assert_allclose(sampled.tempered_logprobs, expected, atol=1e-4)
    behavior = sampled.behavior_logprobs.tolist()
    assert sampled.tempered_logprobs.tolist()[2:] == behavior[2:]


def test_same_key_same_token_other_key_other_tokens():
    first, again, other = draw(PROBS, seed=3), draw(PROBS, seed=3), draw(PROBS, seed=4)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert np.any(np.asarray(first.tokens) != np.asarray(other.tokens))


def test_impossible_tokens_are_never_drawn():
    sampled = draw([0.0, 0.5, 0.0, 0.5, 0.0])
    assert set(np.asarray(sampled.tokens).tolist()) == {1, 3}
    assert np.all(np.isfinite(sampled.sampling_logprobs))


def test_a_bias_changes_the_draw_and_not_the_policys_logprobs():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]] * N))
    bias = jnp.broadcast_to(jnp.array([-jnp.inf, 0.0, jnp.log(2.0), -jnp.inf]), (N, 4))
    temperature = jnp.ones(N).at[0].set(0.0)
    keys = jax.random.split(jax.random.key(0), N)
    none, ones = jnp.zeros(N, jnp.int32), jnp.ones(N)
    sampled = jax.jit(sample)(logits, keys, temperature, ones, none, jnp.zeros(N), adjusted(bias))
    tokens = np.asarray(sampled.tokens)
    # 0.25 and 0.125 * 2 are equally likely to be drawn; the policy's log-probabilities differ.
    assert set(tokens.tolist()) == {1, 2}
    assert abs(np.mean(tokens == 1) - 0.5) < 0.035
    np.testing.assert_allclose(sampled.sampling_logprobs[1:], np.log(0.5), atol=1e-6)
    expected = np.where(tokens == 1, np.log(0.25), np.log(0.125))
    np.testing.assert_allclose(sampled.behavior_logprobs, expected, atol=1e-6)


def test_packed_masks_forbid_tokens_whatever_the_bias():
    allowed = np.random.default_rng(0).random((3, 21)) < 0.3
    allowed[:, 20] = True
    packed = np.packbits(allowed, axis=1, bitorder="little")
    np.testing.assert_array_equal(unpack_mask(jnp.asarray(packed), 21), allowed)
    likely = jnp.asarray(np.where(allowed, 0.0, 50.0), jnp.float32)
    ones, none = jnp.ones(3), jnp.zeros(3, jnp.int32)
    for bias in (None, likely):
        keys = jax.random.split(jax.random.key(0), 3)
        adjustment = Adjustment(packed, np.bool_(True), bias)
        sampled = jax.jit(sample)(likely, keys, ones, ones, none, ones * 0, adjustment)
        tokens = np.asarray(sampled.tokens)
        assert allowed[np.arange(3), tokens].all()
        np.testing.assert_allclose(sampled.sampling_logprobs, -np.log(allowed.sum(1)), atol=1e-5)
        assert sampled.behavior_logprobs.max() < -49
        # The likeliest tokens are the policy's own, so the first one may be forbidden.
        assert not allowed[np.arange(3), np.asarray(sampled.likeliest.ids)[:, 0]].any()


def test_the_likeliest_come_best_first():
    best = likeliest(jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])))
    assert best.ids.tolist() == [[1, 2, 0], [0, 2, 1]]  # no more than there are
    np.testing.assert_allclose(np.exp(best.logprobs), [[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], rtol=1e-5)


def test_a_vocabulary_of_several_blocks():
    # 600 tokens are three blocks of 256, the last one padded. All mass is on the last token of two
    # blocks.
    probs = [0.0] * 600
    probs[255], probs[599] = 0.25, 0.75
    tokens = np.asarray(draw(probs).tokens)
    assert set(tokens.tolist()) == {255, 599}
    assert abs(np.mean(tokens == 599) - 0.75) < 0.035


def test_the_smallest_top_p_keeps_the_likeliest():
    scaled = jnp.log(jnp.array([[0.2, 0.5, 0.3]]))
    ones, off = jnp.ones(1), jnp.zeros(1)
    for top_p in (1e-5, 1e-38, 1e-45):
        keep = keep_mask(scaled, top_p * ones, jnp.zeros(1, jnp.int32), off)
        assert keep.tolist() == [[False, True, False]]
