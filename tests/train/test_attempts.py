"""Tests of the steps of a run as its store has them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lightning_jax.traces.store import Store
from lightning_jax.train.attempts import regroup, stored_steps
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
