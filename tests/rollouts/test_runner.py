"""Tests of the runner: one status per rollout, and only infrastructure failures are retried."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import toy_agent
from coded import raises_coded
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from served_runs import SERVE, TASKS, TOY, model_and_engine, open_runner
from slow_engine import SlowEngine

from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.app import Gateway
from lightning_jax.rollouts.agents.event_loop import isolate_agent
from lightning_jax.rollouts.agents.functions import load_agent
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.results.metrics import rollout_metrics
from lightning_jax.rollouts.runner import Runner, TooManyFailures, make_requests, run_requests
from lightning_jax.traces.store import CRASH, STOP, Store
from lightning_jax.train.watch.findings import findings
from lightning_jax.types import LLM, Rollout, Task


async def _one(runner: Runner) -> Rollout:
    (rollout,) = await run_requests(make_requests(TASKS[:1], "train", 0, 1), runner)
    return rollout


async def test_rollouts_are_scored_and_each_call_is_a_span(tmp_path: Path) -> None:
    async with open_runner(tmp_path, "two_turns", concurrency=2) as runner:
        done = []
        requests = make_requests(TASKS, "train", 7, 2)
        rollouts = await run_requests(requests, runner, on_done=done.append)
        assert [(r.task_id, r.index) for r in rollouts] == [
            (f"t{i}", n) for i in range(3) for n in range(2)
        ]
        assert {r.status for r in rollouts} == {"scored"} and len(done) == 6
        assert len({r.group_id for r in rollouts}) == 3
        for rollout in rollouts:
            root, *calls = runner.store.spans(rollout.rollout_id)
            assert (root.name, root.parent_span_id, len(calls)) == ("rollout", None, 2)
            assert {call.parent_span_id for call in calls} == {root.span_id}
            assert runner.store.rollout(rollout.rollout_id) == rollout
            question = f"{rollout.task_id[1:]}?"
            assert runner.store.task_fields(rollout.rollout_id) == {"question": question}


@pytest.mark.parametrize("agent", ["plain", "hands_on"])
async def test_a_plain_function_is_an_agent(tmp_path: Path, agent: str) -> None:
    async with open_runner(tmp_path, agent) as runner:
        rollouts = await run_requests(make_requests(TASKS, "train", 0, 1), runner)
        assert {r.status for r in rollouts} == {"scored"}
        for rollout in rollouts:
            root, call = runner.store.spans(rollout.rollout_id)
            assert call.parent_span_id == root.span_id


async def test_what_else_an_agent_measured_is_kept(tmp_path: Path) -> None:
    async with open_runner(tmp_path, "measured") as runner:
        rollout = await _one(runner)
        assert (rollout.status, rollout.reward) == ("scored", 0.5)
        assert rollout.metrics == {"f1": 0.25, "searches": 2.0}
        assert runner.store.rollout(rollout.rollout_id) == rollout


async def test_metrics_without_a_value_cost_no_reward(tmp_path: Path) -> None:
    async with open_runner(tmp_path, "without_values") as runner:
        rollout = await _one(runner)
        assert (rollout.status, rollout.reward) == ("scored", 0.5)
        reasons = {"not_finite/f1", "null/em", "wrong_type/note"}
        counts = {f"dropped_metrics/{reason}": 1.0 for reason in reasons}
        assert rollout.metrics == {"searches": 2.0, **counts}
        assert runner.store.rollout(rollout.rollout_id) == rollout


async def test_a_posted_reward_counts_where_none_is_returned(tmp_path: Path) -> None:
    for agent, reward in (("posts_reward", 0.75), ("posts_and_returns", 0.25)):
        (tmp_path / agent).mkdir()
        async with open_runner(tmp_path / agent, agent) as runner:
            rollout = await _one(runner)
            assert (rollout.status, rollout.reward) == ("scored", reward)
            assert rollout.metrics == {"f1": 0.5}


async def test_an_agents_own_spans_are_in_its_rollouts_trace(tmp_path: Path) -> None:
    async with open_runner(tmp_path, "traced", concurrency=3) as runner:
        rollouts = await run_requests(make_requests(TASKS, "train", 0, 1), runner)
        for rollout in rollouts:
            root, call, tool = runner.store.spans(rollout.rollout_id)
            assert tool.name == f"look up {rollout.task_id}"
            assert tool.parent_span_id == root.span_id == call.parent_span_id
            assert call.start_ns < tool.start_ns


async def test_a_service_that_is_down_is_infrastructure(tmp_path: Path) -> None:
    settings = {"max_attempts": 2, "max_infrastructure_failures": 1.0}
    async with open_runner(tmp_path, "cut_off", **settings) as runner:
        rollout = await _one(runner)
        assert (rollout.status, rollout.reward) == ("infrastructure_failure", None)
        assert (rollout.reason, rollout.attempt) == ("ConnectionRefusedError", 2)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("quiet", "no_reward"),
        ("odd", "bad_reward"),
        ("not_finite", "bad_reward"),
        ("without_reward", "no_reward"),
        ("broken", "KeyError"),
        ("slow", "deadline"),
        ("swallows_its_end", "deadline"),
        ("waits_too_long", "TimeoutError"),
        ("leaves", "SystemExit"),
        ("cancels_itself", "CancelledError"),
        ("runs_out", "RuntimeError"),
    ],
)
async def test_an_agents_fault_is_its_own_and_not_tried_again(
    tmp_path: Path, agent: str, reason: str
) -> None:
    async with open_runner(tmp_path, agent, timeout_s=0.3, agent_failure_reward=-0.5) as runner:
        rollout = await _one(runner)
        assert (rollout.status, rollout.reason) == ("agent_failure", reason)
        assert (rollout.attempt, rollout.reward) == (1, -0.5)
        assert rollout.detail


class _Mute(Exception):
    def __str__(self) -> str:
        return self.args[0]


class _Failed(BaseException):
    """Error that is not an Exception, like pytest's own."""


