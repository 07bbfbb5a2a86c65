"""Records of a measurement on a borrowed accelerator. Imports the standard library alone."""

import ctypes
import signal
from collections.abc import Callable, Iterable
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


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Linux only; for `preexec_fn`.

    Otherwise a run would outlive a command that is killed, and hold the device and its directory.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
