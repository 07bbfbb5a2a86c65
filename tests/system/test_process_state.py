"""Tests of the state that all code of a process shares: what changed is put back."""

import io
import locale
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_jax.system.process_state import (
    PARTS,
    ProcessState,
    handle_stop_signals,
    kept_process,
)


@pytest.fixture(autouse=True)
def _restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore everything even if a test fails."""
    monkeypatch.chdir(tmp_path)
    with kept_process():
        yield


def _leave() -> None:
    gone = tempfile.mkdtemp()
    os.chdir(gone)
    shutil.rmtree(gone)


CHANGES: dict[str, Callable[[], Any]] = {
    "working directory": lambda: os.chdir("/"),
    "umask": lambda: os.umask(0o777),
    "sys.stdout": lambda: setattr(sys, "stdout", io.StringIO()),
    "sys.stderr": lambda: setattr(sys, "stderr", io.StringIO()),
    "directory of temporary files": lambda: setattr(tempfile, "tempdir", "/nowhere"),
    "filters of warnings": lambda: warnings.simplefilter("error", ResourceWarning),
    "logging": lambda: logging.disable(logging.CRITICAL),
    "locale": lambda: locale.setlocale(locale.LC_ALL, _other_locale()),
    "timeout of sockets": lambda: socket.setdefaulttimeout(0.25),
    "handlers of SIGINT and SIGTERM": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
}


def _other_locale() -> str:
    now = locale.setlocale(locale.LC_ALL)
    for name in ("C.UTF-8", "C", "POSIX", "en_US.UTF-8"):
        try:
            if locale.setlocale(locale.LC_ALL, name) != now:
                return name
        except locale.Error:
            continue
    pytest.skip("this machine has one locale")


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_restored(name: str) -> None:
    state = ProcessState()
    before = PARTS[name].read()
    assert state.restore() == []
    CHANGES[name]()
    assert PARTS[name].read() != before
    assert state.restore() == [name]
    assert PARTS[name].read() == before
    assert state.restore() == []


def test_every_part_has_a_test() -> None:
    assert set(CHANGES) == set(PARTS)


def test_a_directory_that_is_gone_and_closed_output_are_unusable() -> None:
    state = ProcessState()
    assert not state.is_unusable
    _leave()
    assert state.is_unusable
    assert state.restore() == ["working directory"] and not state.is_unusable
    sys.stdout = io.StringIO()
    assert not state.is_unusable
    sys.stdout.close()
    assert state.is_unusable
    state.restore()
    assert not state.is_unusable


def test_loggers_of_ours_speak_again() -> None:
    ours, other = logging.getLogger("lightning_jax.system.x"), logging.getLogger("other.x")
    state = ProcessState()
    ours.disabled = other.disabled = True  # as `logging.config.dictConfig` does
    assert state.restore() == ["logging"]
    assert not ours.disabled and other.disabled


def test_other_filters_of_warnings_stay() -> None:
    state = ProcessState()
    warnings.filterwarnings("ignore", category=BytesWarning)  # as frameworks do at import
    warnings.simplefilter("error", ResourceWarning)
    state.restore()
    assert warnings.filters[0][:3] == ("ignore", None, BytesWarning)


def test_the_context_restores_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), kept_process():
        _leave()
        raise KeyError
    assert Path.cwd() == tmp_path


def test_both_signals_reach_the_handler_within_the_context() -> None:
    received = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with handle_stop_signals(lambda number, frame: received.append(number)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        received = []
        with handle_stop_signals(lambda number, frame: received.append(number)):
            signal.raise_signal(signal.SIGTERM)
        assert not received and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
