"""Tests of runs under several settings."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import sweep


def test_mean_and_its_error_over_seeds() -> None:
    assert sweep.mean_and_error([0.5]) == "0.500"
    assert sweep.mean_and_error([0.2, 0.4]) == "0.300 ± 0.100"  # std 0.141 / sqrt 2


def test_a_finished_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "ended.json").write_text(json.dumps({"status": "finished"}))
    sweep.train([sweep.Training(tmp_path, sweep.command("no_such_setting=1"))])


def _program(directory: Path, code: str) -> sweep.Training:
    return sweep.Training(directory, [sys.executable, "-c", code])


def test_a_run_that_fails_names_its_cause_and_its_output(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        sweep.train([sweep.Training(tmp_path / "run", sweep.command("no_such_setting=1"))])
    assert "no_such_setting" in str(caught.value) and str(tmp_path / "run.log") in str(caught.value)


def test_runs_at_once_wait_for_each_other(tmp_path: Path) -> None:
    # Each of the two ends when the other has begun, which one after the other never would.
    end = json.dumps({"status": "finished"})
    names = ["a", "b"]
    trainings = [
        _program(
            tmp_path / mine,
            f"""
import pathlib, time
mine, other = pathlib.Path({str(tmp_path / mine)!r}), pathlib.Path({str(tmp_path / other)!r})
mine.mkdir()
deadline = time.monotonic() + 60
while not other.exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
(mine / "ended.json").write_text({end!r})
""",
        )
        for mine, other in zip(names, reversed(names), strict=True)
    ]
    sweep.train(trainings, 2)
    assert all(map(sweep.has_finished, (tmp_path / name for name in names)))


def test_no_run_starts_after_one_failed(tmp_path: Path) -> None:
    trainings = [
        _program(tmp_path / "fails", "raise SystemExit('no luck')"),
        _program(tmp_path / "later", f"open({str(tmp_path / 'started')!r}, 'w')"),
    ]
    with pytest.raises(SystemExit, match="no luck"):
        sweep.train(trainings)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_number_of_runs_that_is_none_is_refused(
    jobs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    sweep.add_flags(parser, num_seeds=1)
    with pytest.raises(SystemExit):
        parser.parse_args(["--jobs", jobs])
    assert "at least 1" in capsys.readouterr().err
