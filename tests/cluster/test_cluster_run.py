"""Tests of whole runs over a simulated cluster of three nodes on this machine.

The run's process is on the first node, and a sampler on each of the others.
"""

import asyncio
import dataclasses
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_agent
from coded import raises_coded

from lightning_jax.cluster.config import ClusterConfig
from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import MeshConfig, ModelConfig
from lightning_jax.models.formats.load import save_hf
from lightning_jax.rl.config import BatchConfig, OptimizerConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.outcome import SERVER_LOST
from lightning_jax.settings import ConfigError
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces import attributes
from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig
from lightning_jax.train.startup import open_run
from lightning_jax.train.trainer import train
from lightning_jax.types import Task

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow  # 138 s on a busy machine, of which the cluster takes 37

TASKS: list[Task] = [{"id": f"t{i}", "question": "abcd"[i]} for i in range(4)]
SAMPLER = {"sampler": 1.0}  # a resource of the second and the third node
ENVIRONMENT = {
    # All addresses are of the loopback interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_raylet_start_wait_time_s": "120",  # on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
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
            made.add_node(**small, resources=SAMPLER)
        yield made
        made.shutdown()


def settings(ray_cluster: Any, folder: Path, **changes: Any) -> Config:
    model = folder / "tiny"
    if not model.exists():
        save_hf(model, tiny_model(num_layers=1))
    config = Config(
        run_dir=str(folder / "run"),
        num_steps=6,
        model=ModelConfig(name=str(model)),
        serve=ServeConfig(slots=16, max_len=64, prefill_buckets=(32,)),
        rollout=RolloutConfig(tasks_per_step=4, group_size=8, concurrency=32, retry_delay_s=0.1),
        batch=BatchConfig(rows=1, row_len=256, max_targets=128, head_chunk=64),
        optimizer=OptimizerConfig(learning_rate=5e-2),
        eval=EvalConfig(every=0, num_tasks=4, at_start=False),
        checkpoint=CheckpointConfig(every=5),
        mesh=MeshConfig(fsdp=1),
        cluster=ClusterConfig(ray_cluster.address, samplers=2, sampler_resources=SAMPLER),
    )
    return dataclasses.replace(config, **changes)


def sampler_pids() -> list[int]:
    """Return the processes of samplers, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"ray::Sampler" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


class Gate:
    """Agent that waits at a gate before its call, and counts where it was sent."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.num_waiting = 0
        self.servers: Counter[str] = Counter()

    async def __call__(self, task: Task, llm: Any) -> float:
        self.servers[llm.base_url.split("/rollout")[0]] += 1
        self.num_waiting += 1
        while not self.is_open.is_set():
            await asyncio.sleep(0.02)
        self.num_waiting -= 1
        return await toy_agent.run(task, llm)


async def until(holds: Any, limit_s: float = 120.0) -> None:
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < limit_s
        await asyncio.sleep(0.05)


async def test_a_run_learns_over_three_nodes_and_survives_a_killed_sampler(
    cluster: Any, tmp_path: Path
) -> None:
    gate = Gate()
    async with open_run(settings(cluster, tmp_path), TASKS, TASKS, agent=gate.__call__) as run:
        rows = [await run.one_step() for _ in range(3)]
        assert len(gate.servers) == 2 and min(gate.servers.values()) > 30  # 96 rollouts

        gate.is_open.clear()
        stepping = asyncio.create_task(run.one_step())
        await until(lambda: gate.num_waiting == 32)
        os.kill(sampler_pids()[0], signal.SIGKILL)
        await until(lambda: run.gateway.stats()["serve/samplers_lost"] == 1)
        gate.is_open.set()
        rows.append(await stepping)
        lost = [r for r in run.store.rollouts(step=3) if r.reason == SERVER_LOST]
        assert len(lost) >= 10 and {r.status for r in lost} == {"infrastructure_failure"}
        assert rows[3]["rollout/num_scored"] == 32.0

        await until(lambda: run.gateway.stats()["serve/samplers"] == 2)
        rows += [await run.one_step() for _ in range(2)]
        assert len(gate.servers) == 3 and gate.servers.most_common()[-1][1] >= 20
        rewards = [row["rollout/reward_mean"] for row in rows]
        assert rewards[0] < 0.3 and rewards[-1] > 0.5
        # The trainer's log-probabilities are those of the sampler that came back, too.
        assert max(row["train/mismatch_kl"] for row in rows) < 1e-5
        for rollout in run.store.rollouts(step=5):
            calls = [s for s in run.store.spans(rollout.rollout_id) if s.name.startswith("chat")]
            assert [set(s.attributes[attributes.POLICY_VERSIONS]) for s in calls] == [{5}]
    await until(lambda: not sampler_pids())


async def test_a_cluster_that_is_too_small_is_refused(cluster: Any, tmp_path: Path) -> None:
    asked = ClusterConfig(cluster.address, 3, sampler_resources=SAMPLER, timeout_s=5.0)
    with raises_coded(ConfigError, "too_small", "cluster.samplers"):
        await train(settings(cluster, tmp_path, cluster=asked), TASKS, TASKS, agent=toy_agent.run)
    await until(lambda: not sampler_pids())
