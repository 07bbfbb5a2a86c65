"""Tests of the calls that several policies learn from: each policy's own, or all of them."""

import dataclasses

import pytest

from lightning_jax.models.policies import ALL, SINGLE, Policy, PolicyTable
from lightning_jax.rl.advantages import learners
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.prepare import prepare_policies, prepare_step
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.types import Trajectory, Transition

POLICIES = PolicyTable((Policy("writer"), Policy("rewriter", 1)))
JOINT = AlgorithmConfig(policy_updates="joint")


def call(policy: str, token: int, reward: float = 0.0) -> Transition:
    made = transition([1, token], [token, 9], reward=reward)
    return dataclasses.replace(made, answered_by=policy)


STEP: list[Trajectory] = [
    trajectory(call("writer", 2), call("rewriter", 3), call("rewriter", 4), reward=1.0),
    trajectory(call("writer", 5), reward=0.0),
    trajectory(call("rewriter", 6, 0.5), call("writer", 7), call("rewriter", 8, 0.25), reward=0.5),
]


def test_own_calls_bear_what_the_calls_of_others_after_them_earned() -> None:
    whole = trajectory(
        call("a", 1, 1.0), call("b", 2, 2.0), call("a", 3, 4.0), call("b", 4, 8.0), reward=16.0
    )
    of_a, of_b = (Policy(name).calls([whole])[0] for name in "ab")
    assert [item.reward for item in of_a.transitions] == [3.0, 12.0]
    assert [item.reward for item in of_b.transitions] == [7.0, 8.0]  # a's first call precedes it
    assert (of_a.reward, of_b.reward) == (16.0, 16.0)  # the rollout's reward
    assert Policy("c").calls([whole])[0].transitions == ()


@pytest.mark.parametrize("credit", ["identical", "per_step"])
def test_independent_policies_learn_what_they_would_beside_frozen_ones(credit: str) -> None:
    algorithm = AlgorithmConfig(credit=credit)
    made, metrics = prepare_policies(STEP, algorithm, POLICIES, policy_version=0)
    for index, name in enumerate(POLICIES.named):
        alone, known = prepare_step(Policy(name).calls(STEP), algorithm, policy_version=0)
        mine = [item for item in made if item.adapter == index]
        assert [dataclasses.replace(item, adapter=None) for item in mine] == alone
        assert sum(item.weight * len(item.response_token_ids) for item in mine) == pytest.approx(1)
        assert {f"{key}/policy={name}": value for key, value in known.items()}.items() <= (
            metrics.items()
        )
    frozen = PolicyTable((Policy("writer"), Policy("rewriter", 1, trains=False)))
    assert [policy.name for policy in learners(algorithm, frozen)] == ["writer"]
    assert learners(algorithm, SINGLE) == learners(JOINT, POLICIES) == (ALL,)


def test_joint_policies_learn_from_one_sequence_of_calls() -> None:
    made, metrics = prepare_policies(STEP, JOINT, POLICIES, policy_version=0)
    alone, known = prepare_step(STEP, JOINT, policy_version=0)
    assert [dataclasses.replace(item, adapter=None) for item in made] == alone
    assert [item.adapter for item in made] == [0, 1, 1, 0, 1, 0, 1]
    assert metrics == known
    one, _ = prepare_policies(STEP, JOINT, policy_version=0)
    assert one == alone


def test_values_of_own_calls_are_told_apart() -> None:
    # In the first rollout, the writer's return is 1 and its value 0.25. The rewriter's second call
    # has value 0.75. Baselines are off, so advantages are returns minus values.
    algorithm = AlgorithmConfig(credit="learned", baseline="none", normalize="none")
    values = [((0.25,), (0.5,), (0.75,)), ((0.0,),), ((0.0,), (0.0,), (0.0,))]
    made, _ = prepare_policies(STEP, algorithm, POLICIES, policy_version=0, values=values)
    found = {item.prompt_token_ids[1]: item for item in made}
    assert [found[token].advantage for token in (2, 3, 4)] == [0.75, 0.5, 0.25]
    assert found[2].states is not None and found[2].states.weight == 1 / 3
    joint = dataclasses.replace(algorithm, policy_updates="joint")
    made, _ = prepare_policies(STEP, joint, POLICIES, policy_version=0, values=values)
    assert made[0].states is not None and made[0].states.weight == 1 / 7