@pytest.mark.parametrize(
    ("error", "status", "reason", "detail"),
    [
        (ValueError("no tool \ud83d"), "agent_failure", "ValueError", "no tool \\ud83d"),
        (_Mute(), "agent_failure", "_Mute", ""),
        (_Failed("2 tests"), "agent_failure", "_Failed", "2 tests"),
        (
            ExceptionGroup("a", [ExceptionGroup("b", [KeyError("x")])]),
            "agent_failure",
            "KeyError",
            "'x'",
        ),
        (
            BaseExceptionGroup("a", [ConnectionError("down"), _Failed("y")]),
            "agent_failure",
            "_Failed",
            "y",
        ),
        (
            ExceptionGroup("a", [ConnectionRefusedError("down")]),
            "infrastructure_failure",
            "ConnectionRefusedError",
            "down",
        ),
        (OSError(24, "Too many open files"), "infrastructure_failure", "OSError", "[Errno 24]"),
    ],
)
async def test_whatever_an_agent_raises_is_of_its_rollout_only(
    tmp_path: Path, error: BaseException, status: str, reason: str, detail: str
) -> None:
    async def agent(task: Task, llm: object) -> float:
        raise error

    settings = {"max_attempts": 1, "max_infrastructure_failures": 1.0}
    async with open_runner(tmp_path, "run", **settings) as runner:
        rollout = await _one(replace(runner, agent=agent))
        assert (rollout.status, rollout.reason) == (status, reason)
        assert rollout.detail and rollout.detail.startswith(detail)
        (stored,) = runner.store.rollouts(group_id=rollout.group_id)
        assert stored.detail == rollout.detail


async def test_each_rollout_finds_its_task_as_it_was(tmp_path: Path) -> None:
    found = []

    async def agent(task: Task, llm: object) -> float:
        found.append(len(task["messages"]))
        task["messages"].append("more")
        return 1.0

    tasks = [{"id": "a", "messages": ["one"], "lock": threading.Lock()}]  # a lock cannot be copied
    async with open_runner(tmp_path, "run") as runner:
        crowded = replace(runner, agent=agent)
        await run_requests(make_requests(tasks, "train", 0, 3), crowded)
    assert found == [1, 1, 1] and tasks[0]["messages"] == ["one"]


