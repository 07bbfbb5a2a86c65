"""Tests by enumeration of each credit scheme's expected gradient against the true gradient.

The true gradient is that of the expected return. In the process below the agent chooses when to
stop. A call answers 0 (stop), 1 or 2 (go on), and the third call always ends the rollout. A prompt
is all answers so far, so there are 7 states and 15 rollouts. Expectations are sums over all pairs
of rollouts, which form a group. Nothing is sampled, and advantages and weights are those of a
training step. A pair also counts for its mirror image.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.losses.policy import policy_loss
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rl.update.kl_costs import charge_later_calls
from lightning_jax.testing.records import trajectory, transition

START, MAX_CALLS, GROUP_SIZE = 9, 3, 2
ANSWERS = (0, 1, 2)
RNG = np.random.default_rng(0)
State = tuple[int, ...]


def endings(state: State = (START,)) -> list[State]:
    """List all rollouts from a state on, as the states in which they end."""
    found = []
    for answer in ANSWERS:
        after = (*state, answer)
        is_end = answer == 0 or len(after) > MAX_CALLS
        found += [after] if is_end else endings(after)
    return found


ROLLOUTS = endings()
STATES = sorted({end[: k + 1] for end in ROLLOUTS for k in range(len(end) - 1)})
LOGITS = RNG.normal(size=(len(STATES), len(ANSWERS)))
CALL_REWARDS = {end[: k + 2]: RNG.normal() for end in ROLLOUTS for k in range(len(end) - 1)}
REWARDS = {end: RNG.normal() for end in ROLLOUTS}
WRONG_VALUES = dict(zip(STATES, 3.0 * RNG.normal(size=len(STATES)), strict=True))


def policy(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return weights / weights.sum(axis=1, keepdims=True)


def probability(end: State, logits: np.ndarray) -> float:
    chosen = policy(logits)
    return float(np.prod([chosen[STATES.index(end[:k]), end[k]] for k in range(1, len(end))]))


def whole_return(end: State) -> float:
    return REWARDS[end] + sum(CALL_REWARDS[end[: k + 1]] for k in range(1, len(end)))


def true_gradient() -> np.ndarray:
    """Return the gradient of the expected return, by central differences."""

    def objective(logits: np.ndarray) -> float:
        return sum(probability(end, logits) * whole_return(end) for end in ROLLOUTS)

    grad, step = np.zeros_like(LOGITS), 1e-5
    for at in np.ndindex(*LOGITS.shape):
        moved = np.zeros_like(LOGITS)
        moved[at] = step
        grad[at] = (objective(LOGITS + moved) - objective(LOGITS - moved)) / (2 * step)
    return grad


def true_values() -> dict[State, float]:
    """Return the expected future reward in each state."""
    values = {}
    for state in STATES:
        ways = [end for end in ROLLOUTS if end[: len(state)] == state]
        odds = np.asarray([probability(end, LOGITS) for end in ways])
        earned = sum(CALL_REWARDS.get(state[: k + 1], 0.0) for k in range(1, len(state)))
        to_come = [whole_return(end) - earned for end in ways]
        values[state] = float(odds @ to_come / odds.sum())
    return values


@functools.cache
def record(end: State, rollout: str, group: str = "g"):
    calls = [
        transition(list(end[:k]), [end[k]], reward=CALL_REWARDS[end[: k + 1]])
        for k in range(1, len(end))
    ]
    return trajectory(*calls, reward=REWARDS[end], group=group, rollout=rollout)


def expected_gradient(values: dict[State, float] | None, **settings) -> np.ndarray:
    """Return the mean over groups of a step's gradient, at ratio 1.

    A step has one group. Where groups of a step do not affect each other, one step has them all,
    which takes a tenth of the time.
    """
    knobs = {"normalize": "none", "aggregation": "constant", "token_divisor": 1.0} | settings
    algorithm = AlgorithmConfig(**knobs)
    groups = list(itertools.combinations_with_replacement(ROLLOUTS, GROUP_SIZE))
    is_apart = algorithm.aggregation == "constant" and "batch" not in (
        f"{algorithm.baseline} {algorithm.normalize}"
    )
    steps = [groups] if is_apart else [[group] for group in groups]
    return np.sum([step_gradient(step, algorithm, values) for step in steps], axis=0)


def step_gradient(
    groups: list[tuple[State, ...]], algorithm: AlgorithmConfig, values: dict[State, float] | None
) -> np.ndarray:
    """Return the sum over a step's groups of their gradients, each times its probability."""
    chosen, grad = policy(LOGITS), np.zeros_like(LOGITS)
    step, odds = [], []
    for number, group in enumerate(groups):
        likely = len(set(group)) * np.prod([probability(end, LOGITS) for end in group])
        for i, end in enumerate(group):
            step.append(record(end, f"{number}-{i}", str(number)))
            odds += [likely] * len(step[-1].transitions)
    known = None
    if values is not None:
        known = [
            tuple((values[call.prompt_token_ids],) for call in rollout.transitions)
            for rollout in step
        ]
    sequences, _ = prepare_step(step, algorithm, policy_version=0, values=known)
    for sequence, likely in zip(sequences, odds, strict=True):
        state = STATES.index(sequence.prompt_token_ids)
        (answer,) = sequence.response_token_ids
        # A step weighs a token by the number of its rollouts.
        weight = sequence.weight * len(groups)
        pull = likely * weight * np.asarray(sequence.advantage).item()
        grad[state] += pull * (np.eye(len(ANSWERS))[answer] - chosen[state])
    return grad


