"""Tests of the measurement of layouts, without its runs."""

import itertools
import statistics
from pathlib import Path
from typing import Any

import layouts
import layouts_agent
import numpy as np
import pytest
from layouts_rates import CHIPS, WORKLOADS, disjoint, lock_step
from layouts_sim import simulate, summarize

from lightning_jax.settings import load_config
from lightning_jax.train.config import Config


def _row(step: int, reward: float, seconds: float, **more: float) -> dict[str, Any]:
    return {
        "step": step,
        "time/step_s": seconds,
        "time/trainer_wait_s": seconds / 2,
        "rollout/reward_mean": reward,
        "rollout/num_rollouts": 10.0,
        "rollout/response_tokens": 100.0,
        "train/staleness_mean": float(step % 2),
        "train/staleness_max": float(step),
        **more,
    }


def test_rates_leave_out_the_first_steps() -> None:
    rows = [_row(0, 0.0, 90.0), _row(1, 0.2, 10.0), _row(2, 0.4, 4.0), _row(3, 0.6, 6.0)]
    rows[3]["time/sampler_wait_s"] = 1.0
    run = layouts.measured([*rows, {"step": 4, "eval/reward_mean": 0.7}])
    assert (run.step_s, run.rollouts_per_s, run.tokens_per_s) == (5.0, 2.0, 20.0)
    assert (run.trainer_wait_share, run.sampler_wait_share) == (0.5, 0.1)
    assert (run.age_mean, run.age_max, run.final_reward) == (0.5, 3.0, 0.7)
    expected = [(90.0, 0.0), (100.0, 0.1), (104.0, 0.2), (110.0, 0.4)]
    assert run.reward_at == tuple((at, pytest.approx(reward)) for at, reward in expected)
    rewards = [layouts.reward_after(run, seconds) for seconds in (50.0, 90.0, 105.0, 200.0)]
    assert rewards == pytest.approx([0.0, 0.0, 0.2, 0.4])


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_settings_of_a_layout_are_valid(name: str, tmp_path: Path) -> None:
    _, _, _, command, flag, *settings = layouts.command(name, 3, tmp_path / "run", ["num_steps=7"])
    assert (command, flag) == ("train", "--config")
    config = load_config(Config, settings)
    assert (config.seed, config.num_steps, config.run_dir) == (3, 7, str(tmp_path / "run"))
    assert (config.rollout.ahead > 0) == (name != "lock_step")
    assert (config.serve.mesh is not None) == (layouts.LAYOUTS[name].num_devices > 1)


def test_tools_take_the_same_time_in_every_layout() -> None:
    def first(rollout: str, number: int) -> list[float]:
        waits = layouts_agent.waits(rollout, median_s=1.0, p90_s=4.0, most_s=20.0)
        return list(itertools.islice(waits, number))

    assert first("train-00000-000-00-1", 5) == first("train-00000-000-00-1", 5)
    assert first("train-00000-000-00-1", 5) != first("train-00000-000-01-1", 5)
    many = first("x", 4000)
    assert statistics.median(many) == pytest.approx(1.0, rel=0.1)
    assert statistics.quantiles(many, n=10)[-1] == pytest.approx(4.0, rel=0.15)
    assert max(many) == 20.0


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_published_rates_make_a_plausible_run(workload: str, chip: Any) -> None:
    work = WORKLOADS[workload](16)
    assert all(turn.response_tokens > 0 for turn in work.turns(np.random.default_rng(0)))
    for layout in (lock_step(chip, 16), disjoint(chip, 16, 2, 8)):
        steps = simulate(work, layout, chip.engine, num_steps=3)
        summary = summarize(steps, layout.num_engines)
        assert summary.rollouts_per_s > 0 and summary.age_max <= layout.max_staleness
        assert 0 <= summary.decode_busy_share <= 1


def test_an_h100_decodes_as_published() -> None:
    engine = CHIPS["H100"].engine
    one, full = (engine.step_s + n * engine.step_s_per_request for n in (1, engine.slots))
    assert (one, full) == pytest.approx((6.48e-3, 25.57e-3))
