"""Records of a measurement on a borrowed accelerator. Imports the standard library alone."""

import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One measured number beside its prediction."""

    name: str
    value: float
    unit: str
    predicted: str = ""  # empty: nothing was predicted
    note: str = ""


@dataclass(frozen=True)
class Setting:
    """Circumstances of a case."""

    out: Path  # directory for files that are brought home
    work: Path  # directory that stays on the machine: model, runs, compiled programs
    seconds: float  # until the case is killed
    is_tiny: bool = False  # a rehearsal: small shapes, few repeats


@dataclass(frozen=True)
class Case:
    """One measurement, run in a process of its own.

    `run` yields each figure as soon as it is measured, because the process may be killed. It
    imports JAX itself, so that listing cases needs no packages.
    """

    name: str
    minutes: float  # predicted, with compiling
    measures: str  # one line
    run: Callable[[Setting], Iterable[Figure]]
    least_s: float | None = None  # of time left to start it; None: a share of `minutes`
    is_resumed: bool = False  # by a later command, so that it may take all the time that is left


def failed(name: str, unit: str, error: BaseException | str, predicted: str = "") -> Figure:
    """Return a figure without a value, with the reason in its note."""
    if isinstance(error, BaseException):
        text = str(error).strip().split("\n")[0]
        error = f"{type(error).__name__}: {text}"[:300]
    return Figure(name, math.nan, unit, predicted, error)


# Linux only. The signal survives `execv`. A parent that ended before it was asked for is noticed.
_TIED = f"""import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGKILL)})  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return the command as one that the kernel kills when this process ends.

    Otherwise a run would outlive a command that is killed, and hold the device and its directory.
    """
    return [sys.executable, "-c", _TIED, str(os.getpid()), *command]
