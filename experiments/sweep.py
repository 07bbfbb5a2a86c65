"""Runs of one experiment under several settings.

Every run has a process of its own. Finished runs are kept.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lightning_jax.train.status import read_end


def train(directory: Path, arguments: Sequence[str]) -> None:
    """Train in a child process, or resume, unless the run in the directory has finished.

    Its output is in a file beside the directory. A run that learned nothing has finished too.
    Exits with one sentence if it fails.
    """
    if has_finished(directory):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    log, started = directory.with_suffix(".log"), time.monotonic()
    command = [sys.executable, "-m", "lightning_jax", "train", *arguments, f"run_dir={directory}"]
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    if not has_finished(directory):
        last = (log.read_text(errors="replace").strip() or "no output").splitlines()[-1]
        sys.exit(f"{directory} ended with status {code}: {last}; {log} has all of its output")
    print(f"{directory}: {time.monotonic() - started:.0f} s", flush=True)


def has_finished(directory: Path) -> bool:
    """Return True if a run in the directory ended by itself."""
    end = read_end(directory)
    return end is not None and end.status == "finished"


def mean_and_error(values: Sequence[float]) -> str:
    """Return the mean and, for two values or more, its standard error."""
    mean = f"{statistics.fmean(values):.3f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"
