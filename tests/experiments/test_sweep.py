"""Tests of runs under several settings."""

import json
from pathlib import Path

import pytest
import sweep


def test_mean_and_its_error_over_seeds() -> None:
    assert sweep.mean_and_error([0.5]) == "0.500"
    assert sweep.mean_and_error([0.2, 0.4]) == "0.300 ± 0.100"  # std 0.141 / sqrt 2


def test_a_finished_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "ended.json").write_text(json.dumps({"status": "finished"}))
    sweep.train(tmp_path, sweep.command("no_such_setting=1"))


def test_a_run_that_fails_names_its_cause_and_its_output(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        sweep.train(tmp_path / "run", sweep.command("no_such_setting=1"))
    assert "no_such_setting" in str(caught.value) and str(tmp_path / "run.log") in str(caught.value)
