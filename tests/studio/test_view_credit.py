"""Tests that views show the trainer's credit and advantages."""

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from view_records import make_run, rollout

from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.studio.credit import EQUAL_GROUP, PAIR_SIGNS, step_credit, trained_on
from lightning_jax.studio.load import open_run
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.traces.store import Store
from lightning_jax.types import Trajectory


def _step(seed: int) -> list[Trajectory]:
    """Return three groups of four rollouts with 0 to 3 calls, some from old weights."""
    draw = random.Random(seed)
    made = []
    for index in range(12):
        calls = [
            dataclasses.replace(
                transition(
                    [1] * draw.randint(1, 3),
                    [2] * draw.randint(1, 9),
                    reward=draw.choice((0.0, 0.25)),
                    version=draw.choice((2, 8)),
                ),
                call_id=f"{index}-{turn}",
            )
            for turn in range(draw.randint(0, 3))
        ]
        reward = draw.choice((0.0, 0.5, 1.0))
        made.append(trajectory(*calls, reward=reward, group=f"g{index % 3}", rollout=str(index)))
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"baseline": "leave_one_out", "normalize": "none"},
        {"baseline": "batch_mean", "normalize": "batch_std"},
        {"credit": "per_step", "discount": 0.9},
        {"credit": "turn_groups", "normalize": "batch_std"},
        {"overlong_penalty": 0.5, "overlong_max_tokens": 8, "overlong_buffer": 4},
    ],
)
def test_advantages_are_the_trainers(settings: dict[str, Any]) -> None:
    algorithm = AlgorithmConfig(**settings)
    for seed in range(5):
        trajectories = _step(seed)
        shown = step_credit(trajectories, algorithm, step=8).by_call
        sequences, metrics = prepare_step(trajectories, algorithm, policy_version=8)
        calls = [call for trajectory in trajectories for call in trajectory.transitions]
        assert set(shown) == {call.call_id for call in calls}
        trained = [shown[call.call_id] for call in calls if not shown[call.call_id].note]
        assert [call.advantage for call in trained] == [call.advantage for call in sequences]
        stale = [call.note for call in shown.values() if call.note]
        assert all("4" in note for note in stale) and EQUAL_GROUP not in stale
        assert len(stale) == metrics["train/dropped_stale"]


def test_credit_by_hand() -> None:
    """per_step credit is 1 at the last call and 0.5 * 1 + 0.25 at the first one.

    The group's mean is 0.375 at the first turn and 0.5 at the second. The rollout with one call
    counts in both.
    """
    first = dataclasses.replace(transition([1], [2], reward=0.25), call_id="first")
    last = dataclasses.replace(transition([1], [3]), call_id="last")
    other = dataclasses.replace(transition([1], [4]), call_id="other")
    trajectories = [trajectory(first, last, reward=1.0), trajectory(other, rollout="s")]
    algorithm = AlgorithmConfig(credit="per_step", discount=0.5, normalize="none")
    shown = step_credit(trajectories, algorithm, step=0).by_call
    assert {name: (call.credit, call.advantage) for name, call in shown.items()} == {
        "first": (0.75, 0.375),
        "last": (1.0, 0.5),
        "other": (0.0, -0.375),
    }


def test_pairs_are_shown_by_their_signs() -> None:
    calls = [dataclasses.replace(transition([1], [2]), call_id=name) for name in "abc"]
    trajectories = [
        trajectory(call, reward=reward, rollout=call.call_id)
        for call, reward in zip(calls, (0.0, 1.0, 0.5), strict=True)
    ]
    shown = step_credit(trajectories, AlgorithmConfig(loss="dpo"), step=0)
    assert {name: call.advantage for name, call in shown.by_call.items()} == {
        "a": -1.0, "b": 1.0, "c": 0.0
    }  # fmt: skip
    (note,) = shown.notes
    assert note == PAIR_SIGNS


def test_learned_credit_is_not_made_up() -> None:
    found = step_credit(_step(0), AlgorithmConfig(credit="learned"), step=8)
    assert not found.by_call
    (note,) = found.notes
    assert "algorithm.credit" in note and "learned" in note


@pytest.mark.parametrize("setting", ["credit", "baseline"])
def test_showing_a_run_loads_no_custom_function(setting: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("raise SystemExit\n")
    algorithm = dataclasses.replace(AlgorithmConfig(), **{setting: f"{path}:mine"})
    found = step_credit(_step(0), algorithm, step=8)
    assert not found.by_call and len(found.notes) == 1


def test_groups_that_were_replaced_are_not_in_the_batch() -> None:
    """With the equal group, the mean over the batch would be 0.75 instead of 0.5."""
    calls = [dataclasses.replace(transition([1], [2]), call_id=name) for name in "abcd"]
    rewards, groups = (1.0, 0.0, 1.0, 1.0), "ggee"
    trajectories = [
        trajectory(call, reward=reward, group=group, rollout=call.call_id)
        for call, reward, group in zip(calls, rewards, groups, strict=True)
    ]
    algorithm = AlgorithmConfig(max_sampling_rounds=2, baseline="batch_mean", normalize="none")
    shown = step_credit(trajectories, algorithm, step=0).by_call
    assert [(shown[name].advantage, shown[name].note) for name in "ab"] == [(0.5, ""), (-0.5, "")]
    assert all(shown[name].note == EQUAL_GROUP for name in "cd")


def test_the_finished_attempt_counts() -> None:
    broken: dict[str, Any] = {"status": "infrastructure_failure", "reason": "crash"}
    attempts = [
        rollout(0, attempt=1, **broken),
        rollout(0, 1.0, attempt=2),
        rollout(1, 0.5, attempt=1),
        rollout(1, attempt=2, **broken),
        rollout(2, attempt=1, **broken),
        rollout(2, attempt=2, **broken),
        dataclasses.replace(rollout(3, 1.0, attempt=1), superseded=True),
        rollout(3, attempt=2, status="running"),
    ]
    expected = [(0, 2), (1, 1), (2, 2), (3, 2)]
    assert [(attempt.index, attempt.attempt) for attempt in trained_on(attempts)] == expected


def test_credit_is_of_the_step_that_trained_the_group(tmp_path: Path) -> None:
    """With rollout.ahead that step may be a later one. The samples are 6 steps old there."""
    run = make_run(tmp_path)
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        store.set_step_groups(3, ["train-00003-001"])
    with open_run(run) as reader:
        view = reader.rollout("train-00003-000-00-1")
    assert [note for note in view.notes if "no step has trained" in note]
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        store.set_step_groups(9, ["train-00003-000"])
    with open_run(run) as reader:
        view = reader.rollout("train-00003-000-00-1")
    notes = [call.credit.note for call in view.calls if call.credit is not None]
    assert len(notes) == 2 and all("steps old" in note for note in notes)
