"""Tests of the choice between this process, workers of this machine and others."""

import os
import threading
from typing import Any

import pytest
import toy_agent
from coded import raises_coded

from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.settings import ConfigError
from lightning_jax.train.loop import agent_choice
from lightning_jax.train.loop.agent_choice import choose_agent
from lightning_jax.types import Task

REFERENCE = f"{toy_agent.__file__}:run"
TASKS: list[Task] = [{"id": "a", "question": "b"}]
UNSENDABLE: list[Task] = [{"id": "a", "lock": threading.Lock()}]


@pytest.mark.parametrize(
    ("settings", "num_others", "number"),
    [
        ({"workers": 3}, 0, 3),
        ({"remote_workers": True}, 0, 0),
        ({"workers": 2, "remote_workers": True}, 0, 2),
        ({}, 4, 0),
        ({"workers": 0}, 4, 0),
    ],
)
def test_workers_replace_the_agent_of_this_process(
    settings: dict[str, Any], num_others: int, number: int
) -> None:
    config = AgentConfig(REFERENCE, **settings)
    assert choose_agent(config, None, TASKS, num_others=num_others) == number


@pytest.mark.parametrize(
    ("settings", "num_others", "key"),
    [
        ({"workers": 1}, 0, "agent.workers"),
        ({"remote_workers": True}, 0, "agent.remote_workers"),
        ({}, 1, "cluster.workers"),
    ],
)
def test_function_of_this_process_cannot_run_in_workers(
    settings: dict[str, Any], num_others: int, key: str
) -> None:
    config = AgentConfig(**settings)
    with raises_coded(ConfigError, "conflict", key):
        choose_agent(config, toy_agent.run, TASKS, num_others=num_others)


def test_tasks_that_are_no_json_stay_in_this_process_or_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with raises_coded(ConfigError, "not_json", "a"):
        choose_agent(AgentConfig(REFERENCE, workers=1), None, UNSENDABLE)
    monkeypatch.setattr(agent_choice, "_default_number", lambda: 2)
    assert choose_agent(AgentConfig(REFERENCE), None, TASKS) == 2
    assert callable(choose_agent(AgentConfig(REFERENCE), None, UNSENDABLE))


@pytest.mark.parametrize(("cores", "number"), [(1, 1), (4, 1), (8, 2), (64, 4)])
def test_default_is_a_worker_for_four_cores_beside_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, cores: int, number: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(agent_choice.jax, "default_backend", lambda: "gpu")
    assert choose_agent(AgentConfig(REFERENCE), None, TASKS) == number
    monkeypatch.setattr(agent_choice.jax, "default_backend", lambda: "cpu")
    assert callable(choose_agent(AgentConfig(REFERENCE), None, TASKS))


def test_run_without_an_agent_needs_programs_outside() -> None:
    assert choose_agent(AgentConfig(), None, [], is_needed=False) is None
    assert callable(choose_agent(AgentConfig(REFERENCE), None, [], is_needed=False))
    with raises_coded(ConfigError, "missing", "agent.function"):
        choose_agent(AgentConfig(), None, [])


def test_field_that_no_task_has_is_refused() -> None:
    config = AgentConfig(command="sh", task_fields=("question", "questoin"))
    with raises_coded(ConfigError, "unknown", "agent.task_fields"):
        choose_agent(config, None, [{"id": "a", "question": "b"}])
