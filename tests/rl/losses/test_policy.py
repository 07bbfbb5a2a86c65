import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.losses.policy import LENGTHS, mean_metrics, policy_loss, supervised_loss

CLIP = AlgorithmConfig(clip_low=0.2, clip_high=0.3)
only_loss = jax.jit(policy_loss, static_argnums=2)
loss_and_gradient = jax.jit(jax.value_and_grad(policy_loss, has_aux=True), static_argnums=2)


def clipped_loss(logprobs, batch, *, kl_coef: float = 0.0, **measured):
    return only_loss(logprobs, batch, dataclasses.replace(CLIP, kl_coef=kl_coef), **measured)


def one_row(behavior, advantages, weights, mask=None, calls=None) -> Batch:
    """Build a batch of one row with only the losses' inputs, by default with one call."""
    mask = [True] * len(behavior) if mask is None else mask
    calls = [0] * len(behavior) if calls is None else calls
    empty = jnp.asarray(np.zeros((1, len(behavior)), np.int32))
    as_row = [jnp.asarray([values], jnp.float32) for values in (behavior, advantages, weights)]
    calls = jnp.asarray([calls], jnp.int32)
    return Batch(empty, empty, empty, empty, empty, jnp.asarray([mask]), calls, *as_row)


def row(*values: float) -> jax.Array:
    return jnp.asarray([values], jnp.float32)


def test_policy_loss_by_hand():
    # ratios e^{logp - behavior}: 1, 1.5, 0.5, 0.5; advantages 1, 1, 1, -1; clip to [0.8, 1.3]
    # min(r A, clip(r) A): 1, 1.3 (clipped), 0.5 (not clipped, because it may rise), -0.8 (clipped)
    # loss = -(0.1 * 1 + 0.2 * 1.3 + 0.3 * 0.5 - 0.4 * 0.8) = -0.19
    behavior = [-1.0, -2.0, -1.0, -1.0]
    logprobs = row(*(b + math.log(r) for b, r in zip(behavior, (1, 1.5, 0.5, 0.5), strict=True)))
    batch = one_row(behavior, [1, 1, 1, -1], [0.1, 0.2, 0.3, 0.4])
    loss, sums = clipped_loss(logprobs, batch)
    assert loss == pytest.approx(-0.19, abs=1e-6)
    metrics = mean_metrics({name: float(value) for name, value in sums.items()})
    assert metrics["train/loss"] == pytest.approx(-0.19, abs=1e-6)
    assert metrics["train/num_tokens"] == 4.0
    assert metrics["train/clip_fraction"] == 0.5
    # k3 = r - 1 - ln r: 0, 0.5 - ln 1.5 = 0.0945, twice -0.5 + ln 2 = 0.1931; mean 0.1202
    assert metrics["train/mismatch_kl"] == pytest.approx(0.120206, abs=1e-5)


def test_kl_to_the_reference_by_hand():
    # ref - logp = ln 2: k3 = 2 - 1 - ln 2 = 0.306853; loss = 0.5 * (-1 + 0.1 * 0.306853)
    batch = one_row([-1.0], [1.0], [0.5])
    loss, sums = clipped_loss(row(-1.0), batch, kl_coef=0.1, ref_logprobs=row(-1.0 + math.log(2)))
    assert loss == pytest.approx(-0.5 + 0.05 * 0.306853, abs=1e-6)
    assert sums["train/kl_to_reference"] == pytest.approx(0.306853, abs=1e-6)


def test_kl_without_reference_is_refused():
    with raises_coded(InvalidValue, "missing", "ref_logprobs"):
        clipped_loss(row(-1.0), one_row([-1.0], [1.0], [1.0]), kl_coef=0.1)


