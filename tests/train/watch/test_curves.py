"""Tests of the plot of a run: its panels, their order and explanations."""

from pathlib import Path

import pytest

from lightning_jax.rl.losses.policy import LENGTHS
from lightning_jax.train.watch.curves import (
    INTERNALS,
    MAX_AGENT_PANELS,
    RESULTS,
    SAMPLED_PER_S,
    describe,
    panels_of,
    plot_curves,
    smoothed,
    warmup_steps,
)


def test_the_picture_holds_the_curves(tmp_path: Path) -> None:
    rows = [
        {"step": s, "rollout/reward_mean": 0.1 * s, "train/mismatch_kl": 1e-9 * s} for s in range(5)
    ]
    rows[0] |= {"eval/reward_mean": 0.0, "eval/reward_stderr": 0.1}
    drawn = [panel.metrics[0] for panels in panels_of(rows) for panel in panels]
    assert drawn == ["rollout/reward_mean", "train/mismatch_kl"]
    plot_curves(rows, tmp_path / "curves.png", "a run")
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_no_points_no_picture(tmp_path: Path) -> None:
    for row in ({}, {"train/grad_norm": 0.0}):  # the second has no place on a logarithmic axis
        plot_curves([{"step": 0} | row], tmp_path / "curves.png", "a run")
    assert not (tmp_path / "curves.png").exists()


def test_corrections_are_drawn_by_length() -> None:
    names = [f"train/correction_truncated_share/length={name}" for name in LENGTHS]
    _, (panel,) = panels_of([{"step": 0} | dict.fromkeys(names, 0.1)])
    assert panel.metrics == tuple(names)
    assert {describe(name) for name in names} == {describe("train/correction_truncated_share")}


def test_results_come_before_internals_and_empty_panels_are_left_out() -> None:
    row = {
        "step": 0,
        "time/train_s": 1.0,
        "rollout/entropy": 1.0,
        "train/tokens_per_s": 9.0,
        "rollout/agent_f1_mean": 0.5,
        "eval/agent_hops_mean": 2.0,
        "eval/full_reward_share": 0.5,
        "rollout/reward_mean": 0.5,
    }
    results, internals = panels_of([row])
    assert [panel.metrics[0] for panel in results] == [
        "rollout/reward_mean",
        "rollout/full_reward_share",
        "rollout/agent_f1_mean",
        "rollout/agent_hops_mean",
        SAMPLED_PER_S,
    ]
    assert [panel.metrics[0] for panel in internals] == ["rollout/entropy", "time/rollout_s"]


def test_numbers_of_the_agent_beyond_the_limit_are_counted() -> None:
    row = {"step": 0.0} | {f"rollout/agent_n{i:02d}_mean": 1.0 for i in range(MAX_AGENT_PANELS + 3)}
    results, _ = panels_of([row])
    assert len(results) == MAX_AGENT_PANELS and "; 3 " in results[-1].explanation


def test_every_panel_has_an_explanation_of_one_line() -> None:
    for panel in (*RESULTS, *INTERNALS):
        assert 0 < len(panel.explanation) <= 70, panel.title
        assert all(describe(name) for name in panel.metrics if name != SAMPLED_PER_S)


def test_a_smoothed_curve_is_the_mean_of_neighbors() -> None:
    assert smoothed([0.0, 3.0, 0.0, 3.0, 6.0]) == pytest.approx([1.5, 1.0, 2.0, 3.0, 4.5])
    assert smoothed([2.0]) == [2.0]
    assert smoothed([float(i) for i in range(40)])[20] == pytest.approx(20.0)


def test_the_warmup_ends_after_its_last_row() -> None:
    rows = [{"step": 0, "eval/reward_mean": 0.1, "warmup/loss": 1.0}, {"step": 4, "warmup/loss": 1}]
    assert warmup_steps([]) == warmup_steps([{"step": 3, "rollout/reward_mean": 0.1}]) == 0
    assert warmup_steps([*rows, {"step": 5, "rollout/reward_mean": 0.1}]) == 5