TRUTH = true_gradient()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("credit", ["identical", "per_step", "learned", "learned_token"])
@pytest.mark.parametrize("baseline", ["none", "leave_one_out", "group_mean", "batch_mean"])
def test_a_scheme_whose_gradient_is_right(credit, baseline):
    """Check with wrong values. A rollout's own return in the mean halves the whole gradient."""
    values = WRONG_VALUES if credit.startswith("learned") else None
    got = expected_gradient(values, credit=credit, baseline=baseline)
    factor = 1 - 1 / GROUP_SIZE if baseline.endswith("_mean") else 1.0
    np.testing.assert_allclose(got, factor * TRUTH, atol=1e-8)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5])
def test_below_lambda_1_the_values_must_be_right(gae_lambda):
    settings = {"credit": "learned", "baseline": "none", "gae_lambda": gae_lambda}
    np.testing.assert_allclose(expected_gradient(true_values(), **settings), TRUTH, atol=1e-8)
    assert cosine(expected_gradient(WRONG_VALUES, **settings), TRUTH) < 0.99


REF_LOGITS = RNG.normal(size=LOGITS.shape)
KL_COEF = 0.7


def kl_gradient() -> np.ndarray:
    """Return the gradient of the expected sum of log p - log p_ref, by central differences."""

    def objective(logits: np.ndarray) -> float:
        gaps = np.log(policy(logits)) - np.log(policy(REF_LOGITS))
        return sum(
            probability(end, logits)
            * sum(gaps[STATES.index(end[:k]), end[k]] for k in range(1, len(end)))
            for end in ROLLOUTS
        )

    grad, step = np.zeros_like(LOGITS), 1e-5
    for at in np.ndindex(*LOGITS.shape):
        moved = np.zeros_like(LOGITS)
        moved[at] = step
        grad[at] = (objective(LOGITS + moved) - objective(LOGITS - moved)) / (2 * step)
    return grad


def expected_kl_gradient(is_charged: bool) -> np.ndarray:
    """Return the mean over rollouts of a step's gradient with the KL in the reward."""
    algorithm = AlgorithmConfig(
        loss="reinforce",
        baseline="none",
        normalize="none",
        aggregation="constant",
        token_divisor=1.0,
        kl_coef=KL_COEF,
        kl_estimator="k1",
        kl_in="reward",
    )
    shape = BatchConfig(rows=1, row_len=16, max_targets=4, head_chunk=4)
    log_p, log_ref = np.log(policy(LOGITS)), np.log(policy(REF_LOGITS))
    chosen, grad = policy(LOGITS), np.zeros_like(LOGITS)
    slopes = jax.jit(
        jax.grad(
            lambda logprobs, batch, ref: policy_loss(logprobs, batch, algorithm, ref_logprobs=ref)[
                0
            ]
        )
    )
    for end in ROLLOUTS:
        sequences, _ = prepare_step([record(end, "0")], algorithm, policy_version=0)
        (batch,), _ = make_batches(sequences, shape)
        calls = np.arange(len(sequences))
        states = [STATES.index(end[: k + 1]) for k in calls]
        measured = np.zeros((2, *batch.target_ids.shape), np.float32)
        where = batch.target_calls[batch.target_mask]
        for which, table in enumerate((log_p, log_ref)):
            values = np.asarray([table[s, end[k + 1]] for k, s in enumerate(states)])
            measured[which][batch.target_mask] = values[where]
        if is_charged:
            (advantages,) = charge_later_calls(
                sequences, [batch], [measured[0]], [measured[1]], algorithm
            )
            batch = dataclasses.replace(batch, advantages=advantages)
        slope = np.asarray(slopes(measured[0], jax.tree.map(jnp.asarray, batch), measured[1]))
        for call, pull in zip(where, -slope[batch.target_mask], strict=True):
            likely = probability(end, LOGITS) * pull
            grad[states[call]] += likely * (
                np.eye(len(ANSWERS))[end[call + 1]] - chosen[states[call]]
            )
    return grad


def test_the_kl_in_the_reward_counts_in_the_whole_rollout():
    """Check that counting only the later tokens of a call changes the gradient's direction."""
    cost = KL_COEF * kl_gradient()
    np.testing.assert_allclose(TRUTH - expected_kl_gradient(is_charged=True), cost, atol=1e-5)
    assert cosine(TRUTH - expected_kl_gradient(is_charged=False), cost) < 0.95


def reached(turn: int) -> float:
    """Return the probability that a rollout has a call at this turn."""
    return sum(probability(end, LOGITS) for end in ROLLOUTS if len(end) > turn + 1)


@pytest.mark.parametrize(("baseline", "factor"), [("leave_one_out", 1.0), ("group_mean", 0.5)])
def test_groups_of_turns_are_biased(baseline, factor):
    """Check that a turn keeps its gradient only if the other rollout also reaches it."""
    got = expected_gradient(None, credit="turn_groups", baseline=baseline)
    turns = np.asarray([[len(state) - 1] for state in STATES])
    shares = np.vectorize(reached)(turns)
    assert sorted(set(shares.ravel().round(2))) == [0.59, 0.71, 1.0]
    np.testing.assert_allclose(got, factor * shares * TRUTH, atol=1e-8)
    assert cosine(got, TRUTH) < 0.995
    unbiased = expected_gradient(None, credit="turn_groups", baseline="none")
    np.testing.assert_allclose(unbiased, TRUTH, atol=1e-8)


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": "rollout"},
        {"aggregation": "call"},
        {"aggregation": "token"},
        {"normalize": "group_std"},
        {"normalize": "batch_std"},
        {"discount": 0.5},
    ],
)
def test_other_settings_that_are_biased(settings):
    """Check the bias in the same process. The settings may still be useful."""
    got = expected_gradient(None, credit="per_step", baseline="leave_one_out", **settings)
    assert cosine(got, TRUTH) < 0.995
