"""Tests of an error in a process that follows process 0 of a run."""

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lightning_jax.cli import train as cli_train
from lightning_jax.settings import ConfigError
from lightning_jax.train.config import Config


@pytest.fixture
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the statuses with which the process would have ended at once."""
    found: list[int] = []

    def end(status: int) -> NoReturn:
        found.append(status)
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    return found


async def _fail(*arguments: Any, **named: Any) -> Any:
    raise ConfigError("the disk is full; free some space.", reason="full", key="run_dir")


def test_follower_says_its_error_and_does_not_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[int],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(cli_train, "train", _fail)
    monkeypatch.setattr(cli_train, "is_follower", lambda: True)
    with pytest.raises(SystemExit):
        cli_train.train_and_report(Config(run_dir=str(tmp_path)), [], [])
    assert statuses == [1]
    assert capsys.readouterr().err == "error: the disk is full; free some space.\n"


def test_process_0_ends_as_any_other(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], tmp_path: Path
) -> None:
    monkeypatch.setattr(cli_train, "train", _fail)
    with pytest.raises(ConfigError):
        cli_train.train_and_report(Config(run_dir=str(tmp_path)), [], [])
    assert not statuses
