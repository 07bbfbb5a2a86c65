"""Tests of the simulation of layouts against cases worked by hand."""

import asyncio
import dataclasses

import layouts_sim
import numpy as np
import pytest
from layouts_sim import (
    EngineRates,
    Group,
    Layout,
    PythonCosts,
    Step,
    Turn,
    Workload,
    groups_to_take,
    simulate,
    summarize,
)

from lightning_jax.train.tasks import source
from lightning_jax.types import Rollout

# A decode step of n requests takes 1 + 0.5 n seconds; 10 tokens are prefilled in a second.
RATES = EngineRates(slots=4, step_s=1.0, step_s_per_request=0.5, prefill_tokens_per_s=10.0)
TWO_TURNS = (Turn(20.0, 4.0, 7.0), Turn(10.0, 2.0, 3.0))
LOCK_STEP = Layout("lock step", num_engines=1, train_tokens_per_s=6.0)


def _work(*turns: Turn, tasks: int = 1, size: int = 1, **more: int) -> Workload:
    return Workload(tasks, size, lambda rng: turns, **more)


def _durations(steps: list[Step]) -> list[float]:
    return [step.ended - step.began for step in steps]


def test_one_agent_on_one_slot_takes_the_sum_of_its_parts() -> None:
    (step,) = simulate(_work(*TWO_TURNS), LOCK_STEP, RATES, num_steps=1)
    # Prefill, decode and tool of both turns: (2 + 4 * 1.5 + 7) + (1 + 2 * 1.5 + 3).
    assert step.taken_at == pytest.approx(22)
    assert step.trained_tokens == 36 and step.response_tokens == 6
    assert step.ended == pytest.approx(22 + 36 / 6)
    assert step.decode_busy_s == pytest.approx(8 + 4)


def test_python_is_added_to_each_call() -> None:
    python = PythonCosts(agent_s=1.0, gateway_s=0.5, token_s=0.25)
    (step,) = simulate(_work(*TWO_TURNS), LOCK_STEP, RATES, python, num_steps=1)
    assert step.taken_at == pytest.approx(22 + 2 * 1.5 + 6 * 0.25)


def test_requests_share_decode_steps() -> None:
    """Requests of 2 and of 4 tokens take 2 steps of 2 s together, then 2 of 1.5 s."""
    lengths = iter((2.0, 4.0))
    work = Workload(1, 2, lambda rng: (Turn(0.0, next(lengths), 0.0),))
    (step,) = simulate(work, LOCK_STEP, RATES, num_steps=1)
    assert step.taken_at == pytest.approx(2 * 2.0 + 2 * 1.5)


def test_prefill_stops_the_other_requests() -> None:
    work = _work(Turn(10.0, 2.0, 0.0), size=2)
    (step,) = simulate(work, LOCK_STEP, RATES, num_steps=1)
    assert step.taken_at == pytest.approx(2 * 1.0 + 2 * 2.0)


def test_a_request_waits_for_a_slot() -> None:
    one_slot = dataclasses.replace(RATES, slots=1)
    (step,) = simulate(_work(Turn(0.0, 2.0, 0.0), size=3), LOCK_STEP, one_slot, num_steps=1)
    assert step.taken_at == pytest.approx(3 * 2 * 1.5)


def test_concurrency_limits_the_rollouts_at_once() -> None:
    work = _work(Turn(0.0, 2.0, 5.0), size=2, concurrency=1)
    (step,) = simulate(work, LOCK_STEP, RATES, num_steps=1)
    assert step.taken_at == pytest.approx(2 * (3 + 5))


def test_two_engines_halve_the_requests_of_each() -> None:
    two = dataclasses.replace(LOCK_STEP, num_engines=2)
    (step,) = simulate(_work(Turn(0.0, 2.0, 0.0), size=2), two, RATES, num_steps=1)
    assert step.taken_at == pytest.approx(2 * 1.5)


def test_lock_step_is_the_sum_of_the_phases() -> None:
    layout = dataclasses.replace(LOCK_STEP, train_fixed_s=2.0, publish_s=3.0)
    steps = simulate(_work(*TWO_TURNS), layout, RATES, num_steps=3)
    assert _durations(steps) == pytest.approx([22 + (2 + 6) + 3] * 3)
    assert [step.sampler_wait_s for step in steps] == pytest.approx([11.0] * 3)
    assert {step.age_max for step in steps} == {0}


@pytest.mark.parametrize(("tokens_per_s", "slower"), [(6.0, 22.0), (1.2, 30.0)])
def test_far_ahead_on_other_devices_a_step_takes_as_long_as_its_slower_side(
    tokens_per_s: float, slower: float
) -> None:
    layout = dataclasses.replace(LOCK_STEP, train_tokens_per_s=tokens_per_s, ahead=1)
    steps = simulate(_work(*TWO_TURNS, concurrency=1), layout, RATES, num_steps=12)
    assert _durations(steps)[2:-1] == pytest.approx([slower] * 9)
    summary = summarize(steps[:-1], 1, skip=2)
    assert summary.step_s == pytest.approx(slower)
    assert summary.trainer_wait_share == pytest.approx(1 - 36 / tokens_per_s / slower)
    assert summary.age_max == 1


