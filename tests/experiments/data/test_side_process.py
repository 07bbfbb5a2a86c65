"""Tests of side processes: ready message, exit with us, and errors when starting."""

import json
import time
from pathlib import Path

import psutil
import pytest
from coded import raises_coded
from log_events import records
from side_process import SideProcessError, side_process

READY = """
import json, os, sys
print(json.dumps({"pid": os.getpid(), "words": sys.argv[1:]}), flush=True)
"""
WAIT = "sys.stdin.read()\n"


def _program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_it_runs_beside_us_and_ends_with_us(tmp_path: Path) -> None:
    program = _program(tmp_path, READY + WAIT)
    with side_process([program, "--x", "1"], start_timeout_s=30.0) as started:
        assert started["words"] == ["--x", "1"]
        assert psutil.pid_exists(started["pid"])
    assert _gone(started["pid"])
    with pytest.raises(KeyError), side_process([program], start_timeout_s=30.0) as started:
        raise KeyError
    assert _gone(started["pid"])


def test_one_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("side_process.END_TIMEOUT_S", 0.2)
    program = _program(tmp_path, READY + "import time; time.sleep(60)\n")
    with side_process([program], start_timeout_s=30.0) as started:
        pass
    assert _gone(started["pid"])


def test_one_that_ended_by_itself_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = _program(tmp_path, READY + "sys.exit('it broke')\n")
    with side_process([program], start_timeout_s=30.0) as started:
        deadline = time.monotonic() + 10
        while not _gone(started["pid"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (record,) = records(caplog, "side_process_ended")
    assert record.last_words == "it broke"


@pytest.mark.parametrize(
    "text, last_words",
    [
        ("import sys; sys.exit('error: no such corpus')", ": no such corpus"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(3)", ""),
        ("print('hello')", "hello"),
    ],
)
def test_one_that_does_not_start_is_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, last_words: str
) -> None:
    with (
        raises_coded(SideProcessError, "not_started") as caught,
        side_process([_program(tmp_path, text)], start_timeout_s=30.0),
    ):
        pytest.fail("it was never ready")
    assert str(caught.value).endswith(last_words)
    assert caplog.text == ""  # reported once


def test_one_that_is_never_ready_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("side_process.END_TIMEOUT_S", 0.2)
    words = json.dumps(str(tmp_path / "pid"))
    program = _program(
        tmp_path,
        f"import os, time\nopen({words}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n",
    )
    with (
        raises_coded(SideProcessError, "timeout", program),
        side_process([program], start_timeout_s=2.0),
    ):
        pytest.fail("it was never ready")
    assert _gone(int((tmp_path / "pid").read_text()))
