"""Tests of rollouts of a plain function, and of a whole loop made from public names."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_agent
from coded import raises_coded

import lightning_jax as lj
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.errors import FieldError, InvalidValue
from lightning_jax.rollouts.results.failures import BrokenAgent
from lightning_jax.settings import ConfigError
from lightning_jax.testing.tiny import tiny_model

MESH = lj.MeshConfig(fsdp=1)
SERVE = lj.ServeConfig(slots=16, max_len=64, prefill_buckets=(32,), mesh=MESH)
MODEL = tiny_model(num_layers=1)
PROGRAMS = [SlotPrograms(MODEL.config, SERVE)]
TASKS: list[lj.Task] = [{"question": word} for word in "abcd"]


@pytest.fixture
async def gateway() -> AsyncIterator[lj.Gateway]:
    engine = lj.Engine(MODEL, SERVE, programs=PROGRAMS)
    engine.start()
    async with lj.Gateway(engine) as gateway:
        yield gateway
    engine.close()


async def test_a_loop_of_public_names_learns() -> None:
    algorithm = lj.AlgorithmConfig()
    batch = lj.BatchConfig(row_len=256, max_targets=128, head_chunk=64)
    learner = lj.Learner(MODEL, algorithm, lj.OptimizerConfig(learning_rate=5e-2), batch, mesh=MESH)
    rows = []
    async with lj.Engine(MODEL, SERVE) as engine, lj.Gateway(engine) as gateway:
        for _ in range(8):
            trajectories, metrics = await lj.run_rollouts(
                toy_agent.run, TASKS, gateway, group_size=8
            )
            sequences, of_data = lj.prepare(trajectories, algorithm)
            rows.append(metrics | of_data | learner.update(sequences))
            engine.publish(learner.params)
        _, evaluated = await lj.run_rollouts(
            toy_agent.run, TASKS, gateway, phase="eval", group_size=1
        )
        assert engine.version == 8
    rewards = [row["rollout/reward_mean"] for row in rows]
    assert rewards[0] < 0.3 and rewards[-1] > 0.8 and evaluated["rollout/reward_mean"] > 0.8
    # Sampler and trainer share one forward function and the same weights.
    assert max(row["train/mismatch_kl"] for row in rows) < 1e-5
    assert {row["train/staleness_mean"] for row in rows} == {0.0}
    np.testing.assert_array_equal(  # the learner trained a copy
        MODEL.params["embed"]["embedding"], tiny_model(num_layers=1).params["embed"]["embedding"]
    )
    trained = learner.model.params["embed"]["embedding"]
    assert np.abs(trained - MODEL.params["embed"]["embedding"]).max() > 0.01


async def test_a_plain_function_runs_in_a_thread_and_calls_are_new_steps(
    gateway: lj.Gateway,
) -> None:
    trajectories: list[lj.Trajectory] = []
    for step in range(2):
        trajectories, metrics = await lj.run_rollouts(toy_agent.plain, TASKS, gateway, group_size=2)
        assert len(trajectories) == 8 and metrics["rollout/num_scored"] == 8.0
        assert {t.group_id for t in trajectories} == {
            f"train-{step:05d}-{index:03d}" for index in range(4)
        }
    assert gateway.store is not None
    stored = gateway.store.rollouts()
    assert {rollout.task_id for rollout in stored} == {"0", "1", "2", "3"} and len(stored) == 16
    again, _ = await lj.run_rollouts(toy_agent.plain, TASKS, gateway, group_size=2, step=1)
    assert again == trajectories  # a step that the store has is not run again


async def test_failures_are_recorded_and_an_agent_that_always_fails_is_an_error(
    gateway: lj.Gateway,
) -> None:
    async def agent(task: lj.Task, llm: lj.LLM) -> float:
        if task["question"] == "a":
            raise KeyError("no such tool")
        return 1.0

    _, metrics = await lj.run_rollouts(agent, TASKS, gateway, group_size=1)
    assert metrics["rollout/num_agent_failures"] == 1.0
    assert gateway.store is not None
    (failed,) = (r for r in gateway.store.rollouts() if r.status == "agent_failure")
    assert failed.reason == "KeyError" and "no such tool" in str(failed.detail)
    with raises_coded(BrokenAgent, "all_failed", "train-00001-000-00-1"):
        await lj.run_rollouts(agent, TASKS[:1], gateway, group_size=1)


@pytest.mark.parametrize(
    ("agent", "tasks", "reason", "key"),
    [
        ("agents/mine.py:run", TASKS, "not_callable", "agent"),
        (lambda task: 1.0, TASKS, "wrong_signature", "agent"),
        (toy_agent.run, [], "empty", "tasks"),
        (toy_agent.run, ["2 + 2"], "wrong_type", "tasks"),
    ],
)
async def test_a_wrong_argument_is_an_error_at_once(
    gateway: lj.Gateway, agent: Any, tasks: Any, reason: str, key: str
) -> None:
    with raises_coded(ConfigError, reason, key):
        await lj.run_rollouts(agent, tasks, gateway)
    with raises_coded(FieldError, "out_of_range", "group_size"):
        await lj.run_rollouts(agent, tasks, gateway, group_size=0)


async def test_a_temporary_store_is_deleted_with_its_gateway() -> None:
    engine = lj.Engine(MODEL, SERVE, programs=PROGRAMS)
    async with lj.Gateway(engine) as gateway:
        assert gateway.store is not None
        path = Path(gateway.store.path)
        assert path.exists()
    assert not path.exists() and not path.parent.exists()
    async with lj.Gateway(engine, records=False) as silent:
        with raises_coded(InvalidValue, "missing", "store"):
            await lj.run_rollouts(toy_agent.run, TASKS, silent)
    engine.close()
