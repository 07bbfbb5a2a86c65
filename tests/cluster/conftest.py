"""Simulated cluster of three nodes on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",  # in each process that Ray starts
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.getenv("PYTHONPATH", "")]),
}


@dataclass(frozen=True)
class SimulatedCluster:
    """Cluster that another process holds."""

    address: str
    process: "subprocess.Popen[str]"

    def replace_node(self) -> None:
        """Kill a node other than the first, and add another one."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert answer_of(self.process) == "replaced"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimulatedCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("simulated_nodes.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            yield SimulatedCluster(answer_of(process), process)


def answer_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
