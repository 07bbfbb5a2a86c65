"""Helpers for the tests of views: a small run directory and its spans."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning_jax.models.config import ModelConfig
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.settings import save_config
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.types import Rollout, Span, Task

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
TOKENIZER = tiny_tokenizer()


def span(
    span_id: str,
    attributes: dict[str, Any],
    *,
    parent: str | None = None,
    at: float = 0.0,
    seconds: float = 1.0,
    name: str = "work",
    error: str | None = None,
) -> Span:
    """Return a span that starts `at` seconds after the rollout."""
    start = START + round(at * SECOND)
    end = start + round(seconds * SECOND)
    return Span("trace", span_id, parent, name, start, end, attributes, error)


def call(
    span_id: str,
    prompt: str | list[int],
    response: str,
    *,
    parent: str | None = "root",
    at: float = 0.0,
    seconds: float = 1.0,
    rollout: str = "r",
    version: int = 3,
    more: dict[str, Any] | None = None,
) -> Span:
    """Return an LLM call like the gateway's, with log-probs -0.1, -0.2, ..."""
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    written = TOKENIZER.encode(response + "<|im_end|>")
    logprobs = tuple(-0.1 * (i + 1) for i in range(len(written)))
    values = {
        attributes.OPERATION_NAME: attributes.CHAT,
        attributes.POLICY: "policy",
        attributes.ROLLOUT_ID: rollout,
        attributes.PROMPT_TOKEN_IDS: tuple(ids),
        attributes.RESPONSE_TOKEN_IDS: tuple(written),
        attributes.BEHAVIOR_LOGPROBS: logprobs,
        attributes.SAMPLING_LOGPROBS: logprobs,
        attributes.POLICY_VERSIONS: (version,) * len(written),
        attributes.RESPONSE_FINISH_REASONS: ("stop",),
    }
    return span(
        span_id,
        values | (more or {}),
        parent=parent,
        at=at,
        seconds=seconds,
        name="chat policy",
    )


def tool(span_id: str, given: Any, got: Any, *, at: float = 1.0, **more: Any) -> Span:
    """Return a tool span in OpenTelemetry's GenAI conventions."""
    values = {
        attributes.OPERATION_NAME: attributes.EXECUTE_TOOL,
        "gen_ai.tool.name": "search",
        "gen_ai.tool.call.arguments": given,
        "gen_ai.tool.call.result": got,
    }
    where: dict[str, Any] = {"parent": "root", "name": "run"} | more
    return span(span_id, values, at=at, **where)


def conversation(rollout: str = "r", *, answer: str = "Paris") -> list[Span]:
    """Return the spans of an agent that asks, runs a tool and asks again, in 4 seconds."""
    first = call("a", "Capital of France?", "search", rollout=rollout)
    path = [
        *first.attributes[attributes.PROMPT_TOKEN_IDS],
        *first.attributes[attributes.RESPONSE_TOKEN_IDS],
    ]
    return [
        span(
            "root",
            {attributes.OPERATION_NAME: attributes.INVOKE_AGENT},
            seconds=4.0,
            name="rollout",
        ),
        first,
        tool("t", '{"query": "France"}', "a country", seconds=1.0),
        call("b", [*path, *TOKENIZER.encode(" It says: ")], answer, at=2.0, rollout=rollout),
    ]


def rollout(
    index: int = 0,
    reward: float | None = None,
    *,
    phase: str = "train",
    step: int = 3,
    task_index: int = 0,
    attempt: int = 1,
    **more: Any,
) -> Rollout:
    group = f"{phase}-{step:05d}-{task_index:03d}"
    given = {"status": "queued" if reward is None else "scored", "reward": reward} | more
    rollout_id = f"{group}-{index:02d}-{attempt}"
    return Rollout(rollout_id, f"task_{task_index}", group, phase, step, index, attempt, **given)


def add(store: Store, done: Rollout, spans: list[Span], task: Task | None = None) -> None:
    """Store a finished or running rollout. Its spans get their own trace id."""
    store.add_rollout(
        Rollout(
            *(done.rollout_id, done.task_id, done.group_id, done.phase, done.step, done.index),
            *(done.attempt, "queued"),
        ),
        task,
    )
    for span in spans:
        named = dict(span.attributes)
        if attributes.ROLLOUT_ID in named:
            named[attributes.ROLLOUT_ID] = done.rollout_id
        store.add_span(
            done.rollout_id,
            Span(
                *(f"trace of {done.rollout_id}", f"{span.span_id} of {done.rollout_id}"),
                span.parent_span_id and f"{span.parent_span_id} of {done.rollout_id}",
                *(span.name, span.start_ns, span.end_ns, named, span.error),
            ),
        )
    if done.status != "queued":
        store.set_status(done.rollout_id, "running")
    if done.status not in ("queued", "running"):
        store.set_status(
            done.rollout_id, done.status, done.reward, done.reason, done.detail, done.metrics
        )


def make_run(directory: Path, **algorithm: Any) -> Path:
    """Write a run with three rollouts of one task in step 3, a failed one, and an evaluation.

    The failed rollout is of another task, and the evaluation comes first. The model's directory
    holds a tokenizer and no weights.
    """
    model, run = directory / "model", directory / "run"
    for directory in (model, run):
        directory.mkdir(parents=True)
    TOKENIZER.save(model)
    config = Config(
        run_dir=str(run),
        model=ModelConfig(name=str(model)),
        algorithm=AlgorithmConfig(**algorithm),
    )
    save_config(config, run / "config.yaml")
    store = Store(run / "store.sqlite")
    add(store, rollout(0, 0.5, phase="eval"), conversation())
    for index, reward in enumerate((1.0, 0.0, 0.0)):
        add(store, rollout(index, reward), conversation())
    failed: dict[str, Any] = {
        "status": "agent_failure",
        "reason": "deadline",
        "detail": "it took too long",
    }
    task = {"id": "task_1", "question": "Which river?", "answer": ["Loire"]}
    add(store, rollout(0, task_index=1, **failed), conversation(), task)
    store.close()
    return run


def add_rollouts(run: Path, num_steps: int) -> None:
    """Add steps of 10 groups with 10 attempts each to a run, from step 10 on, without spans."""
    rows = [
        (
            *(f"train-{step:05d}-{task:03d}-{index:02d}-1", f"t{task}"),
            *(f"train-{step:05d}-{task:03d}", "train", step, index, 1, "scored"),
            *((step + task + index) % 7 / 7, "{}", "{}", '{"question": "Which of them?"}', 0),
        )
        for step in range(10, 10 + num_steps)
        for task in range(10)
        for index in range(10)
    ]
    columns = "rollout_id, task_id, group_id, phase, step, place, attempt, status, reward, metrics"
    with closing(sqlite3.connect(run / "store.sqlite")) as db, db:
        db.executemany(
            f"INSERT INTO rollouts ({columns}, components, task, superseded) "
            f"VALUES ({', '.join('?' * 13)})",
            rows,
        )