def test_shared_devices_slow_both_sides_while_both_work() -> None:
    """The groups have 2 and 8 tokens. The second decodes during the update of the first."""
    lengths = iter((2.0, 8.0))
    work = Workload(1, 1, lambda rng: (Turn(0.0, next(lengths), 0.0),))
    layout = dataclasses.replace(LOCK_STEP, train_tokens_per_s=0.5, ahead=1, decode_share=0.25)
    first, second = simulate(work, layout, RATES, num_steps=2)
    assert first.taken_at == pytest.approx(2 * 2.0)
    update_s = 4 / 0.75  # 2 tokens take 4 s alone
    assert first.ended == pytest.approx(4 + update_s)
    left = 6 - update_s * 0.25 / 1.5
    assert second.taken_at == pytest.approx(first.ended + left * 1.5)
    assert second.ended == pytest.approx(second.taken_at + 8 / 0.5)
    assert (first.age_max, second.age_max, second.age_mean) == (0, 1, 0.5)


def test_a_trainer_alone_on_shared_devices_is_not_slowed() -> None:
    layout = dataclasses.replace(LOCK_STEP, decode_share=0.5)
    (step,) = simulate(_work(*TWO_TURNS), layout, RATES, num_steps=1)
    assert step.ended - step.taken_at == pytest.approx(6)


def test_ages_stay_within_the_bound() -> None:
    """Groups of very uneven length, and more ahead than a step takes."""

    def turns(rng: np.random.Generator) -> tuple[Turn, ...]:
        return (Turn(1.0, 2.0, float(rng.lognormal(0.0, 2.0))),)

    layout = dataclasses.replace(LOCK_STEP, ahead=8, max_staleness=2, train_tokens_per_s=3.0)
    steps = simulate(Workload(4, 2, turns), layout, RATES, num_steps=40)
    assert 1 <= max(step.age_max for step in steps) <= 2
    assert all(0 <= step.age_mean <= step.age_max for step in steps)
    assert sum(step.num_rollouts for step in steps) == 40 * 4 * 2


async def test_a_step_takes_the_groups_that_a_run_would_take() -> None:
    async def rollout(waits: asyncio.Event) -> Rollout:
        await waits.wait()
        return Rollout("r", "t", "g", "train", 0, 0, 1, "scored")

    rng, ended, never = np.random.default_rng(0), asyncio.Event(), asyncio.Event()
    ended.set()
    num_taken = 0
    for _ in range(300):
        number, bound = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        step = int(rng.integers(0, 5))
        versions = sorted(int(rng.integers(max(step - bound, 0), step + 1)) for _ in range(8))
        unfinished = rng.random(8) < 0.4
        simulated = [Group(v, int(u)) for v, u in zip(versions, unfinished, strict=True)]
        real = [
            source.Group(
                (0, i), v, {"id": "x"}, (asyncio.create_task(rollout(never if u else ended)),)
            )
            for i, (v, u) in enumerate(zip(versions, unfinished, strict=True))
        ]
        await asyncio.sleep(0)
        settings = {"step": step, "per_step": number, "max_staleness": bound}
        expected = source.oldest_complete(real, number, **settings)
        taken = groups_to_take(simulated, number, **settings)
        assert (taken and [simulated.index(group) for group in taken]) == (
            expected and [group.key[1] for group in expected]
        )
        num_taken += taken is not None
        for group in real:
            group.running[0].cancel()
    assert 50 < num_taken < 250


def test_every_layout_gets_the_same_rollouts() -> None:
    def turns(rng: np.random.Generator) -> tuple[Turn, ...]:
        return (Turn(1.0, float(rng.integers(1, 9)), 1.0),) * int(rng.integers(1, 4))

    work = Workload(2, 3, turns, shared_tokens=5.0)
    ahead = dataclasses.replace(LOCK_STEP, ahead=4, num_engines=3)
    runs = [simulate(work, layout, RATES, num_steps=5, seed=3) for layout in (LOCK_STEP, ahead)]
    assert sum(step.trained_tokens for step in runs[0]) == pytest.approx(
        sum(step.trained_tokens for step in runs[1])
    )
    other = simulate(work, LOCK_STEP, RATES, num_steps=5, seed=4)
    assert [step.trained_tokens for step in other] != [step.trained_tokens for step in runs[0]]


def test_engines_of_one_process_share_an_interpreter() -> None:
    """Four calls of 2 s of Python each, in one process or in four."""
    work, python = _work(Turn(0.0, 1.0, 0.0), size=4), PythonCosts(gateway_s=2.0)
    together = dataclasses.replace(LOCK_STEP, num_engines=4)
    apart = dataclasses.replace(together, num_interpreters=4)
    workers = dataclasses.replace(together, num_workers=4)
    taken = [
        simulate(work, layout, RATES, costs, num_steps=1)[0].taken_at
        for layout, costs in (
            (together, python),
            (apart, python),
            (workers, python),
            (workers, PythonCosts(agent_s=2.0)),
        )
    ]
    assert taken == pytest.approx([8 + 1.5, 2 + 1.5, 8 + 1.5, 2 + 1.5])


def test_threads_of_engines_in_one_process_take_turns() -> None:
    work, python = _work(Turn(0.0, 1.0, 0.0), size=4), PythonCosts(step_s=1.0)
    together = dataclasses.replace(LOCK_STEP, num_engines=4)
    (step,) = simulate(work, together, RATES, python, num_steps=1)
    assert step.taken_at == pytest.approx(4.0)


def test_module_has_no_state() -> None:
    first = simulate(_work(*TWO_TURNS, size=2), LOCK_STEP, RATES, num_steps=2)
    assert first == simulate(_work(*TWO_TURNS, size=2), LOCK_STEP, RATES, num_steps=2)
    assert layouts_sim.__doc__
