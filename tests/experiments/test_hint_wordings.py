"""Tests of the comparison of hints' wordings."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "hint_wordings.py"


@pytest.mark.slow
def test_a_row_for_each_wording() -> None:
    command = [sys.executable, str(SCRIPT), "--tasks", "2", "--model", "tiny"]
    names = ["none", "line"]
    flags = [word for name in names for word in ("--wording", name)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == names, done.stderr
    assert all(0 <= float(row[1].split()[0]) <= 1 for row in rows)
