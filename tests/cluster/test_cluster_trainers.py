"""Tests of runs whose trainer has processes in a simulated cluster of three nodes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_agent
from test_cluster_run import TASKS, settings

from lightning_jax.models.config import MeshConfig
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.settings import save_config
from lightning_jax.traces.store import Store
from lightning_jax.train.config import CheckpointConfig, ClusterConfig, DataConfig
from lightning_jax.train.watch.metrics import read_metrics

pytest.importorskip("ray", reason="the extra ray is not installed")
pytestmark = pytest.mark.slow

STEPS = 8
LIMIT_S = 240.0


def write_config(cluster: Any, folder: Path, **asked: Any) -> Path:
    """Write settings and tasks of a run that saves each step."""
    for name in ("train", "dev"):
        tasks = [{**task, "id": f"{name}-{task['id']}", "in": name} for task in TASKS]
        lines = "".join(json.dumps(task) + "\n" for task in tasks)
        (folder / f"{name}.jsonl").write_text(lines)
    config = settings(
        cluster,
        folder,
        num_steps=STEPS,
        agent=AgentConfig(f"{toy_agent.__file__}:run"),
        data=DataConfig(root=str(folder)),
        checkpoint=CheckpointConfig(every=1),
        batch=BatchConfig(rows=2, row_len=128, max_targets=64, head_chunk=64),
        mesh=MeshConfig(fsdp=asked["trainers"]),
        cluster=ClusterConfig(cluster.address, **asked),
    )
    save_config(config, folder / "config.yaml")
    return folder / "config.yaml"


@contextlib.contextmanager
def training(config: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Run the command in the background, and yield it and its output."""
    output = config.parent / "output.txt"
    with output.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_jax", "train", str(config)],
            stdout=log,
            stderr=log,
            cwd=config.parent,
        )
        try:
            yield process, output
        finally:
            process.kill()
            process.wait()


def num_steps(folder: Path) -> int:
    path = folder / "run/metrics.jsonl"
    return len([row for row in read_metrics(path) if "time/step_s" in row]) if path.exists() else 0


def wait_for(holds: Callable[[], Any], process: "subprocess.Popen[bytes]", output: Path) -> Any:
    started = time.monotonic()
    while not (found := holds()):
        assert process.poll() is None, output.read_text()
        assert time.monotonic() - started < LIMIT_S, output.read_text()
        time.sleep(0.05)
    return found


def pid_of(process_id: int) -> int | None:
    """Return a process of a trainer, without those of agents that it started."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
            if (
                b"lightning_jax.cli.train_in_cluster" in words
                and b"process_id=%d\0" % process_id in words
            ):
                return int(folder.name)
    return None


def check_run(folder: Path) -> list[float]:
    """Check that each step was trained once on whole groups. Return the rewards."""
    rows = [row for row in read_metrics(folder / "run/metrics.jsonl") if "time/step_s" in row]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert {row["rollout/num_scored"] for row in rows} == {32.0}
    return [row["rollout/reward_mean"] for row in rows]


def test_killed_processes_of_a_trainer_start_again(cluster: Any, tmp_path: Path) -> None:
    asked = {"trainers": 2, "trainer_resources": {"CPU": 0.5}, "samplers": 1}
    config = write_config(cluster, tmp_path, **asked, sampler_resources={"sampler": 1.0})
    with training(config) as (process, output):
        for index in (1, 0):
            before = num_steps(tmp_path)
            wait_for(lambda least=before: num_steps(tmp_path) >= least + 2, process, output)
            os.kill(wait_for(lambda i=index: pid_of(i), process, output), signal.SIGKILL)
        assert process.wait(LIMIT_S) == 0, output.read_text()
    text = output.read_text()
    for index in (0, 1):
        assert f"trainer process {index} died (SIGKILL); all 2 start again from the" in text
    rewards = check_run(tmp_path)
    assert rewards[0] < 0.3 and rewards[-1] > 0.5


def test_stop_saves_the_last_step_of_all_processes(cluster: Any, tmp_path: Path) -> None:
    config = write_config(cluster, tmp_path, trainers=2, trainer_resources={"CPU": 0.5})
    with training(config) as (process, output):
        wait_for(lambda: num_steps(tmp_path) >= 2, process, output)
        process.terminate()
        assert process.wait(60) == 130, output.read_text()
        assert "stopped; run the same command to resume" in output.read_text()
        assert pid_of(0) is None and pid_of(1) is None
    with training(config) as (process, output):
        assert process.wait(LIMIT_S) == 0, output.read_text()
    check_run(tmp_path)


def test_killed_head_resumes_with_the_same_command(cluster: Any, tmp_path: Path) -> None:
    asked = {"samplers": 2, "sampler_resources": {"sampler": 1.0}, "trainers": 1}
    config = write_config(cluster, tmp_path, **asked)
    with training(config) as (process, output):
        wait_for(lambda: num_steps(tmp_path) >= 3, process, output)
        process.kill()
    with training(config) as (process, output):
        assert process.wait(LIMIT_S) == 0, output.read_text()
    check_run(tmp_path)
    with contextlib.closing(Store(tmp_path / "run/store.sqlite", read_only=True)) as store:
        scored = [r for r in store.rollouts(phase="train") if r.status == "scored"]
    assert len({r.rollout_id for r in scored}) == len(scored) == STEPS * 32


def test_lost_node_costs_attempts_and_not_the_run(cluster: Any, tmp_path: Path) -> None:
    """A node with a sampler, and perhaps the trainer's process 1, is lost. Another one joins."""
    resources = {"sampler": 0.5}
    asked = {"trainers": 2, "trainer_resources": resources}
    config = write_config(cluster, tmp_path, **asked, samplers=2, sampler_resources=resources)
    with training(config) as (process, output):
        wait_for(lambda: num_steps(tmp_path) >= 2, process, output)
        cluster.replace_node()
        assert process.wait(LIMIT_S) == 0, output.read_text()
    check_run(tmp_path)
