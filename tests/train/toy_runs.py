"""Settings and tasks of small runs of the toy agent, which tests of the loop share."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import toy_agent

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig, PolicyConfig
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces.config import RoleConfig
from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig
from lightning_jax.train.tasks.source import Group
from lightning_jax.types import Task

TOY = Path(toy_agent.__file__)
MODEL = tiny_model(num_layers=1)
TASKS: list[Task] = [{"id": f"t{i}", "question": "abcd"[i]} for i in range(4)]
CORRECTED = AlgorithmConfig(proximal="old", correction="truncate")
NUM_STEPS = 6
NAMES = ("speaker", "listener", "judge")
LORA = LoraConfig(rank=4, targets=("q", "down"))


def toy_config(model_dir: Path, run_dir: Path, **changes: object) -> Config:
    config = Config(
        run_dir=str(run_dir),
        num_steps=12,
        model=ModelConfig(name=str(model_dir)),
        serve=ServeConfig(slots=16, max_len=64, prefill_buckets=(32,)),
        agent=AgentConfig(f"{TOY}:run"),
        rollout=RolloutConfig(tasks_per_step=4, group_size=8, concurrency=32),
        algorithm=AlgorithmConfig(),
        batch=BatchConfig(rows=1, row_len=256, max_targets=128, head_chunk=64),
        optimizer=OptimizerConfig(learning_rate=3e-2),
        eval=EvalConfig(every=0, num_tasks=4, at_start=False),
        checkpoint=CheckpointConfig(every=5),
        mesh=MeshConfig(fsdp=1),
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def ahead_config(run_dir: Path, **rollout: Any) -> Config:
    return Config(
        run_dir=str(run_dir),
        num_steps=NUM_STEPS,
        model=ModelConfig(name="tiny"),
        serve=ServeConfig(slots=4, max_len=64, prefill_buckets=(32,)),
        agent=AgentConfig(f"{toy_agent.__file__}:run"),
        rollout=RolloutConfig(tasks_per_step=2, group_size=3, concurrency=8, **rollout),
        algorithm=CORRECTED,
        batch=BatchConfig(rows=1, row_len=128, max_targets=64, head_chunk=64),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        eval=EvalConfig(every=2, num_tasks=2),
        checkpoint=CheckpointConfig(every=2),
        mesh=MeshConfig(fsdp=1),
    )


async def groups_of(versions: str) -> list[Group]:
    """Return groups that began with these versions: `1` is complete and `(1)` still runs."""
    never, groups = asyncio.Event(), list[Group]()
    for index, word in enumerate(versions.split()):
        waits = never.wait() if word.startswith("(") else asyncio.sleep(0)
        running: Any = asyncio.create_task(waits)  # type: ignore[arg-type]
        groups.append(Group((0, index), int(word.strip("()")), {"id": "x"}, (running,)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return groups


def policies_config(model_dir: Path, run: Path, **changes: Any) -> Config:
    return toy_config(
        model_dir,
        run,
        **{
            "num_steps": 2,
            "model": ModelConfig(name=str(model_dir), lora=LORA),
            "policies": {name: PolicyConfig(trains=name != "judge") for name in NAMES},
            "roles": {name: RoleConfig(agent=name, policy=name) for name in NAMES[:2]}
            | {"judge": RoleConfig(model="judge", policy="judge")},
            "agent": AgentConfig(f"{TOY}:three_policies"),
            "serve": ServeConfig(slots=2, max_len=64, prefill_buckets=(32,)),
            "rollout": RolloutConfig(tasks_per_step=2, group_size=4),
            "optimizer": OptimizerConfig(learning_rate=3e-2),
            "eval": EvalConfig(every=0, num_tasks=2, at_start=False),
            "checkpoint": CheckpointConfig(every=1, keep=3),
        }
        | changes,
    )
