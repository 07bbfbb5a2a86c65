"""Tests of the metrics file, which holds each step once."""

import json
from pathlib import Path

from lightning_jax.train.watch.metrics import MetricsLog, read_metrics


def test_resuming_takes_back_the_steps_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in range(4):
        log.after_step(step, {"rollout/reward_mean": step / 4})
    again = MetricsLog(path, 2)
    again.after_step(2, {"rollout/reward_mean": 0.9})
    assert [(r["step"], r["rollout/reward_mean"]) for r in read_metrics(path)] == [
        (0, 0.0),
        (1, 0.25),
        (2, 0.9),
    ]
    assert again.rows == read_metrics(path)


def test_a_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, "a/b": 1.0}) + "\n" + '{"step": 1, "a/')
    assert read_metrics(path) == [{"step": 0, "a/b": 1.0}]
    MetricsLog(path, 1).after_step(1, {"a/b": 2.0})
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