def test_gradient_on_policy_is_weighted_advantage_and_clipped_tokens_have_none():
    behavior = [-1.0, -1.0, -1.0, -1.0]
    batch = one_row(behavior, [2.0, -3.0, 1.0, -1.0], [0.1, 0.2, 0.3, 0.4])
    logprobs = row(-1.0, -1.0, -1.0 + math.log(1.5), -1.0 + math.log(0.5))
    _, gradient = loss_and_gradient(logprobs, batch, CLIP)
    np.testing.assert_allclose(gradient[0], [-0.2, 0.6, 0.0, 0.0], atol=1e-6)


def test_supervised_loss_by_hand():
    # 0.25 * 1 + 0.5 * 2 = 1.25, without the masked token
    batch = one_row([0, 0, 0], [1, 1, 1], [0.25, 0.5, 9.0], mask=[True, True, False])
    loss, sums = supervised_loss(row(-1.0, -2.0, -7.0), batch, entropy=row(1.0, 2.0, 9.0))
    assert loss == 1.25
    metrics = mean_metrics({name: float(value) for name, value in sums.items()})
    assert metrics == {
        "train/loss": 1.25,
        "train/num_tokens": 2.0,
        "train/nll": 1.5,
        "train/entropy": 1.5,
    }


def test_masked_values_change_neither_loss_nor_gradient():
    @jax.jit
    def run(logprobs, batch, reference):
        objective = lambda x: clipped_loss(  # noqa: E731
            x, batch, kl_coef=0.1, ref_logprobs=reference, entropy=x
        )
        return jax.value_and_grad(objective, has_aux=True)(logprobs)

    def value(padding: float):
        batch = one_row([-1.0, padding], [1.0, 0.0], [0.5, 0.0], mask=[True, False])
        return run(row(-1.2, padding), batch, row(-1.5, padding))

    (clean_loss, clean_sums), clean_gradient = value(0.0)
    for padding in (float("nan"), float("inf"), -1e30):
        (loss, sums), gradient = value(padding)
        assert loss == clean_loss
        assert sums == clean_sums
        np.testing.assert_array_equal(gradient, clean_gradient)


def test_rows_and_order_only_add_up():
    rng = np.random.default_rng(0)
    behavior, advantages, weights, current = rng.normal(size=(4, 6))
    whole = one_row(behavior, advantages, weights)
    order = rng.permutation(6)
    mixed = jax.tree.map(lambda leaf: np.asarray(leaf)[:, order].reshape(2, 3), whole)
    logprobs = row(*current)
    expected, sums = clipped_loss(logprobs, whole)
    loss, mixed_sums = clipped_loss(np.asarray(logprobs)[:, order].reshape(2, 3), mixed)
    assert loss == pytest.approx(float(expected), abs=1e-5)
    assert mixed_sums["train/clip_fraction"] == sums["train/clip_fraction"]


def test_nothing_selected_gives_zeros():
    batch = one_row([-1.0], [1.0], [1.0], mask=[False])
    loss, sums = clipped_loss(row(-3.0), batch)
    assert loss == 0.0
    assert set(mean_metrics({name: float(v) for name, v in sums.items()}).values()) == {0.0}


def test_a_hopeless_token_stays_finite():
    # exp(200) is infinite in float32
    batch = dataclasses.replace(one_row([-200.0], [-1.0], [1.0]))
    (loss, _), gradient = loss_and_gradient(row(0.0), batch, CLIP)
    assert np.isfinite(loss)
    assert gradient == 0.0


def test_mismatch_kl_is_not_rounding_noise_near_zero():
    # k3(1e-4) = 5e-9, but exp(x) - 1 - x in float32 would be off by 1e-7
    _, sums = clipped_loss(row(-1e-4), one_row([0.0], [1.0], [1.0]))
    assert sums["train/mismatch_kl"] == pytest.approx(5e-9, rel=1e-2)


LN = math.log


def loss_of(logprobs, batch, settings=None, **knobs):
    """Return the loss, its gradient by the log-probs, and the mean metrics."""
    algorithm = AlgorithmConfig(**knobs)
    (loss, sums), gradient = loss_and_gradient(logprobs, batch, algorithm, **(settings or {}))
    return loss, gradient, mean_metrics({name: float(value) for name, value in sums.items()})


