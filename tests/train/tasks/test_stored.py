"""Tests of the steps of a run as its store has them, and of the choice of its attempts."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from coded import raises_coded

from lightning_jax.rollouts.conditions import parse_condition
from lightning_jax.settings import ConfigError
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.traces.store import Store
from lightning_jax.train.tasks.stored import (
    Attempt,
    attempt_sequences,
    choose_attempts,
    regroup,
    stored_steps,
)
from lightning_jax.types import Rollout


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store.sqlite")
    yield opened
    opened.close()


def add(store: Store, group: str, step: int, *rewards: float | None) -> None:
    """Store a group. None is a rollout that its agent failed, with the reward 0."""
    for index, reward in enumerate(rewards):
        name = f"{group}{index}"
        store.add_rollout(Rollout(name, "t", group, "train", step, index, 1, "queued"))
        store.set_status(name, "running")
        if reward is None:
            store.set_status(name, "agent_failure", reward=0.0, reason="KeyError")
        else:
            store.set_status(name, "scored", reward=reward)


def ids(steps: Sequence[Sequence[Rollout]]) -> list[list[str]]:
    return [[rollout.rollout_id for rollout in step] for step in steps]


def test_a_step_has_the_groups_that_it_trained_on_in_its_order(store: Store) -> None:
    add(store, "a", 0, 1.0, None)
    add(store, "b", 0, 0.5)
    add(store, "c", 1, 0.5)
    add(store, "d", 2, 0.5)
    store.set_step_groups(0, ["b"])
    store.set_step_groups(1, ["c", "a"])
    assert ids(stored_steps(store, "train")) == [["b0"], ["c0", "a0", "a1"]]
    # No step has taken d yet, which an imitation of good attempts need not care about.
    everything = stored_steps(store, "train", only_trained=False)
    assert ids(everything) == [["b0"], ["c0", "a0", "a1"], ["d0"]]
    assert stored_steps(store, "eval") == []


def test_steps_from_before_the_record_have_the_groups_that_began_in_them(store: Store) -> None:
    add(store, "a", 0, 1.0)
    add(store, "b", 1, 1.0)
    add(store, "c", 1, 0.0)
    assert ids(stored_steps(store, "train")) == [["a0"], ["b0", "c0"]]
    store.set_step_groups(1, ["c"])
    assert ids(stored_steps(store, "train")) == [["a0"], ["c0"]]


def test_only_rescored_rollouts_with_a_reward_are_left(store: Store) -> None:
    add(store, "a", 0, 1.0, 0.0, 0.5, None)
    rescored = {rollout.rollout_id: rollout for rollout in store.rollouts()}
    del rescored["a0"]
    broken = Rollout("a1", "t", "a", "train", 0, 1, 1, "agent_failure", None, "bad_component")
    (step,) = stored_steps(store, "train", rescored | {"a1": broken})
    assert [(r.rollout_id, r.status) for r in step] == [("a2", "scored"), ("a3", "agent_failure")]
    store.supersede(0)
    assert stored_steps(store, "train", rescored) == []


def test_other_sizes_of_a_step_keep_the_groups_whole(store: Store) -> None:
    for number, group in enumerate("abc"):
        add(store, group, number, 1.0, 0.0)
    steps = stored_steps(store, "train")
    assert ids(regroup(steps, 2)) == [["a0", "a1", "b0", "b1"], ["c0", "c1"]]
    assert ids(regroup(steps, 9)) == [["a0", "a1", "b0", "b1", "c0", "c1"]]
    assert regroup([], 2) == []


def made(reward: float, *, group: str = "g", index: int = 0, **metrics: float) -> Attempt:
    name = f"{group}-{index}"
    rollout = Rollout(name, "t", group, "train", 0, index, 1, "scored", reward, metrics=metrics)
    return Attempt(
        rollout, trajectory(transition([1], [2, 3]), reward=reward, group=group, rollout=name)
    )


def test_the_best_of_each_group_or_all_that_the_condition_takes():
    attempts = [
        made(0.2, index=0),
        made(0.9, index=1),
        made(0.9, index=2, exact=1.0),
        made(0.1, group="h"),
        made(0.5, group="i", exact=0.0),
        made(1.0, group="j", exact=0.0),
    ]

    def chosen(text: str, *, only_best: bool = False) -> list[list[str]]:
        groups = choose_attempts(attempts, parse_condition(text), only_best=only_best)
        return [[attempt.rollout.rollout_id for attempt in group] for group in groups]

    assert chosen("reward > 0.1") == [["g-0", "g-1", "g-2"], ["i-0"], ["j-0"]]
    # A lone attempt is above no mean, so only the one with the full reward is left.
    assert chosen("reward > 0.1", only_best=True) == [["g-1"], ["j-0"]]
    # 0.2 is the best that the condition takes, and below the mean of its group.
    assert chosen("index == 0", only_best=True) == [["j-0"]]
    assert chosen("exact == 1 or tokens > 2") == [["g-2"]]
    with raises_coded(ConfigError, "empty", "--where"):
        chosen("reward > 1")
    with raises_coded(ConfigError, "empty", "--best"):
        chosen("reward < 0.2", only_best=True)
    with raises_coded(ConfigError, "unknown", "rewrad"):
        chosen("rewrad > 1")


def test_failed_attempts_count_in_the_mean_of_their_group_and_teach_nothing():
    failed = made(0.1, index=2)
    failed = Attempt(failed.rollout, dataclasses.replace(failed.trajectory, is_failed=True))
    silent = made(0.9, index=3)
    silent = Attempt(silent.rollout, dataclasses.replace(silent.trajectory, transitions=()))
    everything = parse_condition("reward >= -1")

    def best(*attempts: Attempt) -> list[int]:
        groups = choose_attempts(attempts, everything, only_best=True)
        return [attempt.rollout.index for group in groups for attempt in group]

    alike = [made(0.2, index=0), made(0.2, index=1)]
    with raises_coded(ConfigError, "empty", "--best"):
        best(*alike)
    assert best(*alike, failed) == [0]
    with raises_coded(ConfigError, "empty", "--best"):  # mean 0.35
        best(*alike, failed, silent)
    taken = choose_attempts([*alike, failed, silent], everything, only_best=False)
    assert [[attempt.rollout.index for attempt in group] for group in taken] == [[0, 1]]


def test_the_best_attempt_counts_the_rewards_of_its_calls():
    plain = made(0.5, index=0)
    call = dataclasses.replace(plain.trajectory.transitions[0], reward=0.3)
    helped = made(0.4, index=1)
    helped = Attempt(helped.rollout, dataclasses.replace(helped.trajectory, transitions=(call,)))
    groups = choose_attempts([plain, helped], parse_condition("reward > 0"), only_best=True)
    assert groups == [[helped]]


def test_sequences_by_hand():
    forced = transition([1], [2, 3, 4], forced=(False, True, False))
    other = dataclasses.replace(transition([5, 6], [7]), answered_by="b")
    attempt = Attempt(made(1.0).rollout, trajectory(forced, other))
    alone = attempt_sequences([[attempt]], {})
    assert [item.prompt_token_ids for item in alone] == [(1,), (5, 6)]
    assert [item.response_token_ids for item in alone] == [(2, 3, 4), (7,)]
    assert alone[0].loss_mask == (True, False, True) and alone[0].advantage == 1.0
    assert [item.weight for item in alone] == [0.25, 0.25] and alone[0].adapter is None
    named = dataclasses.replace(forced, answered_by="a")
    attempt = Attempt(made(1.0).rollout, trajectory(named, other))
    parts = attempt_sequences([[attempt]], {"a": 0, "b": 1})
    assert [(item.adapter, item.weight) for item in parts] == [(0, 1 / 3), (1, 1.0)]
