"""Simulated cluster of three nodes on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    # All addresses are of the loopback interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",  # in each process that Ray starts
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.getenv("PYTHONPATH", "")]),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        small = {"num_cpus": 1, "object_store_memory": 100_000_000}
        head = {**small, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            made.add_node(**small, resources={"sampler": 1.0})
        yield made
        made.shutdown()