def test_kl_estimators_in_the_loss_by_hand():
    # log p - log p_ref = ln 2: k1 0.6931, k2 0.2402, k3 0.5 - 1 + 0.6931 = 0.1931;
    # gradients 1, ln 2 and 1 - 0.5; advantage 0, weight 0.5, coefficient 0.1
    batch, measured = one_row([-1.0], [0.0], [0.5]), {"ref_logprobs": row(-1.0 - LN(2))}
    for estimator, value, slope in (("k1", LN(2), 1), ("k2", LN(2) ** 2 / 2, LN(2)),
                                    ("k3", LN(2) - 0.5, 0.5)):  # fmt: skip
        loss, gradient, metrics = loss_of(
            row(-1.0), batch, measured, kl_coef=0.1, kl_estimator=estimator
        )
        assert loss == pytest.approx(0.05 * value, abs=1e-6)
        assert gradient[0, 0] == pytest.approx(0.05 * slope, abs=1e-6)
        assert metrics["train/kl_to_reference"] == pytest.approx(value, abs=1e-6)


def test_kl_in_the_reward_lowers_a_token_by_what_follows_in_its_call():
    # k1 per token is 0.2, 0.4 | 0.1, so sums to go are 0.6, 0.4 | 0.1. A = 1 - 0.5 * sum to go.
    # On-policy the gradient is -weight * A, and the KL itself has none.
    batch = one_row([-1.0] * 3, [1.0] * 3, [1.0] * 3, calls=[0, 0, 1])
    measured = {"ref_logprobs": row(-1.2, -1.4, -1.1)}
    loss, gradient, metrics = loss_of(
        row(-1, -1, -1), batch, measured, kl_coef=0.5, kl_estimator="k1", kl_in="reward"
    )
    np.testing.assert_allclose(gradient, [[-0.7, -0.8, -0.95]], atol=1e-6)
    assert loss == pytest.approx(-2.45, abs=1e-6)
    assert metrics["train/kl_to_reference"] == pytest.approx(0.7 / 3, abs=1e-6)


def test_entropy_bonus_by_hand():
    # 0.5 * (-1 - 0.1 * 2), with derivative -0.5 * 0.1 by the entropy
    batch = one_row([-1.0], [1.0], [0.5])
    algorithm = AlgorithmConfig(entropy_coef=0.1)
    run = lambda entropy: policy_loss(row(-1.0), batch, algorithm, entropy=entropy)[0]  # noqa: E731
    loss, slope = jax.jit(jax.value_and_grad(run))(row(2.0))
    assert loss == pytest.approx(-0.6, abs=1e-6)
    assert slope[0, 0] == pytest.approx(-0.05, abs=1e-6)
    with raises_coded(InvalidValue, "missing", "entropy"):
        policy_loss(row(-1.0), batch, algorithm)


