"""Rollouts of an agent on tasks, from the function to the trajectories that it made."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.app import Gateway
from lightning_jax.rollouts.agents.event_loop import isolate_agent
from lightning_jax.rollouts.agents.functions import AgentFunction, as_agent
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.results.failures import FailureWatch
from lightning_jax.rollouts.results.metrics import to_trajectories
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.settings import ConfigError
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces.rows import free_name, is_unnamed
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.types import Metrics, Rollout, Task, Trajectory


async def run_rollouts(
    agent: AgentFunction,
    tasks: Sequence[Task],
    gateway: Gateway,
    config: RolloutConfig | None = None,
    *,
    group_size: int | None = None,
    phase: str = "train",
    step: int | None = None,
    seed: int = 0,
) -> tuple[list[Trajectory], Metrics]:
    """Run an agent `group_size` times on each task and return (trajectories, metrics).

    `agent(task, llm)` is a function or a coroutine function that returns its reward, or a dict with
    `reward` and other numbers. Plain functions run in threads. Coroutines run on an event loop that
    ends with this call, so clients must be made inside the agent. An agent that blocks therefore
    delays neither the gateway nor this coroutine's event loop.

    Failed rollouts are logged, retried and recorded in the gateway's store as in a run. Phase
    "eval" samples greedily. `step` is by default the first one that the store does not have; with
    an old step, finished rollouts of the store are returned again.

    Raises ConfigError for an unusable agent or task, TooManyFailures if the infrastructure failed
    too often, and BrokenAgent if all rollouts failed before the policy answered a call.
    """
    store, config = gateway.store, config or RolloutConfig()
    if store is None:
        raise InvalidValue.missing(
            "store", "the gateway records nothing; open it without records=False"
        )
    if group_size is not None:
        config = replace(config, group_size=group_size)
    agent, tasks = as_agent(agent), with_ids(tasks)
    if not tasks:
        raise ConfigError.empty("tasks", "there are no tasks; pass at least one")
    if step is None:
        step = await store.in_order(store.next_step, phase)
    await store.in_order(store.supersede_marked)  # of an agent that failed everywhere
    requests = make_requests(tasks, phase, step, config.group_size)
    async with isolate_agent(agent) as isolated:
        rollouts = await run_requests(requests, Runner(isolated, gateway, config, seed))
    await run_in_thread(FailureWatch(store).observe, rollouts, f"{phase} {step}")
    return await read_trajectories(store, rollouts, policy_version=gateway.engine.version)


def with_ids(tasks: Sequence[Any]) -> list[Task]:
    """Return the tasks, with their position as the id where they have none.

    Raises ConfigError if one is not a dict.
    """
    for index, task in enumerate(tasks):
        if not isinstance(task, Mapping):
            raise ConfigError.wrong_type(
                "tasks",
                f"task {index} is a {type(task).__name__}; pass a dict, such as "
                '{"question": "2 + 2"}',
            )
    names = {str(task["id"]) for task in tasks if not is_unnamed(task)}
    named = []
    for index, task in enumerate(tasks):
        name = {"id": free_name(str(index), names) if is_unnamed(task) else task["id"]}
        named.append(name | dict(task) | name)  # the id comes first
    return named


async def read_trajectories(
    store: Store,
    rollouts: Sequence[Rollout],
    *,
    policy_version: int,
    reader: TraceReader | None = None,
) -> tuple[list[Trajectory], Metrics]:
    """Return `to_trajectories` in a thread, once all spans of the rollouts are stored."""
    await store.wait_for_spans()
    return await run_in_thread(
        to_trajectories, store, rollouts, policy_version=policy_version, reader=reader
    )