@pytest.mark.parametrize(
    "error",
    [
        ExceptionGroup("", [ValueError(), KeyError()]),
        BaseExceptionGroup("", [asyncio.CancelledError(), GeneratorExit()]),
        GeneratorExit(),
        KeyboardInterrupt(),
        type("Odd", (BaseException,), {"__str__": lambda self: 1 / 0})(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_isolated", [True, False])
async def test_no_error_of_an_agent_ends_the_run(
    tmp_path: Path, error: BaseException, is_isolated: bool
) -> None:
    async def agent(task: Task, llm: object) -> float:
        if task["id"] == "t0":
            raise error
        return 1.0

    async with open_runner(tmp_path, "run") as runner, isolate_agent(agent) as moved:
        odd = replace(runner, agent=moved if is_isolated else agent)
        rollouts = await run_requests(make_requests(TASKS, "train", 0, 1), odd)
        assert [r.status for r in rollouts] == ["agent_failure", "scored", "scored"]


async def test_time_in_which_the_loop_stands_still_is_on_no_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_jax.rollouts.deadlines.TICK_S", 0.05)

    async def agent(task: Task, llm: object) -> float:
        if task["id"] == "t0":
            time.sleep(4.0)
        for _ in range(4):
            await asyncio.sleep(0.05)
        return 1.0

    async with open_runner(tmp_path, "run", timeout_s=2.0) as runner:
        blocking = replace(runner, agent=agent)
        rollouts = await run_requests(make_requests(TASKS, "train", 0, 1), blocking)
        assert {r.status for r in rollouts} == {"scored"}


async def test_attempts_back_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    settings = {"max_attempts": 6, "max_infrastructure_failures": 1.0, "max_retry_delay_s": 12.0}
    async with open_runner(tmp_path, "cut_off", retry_delay_s=2.0, **settings) as runner:
        requests = make_requests(TASKS, "train", 0, 1)
        monkeypatch.setattr("lightning_jax.rollouts.runner.asyncio.sleep", sleep)
        await run_requests(requests[:1], runner)
        first = list(waits)
        await run_requests(requests[1:2], runner)
    for wait, least in zip(first, (2.0, 4.0, 8.0, 12.0, 12.0), strict=True):
        assert least <= wait <= 1.5 * least
    assert first != waits[5:]  # with jitter, rollouts retry at different times


async def test_an_agent_that_gives_up_a_call_of_ours_has_failed_itself(tmp_path: Path) -> None:
    """Its client timed out while the gateway worked on the answer."""

    async def agent(task: Task, llm: LLM) -> float:
        async with openai.AsyncOpenAI(
            base_url=llm.base_url, api_key=llm.api_key, max_retries=0, timeout=0.02
        ) as client:
            await client.completions.create(
                model="policy", prompt="a", max_tokens=120, logit_bias={"258": -100}
            )
        return 1.0

    async with open_runner(tmp_path, "run") as runner:
        rollout = await _one(replace(runner, agent=agent))
        assert (rollout.status, rollout.reason) == ("agent_failure", "APITimeoutError")
        assert rollout.attempt == 1


async def test_a_gateway_that_cannot_be_reached_is_infrastructure(tmp_path: Path) -> None:
    async def agent(task: Task, llm: LLM) -> float:
        request: Any = httpx.Request("POST", llm.base_url)
        raise openai.APIConnectionError(request=request)

    settings = {"max_attempts": 1, "max_infrastructure_failures": 1.0}
    async with open_runner(tmp_path, "run", **settings) as runner:
        rollout = await _one(replace(runner, agent=agent))
        assert (rollout.status, rollout.reason) == ("infrastructure_failure", "APIConnectionError")


async def test_a_flood_of_one_agent_fails_nobody_else(tmp_path: Path) -> None:
    """Its timeouts and refusals fail only itself, so the run continues."""

    async def agent(task: Task, llm: LLM) -> float:
        flood, url = task["id"] == "t0", f"{llm.base_url}/completions"
        body = {"model": "policy", "prompt": "a", "max_tokens": 100 if flood else 4}
        body |= {"n": 32, "logit_bias": {"258": -100}} if flood else {}
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def call() -> int:
                async with http.post(url, json=body) as response:
                    return response.status

            statuses = await asyncio.gather(*(call() for _ in range(200 if flood else 1)))
        if set(statuses) != {200}:
            raise RuntimeError(f"statuses {set(statuses)}")
        return 1.0

    async with open_runner(tmp_path, "run", call_timeout_s=5.0) as runner:
        flooded = replace(runner, agent=agent)
        rollouts = await run_requests(make_requests(TASKS, "train", 0, 1), flooded)
        assert [r.status for r in rollouts] == ["agent_failure", "scored", "scored"]
        assert [r.attempt for r in rollouts] == [1, 1, 1]


@asynccontextmanager
async def _standing_still(path: Path, **settings: object) -> AsyncIterator[Runner]:
    """Yield a runner whose engine answers no call."""
    engine, agent = SlowEngine(), load_agent(f"{TOY}:impatient")
    engine.stands_still.set()
    settings = {"call_timeout_s": 0.05, "retry_delay_s": 0.0} | settings
    with contextlib.closing(Store(path / "store.sqlite")) as store:
        async with Gateway(engine, store) as gateway:
            config = RolloutConfig(**settings)  # type: ignore[arg-type]
            yield Runner(agent, gateway, config, seed=0)


async def test_infrastructure_is_tried_again_and_never_rewarded(tmp_path: Path) -> None:
    settings = {"max_attempts": 2, "max_infrastructure_failures": 1.0}
    async with _standing_still(tmp_path, **settings) as runner:
        rollout = await _one(runner)
        assert rollout.status == "infrastructure_failure"
        assert (rollout.attempt, rollout.reward, rollout.reason) == (2, None, "call_timeout")
        tries = runner.store.rollouts(group_id=rollout.group_id)
        assert [r.status for r in tries] == ["infrastructure_failure"] * 2


async def test_too_many_infrastructure_failures_stop_the_run(tmp_path: Path) -> None:
    async with _standing_still(tmp_path, max_attempts=1) as runner:
        with raises_coded(TooManyFailures, "too_many_failures") as caught:
            await _one(runner)
        assert "call_timeout" in str(caught.value)


async def test_a_finished_rollout_is_taken_from_the_store(tmp_path: Path) -> None:
    async with open_runner(tmp_path, "run") as runner:
        first = await _one(runner)
        assert await _one(runner) == first
        other = [{"id": "another", "question": "0?"}]  # same position, other task
        (fresh,) = await run_requests(make_requests(other, "train", 0, 1), runner)
        assert (fresh.task_id, fresh.attempt) == ("another", 2)
        assert await run_requests(make_requests(other, "train", 0, 1), runner) == [fresh]
        early, late = (make_requests(TASKS[:1], "train", step, 1) for step in (1, 2))
        (kept,), _ = await run_requests(early, runner), await run_requests(late, runner)
        runner.store.supersede(2)  # settings changed
        assert await run_requests(early, runner) == [kept]
        (again,) = await run_requests(late, runner)
        assert again.attempt == 2
        assert await run_requests(late, runner) == [again]


async def test_at_most_concurrency_run_at_once(tmp_path: Path) -> None:
    running = most = 0

    async def agent(task: dict, llm: object) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 1.0

    async with open_runner(tmp_path, "run", concurrency=3) as runner:
        crowded = Runner(agent, runner.gateway, runner.config, seed=0)
        await run_requests(make_requests(TASKS, "train", 0, 4), crowded)
    assert most == 3


async def test_a_rollout_repeats_with_its_seed(tmp_path: Path) -> None:
    responses = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        async with open_runner(tmp_path / name, "run") as runner:
            rollout = await _one(runner)
            _, span = runner.store.spans(rollout.rollout_id)
            responses.append(span.attributes["lightning.response_token_ids"])
    assert responses[0] == responses[1]


async def test_a_rollout_that_a_crash_broke_off_is_made_again_as_it_was(tmp_path: Path) -> None:
    responses = []
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
        async with open_runner(tmp_path / name, "run") as runner:
            request = make_requests(TASKS[:1], "train", 0, 1)[0]
            if name == "broken":
                lost = request.rollout(1)
                runner.store.add_rollout(lost)
                runner.store.abandon_running(CRASH)
            rollout = await runner.run(request)
            _, span = runner.store.spans(rollout.rollout_id)
            responses.append(span.attributes["lightning.response_token_ids"])
    assert rollout.attempt == 2 and responses[0] == responses[1]


async def test_a_stopped_rollout_is_no_failure_and_repeats(tmp_path: Path) -> None:
    responses, has_called = [], asyncio.Event()

    async def waits(task: Task, llm: LLM) -> float:
        reward = await toy_agent.run(task, llm)
        if not has_called.is_set():
            has_called.set()
            await asyncio.sleep(60)
        return reward

    async with open_runner(tmp_path, "run") as runner:
        runner = replace(runner, agent=waits)
        running = asyncio.create_task(_one(runner))
        await has_called.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        again = await _one(runner)
        stopped, scored = runner.store.rollouts()
        assert (stopped.status, stopped.reason) == ("stopped", STOP)
        assert scored == again and (again.status, again.attempt) == ("scored", 2)
        for rollout in (stopped, scored):
            spans = runner.store.spans(rollout.rollout_id)
            name = "lightning.response_token_ids"
            responses += [span.attributes[name] for span in spans if name in span.attributes]
        assert len(responses) == 2 and responses[0] == responses[1]


async def test_a_conversation_that_stays_too_long_ends(tmp_path: Path) -> None:
    async with open_runner(tmp_path, "too_long", timeout_s=120.0) as runner:
        requests = make_requests(TASKS[:2], "train", 0, 1)
        patient, endless = await asyncio.wait_for(run_requests(requests, runner), 60.0)
        assert patient.status == "scored"
        assert (endless.status, endless.reason) == ("agent_failure", "context_length")
        assert endless.reward == runner.config.agent_failure_reward
        calls = [len(runner.store.spans(r.rollout_id)) - 1 for r in (patient, endless)]
        assert calls == [20, 20]  # later ones reach no rollout
    metrics = rollout_metrics([patient, endless], [], 0)
    assert metrics["rollout/agent_failure_context_length"] == 1


async def test_a_deadline_spent_in_the_queue_is_infrastructure(tmp_path: Path) -> None:
    model, programs = model_and_engine()
    engine = Engine(model, SERVE, programs=[programs])  # not started, so calls wait
    with contextlib.closing(Store(tmp_path / "store.sqlite")) as store:
        gateway = Gateway(engine, store)
        await gateway.start()
        try:
            config = RolloutConfig(timeout_s=1.0, max_attempts=1, max_infrastructure_failures=1.0)
            rollout = await _one(Runner(load_agent(f"{TOY}:run"), gateway, config, seed=0))
        finally:
            await gateway.close()
            engine.close()
    assert (rollout.status, rollout.reason) == ("infrastructure_failure", "deadline_in_queue")
    assert rollout.reward is None
    metrics = rollout_metrics([rollout], [], 0)
    assert [finding.kind for finding in findings(metrics)] == ["deadline_in_queue"]


async def test_a_forged_root_does_not_end_the_run(tmp_path: Path) -> None:
    rejected = []

    async def forges(task: Task, llm: LLM) -> float:
        context = trace.get_current_span().get_span_context()
        export = ExportTraceServiceRequest()
        export.resource_spans.add().scope_spans.add().spans.add(
            trace_id=context.trace_id.to_bytes(16, "big"),
            span_id=context.span_id.to_bytes(8, "big"),
        )
        body = export.SerializeToString()
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{llm.base_url}/traces", data=body) as answer,
        ):
            reply = ExportTraceServiceResponse.FromString(await answer.read())
        rejected.append(reply.partial_success.rejected_spans)
        return 0.5

    async with open_runner(tmp_path, "run") as runner:
        requests = make_requests(TASKS, "train", 0, 1)
        rollouts = await run_requests(requests, replace(runner, agent=forges))
        assert [rollout.reward for rollout in rollouts] == [0.5] * 3 and rejected == [1] * 3
        for rollout in rollouts:
            (root,) = runner.store.spans(rollout.rollout_id)
            assert (root.name, root.attributes["lightning.status"]) == ("rollout", "scored")