def test_decoupled_ppo_by_hand():
    # Behavior -> old: 4 and 0.5, truncated to 2 and 0.5. Old -> current: 1.1 and 1.5, clipped to
    # 1.1 and 1.2. loss = -(2 * 1.1 + 0.5 * 1.2). The clipped token has no gradient.
    behavior = (-1.0, -1.0)
    old = (-1.0 + LN(4), -1.0 + LN(0.5))
    batch = dataclasses.replace(one_row(behavior, [1, 1], [1, 1]), old_logprobs=row(*old))
    loss, gradient, metrics = loss_of(
        row(old[0] + LN(1.1), old[1] + LN(1.5)), batch, proximal="old", correction="truncate"
    )
    assert loss == pytest.approx(-2.8, abs=1e-5)
    np.testing.assert_allclose(gradient, [[-2.2, 0.0]], atol=1e-5)
    assert metrics["train/ratio_mean"] == pytest.approx(1.3, abs=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(1.5, abs=1e-5)
    assert metrics["train/correction_ratio_mean"] == pytest.approx(2.25, abs=1e-5)
    assert metrics["train/correction_ratio_max"] == pytest.approx(4.0, abs=1e-5)
    assert metrics["train/correction_truncated_share"] == 0.5
    # k3 of old to behavior: 4 - 1 - ln 4 and 0.5 - 1 + ln 2
    assert metrics["train/mismatch_kl"] == pytest.approx((3 - LN(4) + LN(2) - 0.5) / 2, abs=1e-5)


def test_in_the_only_update_old_is_current():
    # r = 1, and the corrections are the ratios: 3 truncated to 2, and 0.5. Gradient -w * A.
    batch = one_row([-1.0, -1.0], [1.0, -1.0], [1.0, 1.0])
    knobs = {"proximal": "old", "correction": "truncate"}
    now = row(-1 + LN(3), -1 + LN(0.5))
    loss, gradient, metrics = loss_of(now, batch, **knobs)
    assert loss == pytest.approx(-1.5, abs=1e-6)
    np.testing.assert_allclose(gradient, [[-2.0, 0.5]], atol=1e-6)
    assert metrics["train/ratio_max"] == 1.0 and metrics["train/clip_fraction"] == 0.0
    with_old = dataclasses.replace(batch, old_logprobs=now)
    np.testing.assert_array_equal(loss_of(now, with_old, **knobs)[1], gradient)


@pytest.mark.parametrize(
    ("level", "gradient", "share"),
    [
        # Token ratios are 2, 0.5 | 1.5, 2. Bounds are 0.6 and 1.8.
        ("token", [0, 0, -1.5, 0], 0.75),
        ("sequence", [-1, -1, 0, 0], 0.5),  # 1 and 3 per call
        ("sequence_mean", [-1, -1, -(3**0.5), -(3**0.5)], 0.0),  # 1 and sqrt 3 = 1.73
    ],
)
def test_masking_by_token_and_by_sequence(level, gradient, share):
    batch = one_row([-1.0] * 4, [1.0] * 4, [1.0] * 4, calls=[0, 0, 1, 1])
    _, found, metrics = loss_of(
        row(*(-1 + LN(r) for r in (2, 0.5, 1.5, 2))),
        batch,
        loss="reinforce",
        correction="mask",
        correction_level=level,
        correction_low=0.6,
        correction_high=1.8,
    )
    np.testing.assert_allclose(found, [gradient], atol=1e-5)
    assert metrics["train/correction_masked_share"] == share


def test_the_bounds_of_a_mean_ratio_bind():
    """Two calls whose tokens are 0.5 % and 5 % more likely now, by default bounds."""
    _, found, _ = loss_of(
        row(*(-1 + LN(r) for r in (1.005, 1.005, 1.05, 1.05))),
        one_row([-1.0] * 4, [1.0] * 4, [1.0] * 4, calls=[0, 0, 1, 1]),
        loss="reinforce",
        correction="mask",
        correction_level="sequence_mean",
    )
    np.testing.assert_allclose(found, [[-1.005, -1.005, 0, 0]], atol=1e-5)


@pytest.mark.parametrize(("correction", "changed"), [("truncate", "truncated"), ("mask", "masked")])
def test_corrected_share_is_told_by_length_of_the_response(correction, changed):
    # Ratios of 4 are above the bound of 2: half of the 300 tokens of one response, and none of the
    # two of another. Padding belongs to no response.
    ratios, calls = [4.0, 1.0] * 150 + [1.0, 1.0, 4.0], [0] * 300 + [1, 1, -1]
    mask = [True] * 302 + [False]
    batch = one_row([-1.0] * 303, [1.0] * 303, [1.0] * 303, mask=mask, calls=calls)
    now = row(*(-1 + LN(r) for r in ratios))
    _, _, metrics = loss_of(now, batch, loss="reinforce", correction=correction)
    name = f"train/correction_{changed}_share"
    assert metrics[name] == pytest.approx(150 / 302)
    assert metrics[f"{name}/length=medium"] == 0.5 and metrics[f"{name}/length=short"] == 0.0
    assert metrics["train/num_tokens/length=medium"] == 300.0
    assert metrics["train/num_tokens/length=short"] == 2.0
    assert not [key for key in metrics if key.endswith("length=long")]  # there are none


def test_classes_of_lengths_meet() -> None:
    bounds = list(LENGTHS.values())
    assert bounds[0][0] == 0 and bounds[-1][1] == math.inf
    assert [high for _, high in bounds[:-1]] == [low for low, _ in bounds[1:]]


def test_a_loss_with_the_behavior_ratio_is_masked_and_not_multiplied():
    # Of the ratios 1.5 and 3, only the first is in [0.5, 2]. It keeps its own gradient, -1.5.
    batch = one_row([-1.0, -1.0], [1.0, 1.0], [1.0, 1.0])
    _, gradient, _ = loss_of(row(-1 + LN(1.5), -1 + LN(3)), batch, clip_high=9.0, correction="mask")
    np.testing.assert_allclose(gradient, [[-1.5, 0.0]], atol=1e-5)


KNOBS = (
    {},
    {"loss": "gspo"},
    {"loss": "cispo", "kl_coef": 0.1, "kl_in": "reward"},
    {"loss": "reinforce", "correction": "truncate", "correction_level": "sequence"},
    {
        **{"proximal": "old", "correction": "mask", "correction_level": "sequence_mean"},
        **{"correction_low": 0.5, "correction_high": 2.0},
    },
)


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: "-".join(map(str, knobs.values())))
def test_padding_row_order_and_packing_change_nothing(knobs):
    """Check five calls in one row, and in three rows with padding, against each call alone."""
    algorithm = AlgorithmConfig(**knobs)
    rng, sizes = np.random.default_rng(0), (3, 1, 4, 2, 2)
    calls = [0.4 * rng.normal(size=(6, size)) for size in sizes]  # six values per target

    @jax.jit
    def measure(logprobs, batch, ref_logprobs):
        run = lambda x: policy_loss(x, batch, algorithm, ref_logprobs=ref_logprobs)  # noqa: E731
        (loss, sums), gradient = jax.value_and_grad(run, has_aux=True)(logprobs)
        return loss, sums, gradient

    def packed(rows):
        """Return loss, metric sums and each call's gradient. `rows` lists the calls of each row."""
        arrays = np.full((6, len(rows), 12), 7.0, np.float32)  # padding values must not matter
        index = np.full((len(rows), 12), -1, np.int32)
        for b, row_calls in enumerate(rows):
            start = 0
            for call in row_calls:
                where = slice(start, start + sizes[call])
                arrays[:, b, where], index[b, where] = calls[call], call
                start += sizes[call]
        current, reference, old, behavior, advantages, weights = jnp.asarray(arrays)
        ints, ids = jnp.zeros(index.shape, jnp.int32), jnp.asarray(index)
        batch = Batch(
            ints, ints, ints, ints, ints, ids >= 0, ids, behavior, advantages, weights, old
        )
        loss, sums, gradient = measure(current, batch, reference)
        assert not np.asarray(gradient)[index < 0].any()
        return loss, sums, [np.asarray(gradient)[index == call] for call in range(len(sizes))]

    whole = packed([[0, 1, 2, 3, 4]])
    others = packed([[4, 2], [], [3, 0, 1]])
    unpacked = [packed([[call]]) for call in range(len(sizes))]
    assert others[0] == pytest.approx(float(whole[0]), abs=1e-5)
    assert sum(float(loss) for loss, *_ in unpacked) == pytest.approx(float(whole[0]), abs=1e-5)
    for name, value in whole[1].items():
        assert others[1][name] == pytest.approx(float(value), abs=1e-4), name
    assert sum(np.count_nonzero(gradient) for gradient in whole[2]) > 4
    for call in range(len(sizes)):
        np.testing.assert_allclose(others[2][call], whole[2][call], atol=1e-5)
        np.testing.assert_allclose(unpacked[call][2][call], whole[2][call], atol=1e-5)
