"""Tests of whole runs over a simulated cluster of three nodes on this machine.

The run's process is on the first node, and a sampler on each of the others.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
import toy_agent
from cluster_runs import SAMPLER, settings
from coded import raises_coded
from toy_runs import TASKS
from waiting import until

from lightning_jax.cluster import placing
from lightning_jax.cluster.actor import SamplerActor
from lightning_jax.cluster.ray_session import ray_session
from lightning_jax.models.config import LoraConfig, PolicyConfig
from lightning_jax.rollouts.agents.outcome import CONTEXT_LENGTH, SERVER_LOST
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.settings import ConfigError
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.config import ClusterConfig
from lightning_jax.train.loop.startup import open_run
from lightning_jax.train.loop.trainer import train
from lightning_jax.types import LLM, Task

pytest.importorskip("ray", reason="the extra ray is not installed")

AGENT = f'''
"""Agent that waits for a file before its call, and says in which process it runs."""

import asyncio
import os
import sys

sys.path.insert(0, {str(Path(toy_agent.__file__).parent)!r})
import toy_agent


async def run(task, llm):
    while not os.path.exists(task["gate"]):
        await asyncio.sleep(0.02)
    return {{"reward": await toy_agent.run(task, llm), "pid": os.getpid()}}
'''


def pids_of(actor: bytes) -> list[int]:
    """Return the processes of samplers or workers, oldest first."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"ray::" + actor in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


def sampler_pids() -> list[int]:
    return pids_of(b"Sampler")


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


async def _asks_too_much(task: Task, llm: LLM) -> float:
    """Run an agent whose later prompts are too long, and that waits once they are not answered."""
    await toy_agent.run(task, llm)
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        with pytest.raises(openai.NotFoundError):
            while True:
                with contextlib.suppress(openai.BadRequestError):
                    await client.completions.create(model="policy", prompt=[5] * 200)
    await asyncio.sleep(3600)
    return 0.0


@pytest.mark.slow
async def test_prompts_that_stay_too_long_end_a_rollout_at_a_sampler(
    cluster: Any, tmp_path: Path
) -> None:
    few = RolloutConfig(tasks_per_step=2, group_size=2)
    config = settings(cluster, tmp_path, rollout=few)
    async with open_run(config, TASKS, [], agent=_asks_too_much) as run, asyncio.timeout(60):
        await run.one_step()
        reasons = {rollout.reason for rollout in run.store.rollouts(step=0)}
    assert reasons == {CONTEXT_LENGTH}
    await until(lambda: not sampler_pids())


@pytest.mark.slow
async def test_a_cluster_that_is_too_small_is_refused(cluster: Any, tmp_path: Path) -> None:
    asked = ClusterConfig(cluster.address, 3, sampler_resources=SAMPLER, timeout_s=5.0)
    with raises_coded(ConfigError, "too_small", "cluster.samplers"):
        await train(settings(cluster, tmp_path, cluster=asked), TASKS, TASKS, agent=toy_agent.run)
    await until(lambda: not sampler_pids())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "reason"),
    [(signal.SIGKILL, "worker_lost"), (signal.SIGSTOP, "worker_silent")],
)
async def test_agents_run_in_placed_workers_and_a_lost_one_costs_an_attempt(
    cluster: Any, tmp_path: Path, ending: signal.Signals, reason: str
) -> None:
    (tmp_path / "own_agent.py").write_text(AGENT)
    gate = tmp_path / "gate"
    gate.touch()
    tasks = [{**task, "gate": str(gate)} for task in TASKS]
    asked = ClusterConfig(
        cluster.address, 2, sampler_resources=SAMPLER, workers=2, worker_resources={"CPU": 0.5}
    )
    agent = AgentConfig(f"{tmp_path}/own_agent.py:run", lease_s=5.0)
    config = settings(cluster, tmp_path, cluster=asked, agent=agent)
    async with open_run(config, tasks, tasks) as run:
        row = await run.one_step()
        assert row["rollout/num_scored"] == 32.0
        workers = pids_of(b"Worker")
        by_process = Counter(r.metrics["pid"] for r in run.store.rollouts(step=0))
        assert set(by_process) == set(workers) and min(by_process.values()) > 5

        gate.unlink()
        stepping = asyncio.create_task(run.one_step())
        running = [r for r in run.store.rollouts(step=1) if r.status == "running"]
        async with asyncio.timeout(60):
            while len(running) < 32:
                await asyncio.sleep(0.1)
                running = [r for r in run.store.rollouts(step=1) if r.status == "running"]
        os.kill(workers[0], ending)
        await until(lambda: [r for r in run.store.rollouts(step=1) if r.reason == reason])
        gate.touch()
        row = await stepping
        assert row["rollout/num_scored"] == 32.0
        lost = [r for r in run.store.rollouts(step=1) if r.reason == reason]
        assert len(lost) >= 5 and {r.attempt for r in lost} == {1}
        await until(lambda: run.gateway.work.num_workers == 2)
        await run.one_step()
        assert len({r.metrics["pid"] for r in run.store.rollouts(step=2)}) == 2
    await until(lambda: not pids_of(b"Worker") and not sampler_pids())


@pytest.mark.slow
async def test_agent_that_workers_cannot_load_ends_the_run(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "own_agent.py").write_text("import no_such_package\n\nasync def run(t, llm): ...\n")
    asked = ClusterConfig(cluster.address, workers=1, worker_resources={"CPU": 0.5})
    agent = AgentConfig(f"{tmp_path}/own_agent.py:run")
    with raises_coded(ConfigError, "not_loaded", f"{tmp_path}/own_agent.py"):
        await train(settings(cluster, tmp_path, cluster=asked, agent=agent), TASKS, TASKS)
    await until(lambda: not pids_of(b"Worker"))


@pytest.mark.slow
async def test_two_runs_of_one_name_do_not_share_samplers(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their directories are on machines of their own, so no lock is shared."""
    monkeypatch.setattr(placing, "FREED_S", 0.0)
    config = settings(cluster, tmp_path)
    with ray_session(config.cluster) as ray:
        actor = SamplerActor, 0, str(tmp_path / "run"), ()
        other, _ = await placing.start_actor(ray, config.cluster, *actor)
        with raises_coded(ConfigError, "claimed", "run_dir"):
            await placing.start_actor(ray, config.cluster, *actor)
        ray.kill(other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapters", "policies"])
async def test_adapters_and_several_policies_reach_the_samplers(
    cluster: Any, tmp_path: Path, kind: str
) -> None:
    config = settings(cluster, tmp_path)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, lora=LoraConfig(rank=2 * (kind == "adapters"))),
        policies={"writer": PolicyConfig(), "critic": PolicyConfig()},
        num_steps=2,
    )

    async def pair(task: Task, llm: LLM) -> float:
        """Ask both policies."""
        asked = [dataclasses.replace(llm, model=name) for name in ("writer", "critic")]
        return sum([await toy_agent.run(task, one) for one in asked]) / 2

    rows = await train(config, TASKS, TASKS, agent=pair)
    assert [row["rollout/num_calls"] for row in rows[:2]] == [64.0, 64.0]
    found = [v for row in rows[:2] for k, v in row.items() if k.startswith("train/mismatch_kl")]
    assert found and max(found) < 1e-5
    with contextlib.closing(Store(tmp_path / "run/store.sqlite", read_only=True)) as store:
        for rollout in store.rollouts(step=1, phase="train"):
            calls = [s for s in store.spans(rollout.rollout_id) if s.name.startswith("chat")]
            assert [set(s.attributes[attributes.POLICY_VERSIONS]) for s in calls] == [{1}, {1}]
