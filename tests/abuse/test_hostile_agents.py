"""Training runs in which most agents are broken or hostile: honest ones learn as if alone."""

import asyncio
import gc
import sys
from pathlib import Path
from typing import Any

import pytest
from toy_runs import MODEL, toy_config

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.formats.load import save_hf
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config, EvalConfig
from lightning_jax.train.loop.trainer import train
from lightning_jax.types import Rollout, Task

AGENTS = Path(__file__).with_name("hostile_agents.py")
HONEST = [{"id": f"honest-{n}", "kind": "honest"} for n in range(2)]
GROUP_SIZE = 2
DEADLINE_S = 15.0


# How each agent ends, and the reason. None: any status, or any reason.
Ends = dict[str, tuple[str | None, str | None]]
FUNCTIONS: Ends = {
    "raises_group_without_words": ("agent_failure", "ValueError"),
    "raises_generator_exit": ("agent_failure", "GeneratorExit"),
    "raises_unspeakable": ("agent_failure", "Unspeakable"),
    "raises_surrogate": ("agent_failure", "ValueError"),
    "leaves": ("agent_failure", "SystemExit"),
    "returns_infinity_nearly": ("agent_failure", "bad_reward"),
    "returns_hundred_thousand_metrics": ("scored", None),
    "returns_long_metric_name": ("scored", None),
    "floods": (None, None),
    "claims_that_infrastructure_failed": ("agent_failure", "RuntimeError"),
    "ignores_its_deadline": ("agent_failure", "deadline"),
    "posts_reward_after_reward": ("agent_failure", None),
}
COROUTINES: Ends = {
    "cancels_itself": ("agent_failure", "CancelledError"),
    "leaves_a_task_that_exits": ("scored", None),
}
PROGRAMS: Ends = {
    "eats_memory": ("agent_failure", None),
    "starts_many_processes": ("agent_failure", None),
    "leaves_a_process_behind": ("scored", None),
    "reads_secrets": ("scored", None),
    "kills_itself": ("agent_failure", "KilledBySignal"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_hf(path, MODEL)
    return path


def _config(model_dir: Path, run_dir: Path, agent: AgentConfig, num_tasks: int) -> Config:
    return toy_config(
        model_dir,
        run_dir,
        num_steps=1,
        serve=ServeConfig(slots=8, max_len=64, prefill_buckets=(32,)),
        agent=agent,
        # Greedy, so that an answer depends on the conversation alone.
        rollout=RolloutConfig(
            tasks_per_step=num_tasks, group_size=GROUP_SIZE, timeout_s=DEADLINE_S, temperature=0.0
        ),
        eval=EvalConfig(every=0, num_tasks=0, at_start=False),
    )


def _train(config: Config, tasks: list[Task]) -> tuple[list[Rollout], dict[str, list[tuple]]]:
    """Train; return the rollouts and, by rollout, the token ids that were sampled."""
    rows = asyncio.run(train(config, tasks, tasks))
    assert rows, "a step leaves a row of metrics"
    store = Store(Path(config.run_dir) / "store.sqlite", read_only=True)
    rollouts = store.rollouts(phase="train")
    sampled = {
        rollout.rollout_id: [
            tuple(span.attributes[attributes.RESPONSE_TOKEN_IDS])
            for span in store.spans(rollout.rollout_id)
            if attributes.RESPONSE_TOKEN_IDS in span.attributes
        ]
        for rollout in rollouts
    }
    store.close()
    return rollouts, sampled


def _check(config: Config, expected: Ends, alone: dict[str, list[tuple]]) -> None:
    hostile = [{"id": kind, "kind": kind} for kind in expected]
    rollouts, sampled = _train(config, [*HONEST, *hostile])
    gc.collect()
    ended = {(r.task_id, r.index): (r.status, r.reason) for r in rollouts}
    (answers,) = {tuple(found) for found in alone.values()}
    for rollout in rollouts:
        if rollout.task_id.startswith("honest"):
            assert (rollout.status, rollout.reward) == ("scored", 0.5), rollout
            assert tuple(sampled[rollout.rollout_id]) == answers
    assert len([r for r in rollouts if r.status == "scored" and r.reward == 0.5]) >= 4
    for kind, (status, reason) in expected.items():
        for index in range(GROUP_SIZE):
            found = ended[kind, index]
            assert status in (None, found[0]) and reason in (None, found[1]), (kind, found)


@pytest.fixture(scope="module")
def alone(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple]]:
    """Tokens that honest agents sample when nobody else runs."""
    agent = AgentConfig(f"{AGENTS}:run")
    _, sampled = _train(_config(model_dir, tmp_path_factory.mktemp("run"), agent, 2), HONEST)
    assert len(sampled) == len(HONEST) * GROUP_SIZE
    return sampled


@pytest.mark.parametrize(
    ("expected", "function", "limits"),
    [
        (FUNCTIONS, "run", {}),
        (COROUTINES, "run_async", {}),
        pytest.param(
            *(PROGRAMS, "run"),
            {"python": sys.executable, "memory_mib": 500.0, "max_processes": 100},
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's"),
        ),
    ],
    ids=["functions", "coroutines", "programs"],
)
def test_hostile_agents_fail_alone(
    expected: Ends,
    function: str,
    limits: dict[str, Any],
    model_dir: Path,
    tmp_path: Path,
    alone: dict[str, list[tuple]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "hidden")
    agent = AgentConfig(f"{AGENTS}:{function}", **limits)
    _check(_config(model_dir, tmp_path, agent, len(HONEST) + len(expected)), expected, alone)
