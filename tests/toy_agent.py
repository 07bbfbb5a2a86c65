"""Agents for the tests: ordinary programs that use the plain openai client."""

import asyncio
import contextlib
import functools
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

GOOD_IDS = range(48)  # of the tiny model's 259 tokens; a random policy earns about 0.19


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes 30 ms, so one for all clients


@asynccontextmanager
async def _client(llm, **settings) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.DefaultAsyncHttpxClient(verify=_tls()) as http:
        yield openai.AsyncOpenAI(
            base_url=llm.base_url, api_key=llm.api_key, http_client=http, **settings
        )


async def run(task: dict, llm) -> float:
    """Return the share of good tokens among the sampled ones."""
    async with _client(llm) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["question"]}],
            max_tokens=4,
            extra_body={"return_token_ids": True},
        )
    ids = (reply.choices[0].model_extra or {})["token_ids"]
    return sum(token in GOOD_IDS for token in ids) / len(ids)


async def unrewarded(task: dict, llm) -> float:
    """Make a call, and earn nothing."""
    await run(task, llm)
    return 0.0


async def too_long(task: dict, llm) -> float:
    """Ask with prompts that are too long: 19 times and then well, or for ever."""
    num_refused = 0
    async with _client(llm, max_retries=0) as client:
        while num_refused < 19 or task["question"] != "0?":
            with contextlib.suppress(openai.APIError):
                await client.chat.completions.create(
                    model=llm.model, messages=[{"role": "user", "content": "x" * 500}]
                )
            num_refused += 1
    return await run(task, llm)


async def two_turns(task: dict, llm) -> float:
    """Make two calls, the second of which continues the first."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with _client(llm) as client:
        for words in ("and", "then"):
            reply = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=3
            )
            text = reply.choices[0].message.content
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": words},
            ]
    return 1.0


async def three_policies(task: dict, llm) -> float:
    """Return the share of good tokens of three sub-agents.

    Two of them give their names; one asks for its policy.
    """
    good = total = 0
    async with _client(llm) as client:
        for model, agent in (("policy", "speaker"), ("policy", "listener"), ("judge", "")):
            reply = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": task["question"]}],
                max_tokens=3,
                extra_headers={"x-agent-name": agent} if agent else {},
                extra_body={"return_token_ids": True},
            )
            ids = (reply.choices[0].model_extra or {})["token_ids"]
            good, total = good + sum(token in GOOD_IDS for token in ids), total + len(ids)
    return good / total


async def quiet(task: dict, llm) -> None:
    """Return no reward."""


async def odd(task: dict, llm) -> str:
    """Return a text instead of a number."""
    return "good"


async def measured(task: dict, llm) -> dict[str, float]:
    """Return a reward and other numbers."""
    return {"reward": 0.5, "f1": 0.25, "searches": 2}


async def not_finite(task: dict, llm) -> dict[str, float]:
    return {"reward": float("nan"), "f1": 0.5}


async def without_values(task: dict, llm) -> dict:
    """Return a reward beside numbers that have no value and other things."""
    return {"reward": 0.5, "f1": float("nan"), "em": None, "note": "well done", "searches": 2}


async def without_reward(task: dict, llm) -> dict[str, float]:
    return {"f1": 0.5}


async def posts_reward(task: dict, llm) -> dict[str, float]:
    """Post the reward instead of returning it."""
    url = f"{llm.base_url.removesuffix('/v1')}/reward"
    async with aiohttp.ClientSession() as http, http.post(url, json={"reward": 0.75}) as answer:
        assert answer.status == 200, await answer.text()
    return {"f1": 0.5}


async def posts_and_returns(task: dict, llm) -> dict[str, float]:
    return await posts_reward(task, llm) | {"reward": 0.25}


async def traced(task: dict, llm) -> float:
    """Make a span with OpenTelemetry's SDK and send it over OTLP."""
    reward = await run(task, llm)
    memory = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with provider.get_tracer("agent").start_as_current_span(f"look up {task['id']}"):
        await asyncio.sleep(0.01)
    (made,) = memory.get_finished_spans()
    assert made.context is not None
    request = ExportTraceServiceRequest()
    request.resource_spans.add().scope_spans.add().spans.add(
        trace_id=made.context.trace_id.to_bytes(16, "big"),
        span_id=made.context.span_id.to_bytes(8, "big"),
        parent_span_id=made.parent.span_id.to_bytes(8, "big") if made.parent else b"",
        name=made.name,
        start_time_unix_nano=made.start_time,
        end_time_unix_nano=made.end_time,
    )
    root, key = llm.base_url.split("/rollout/")[0], {"Authorization": f"Bearer {llm.api_key}"}
    async with (
        aiohttp.ClientSession(headers=key) as http,
        http.post(f"{root}/v1/traces", data=request.SerializeToString()) as answer,
    ):
        assert answer.status == 200, await answer.text()
    return reward


async def cut_off(task: dict, llm) -> float:
    """Fail because a service is down."""
    raise ConnectionRefusedError("the search gave no answer")


async def broken(task: dict, llm) -> float:
    """Fail by the agent's own bug."""
    raise KeyError("no such tool")


async def slow(task: dict, llm) -> float:
    await asyncio.sleep(60)
    return 1.0


async def impatient(task: dict, llm) -> float:
    """Give up when the server does not answer."""
    async with _client(llm, max_retries=0) as client:
        await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "?"}], max_tokens=100
        )
    return 1.0


def plain(task: dict, llm) -> float:
    """Start an event loop in a plain function."""
    return asyncio.run(run(task, llm))


def hands_on(task: dict, llm):
    """Return a coroutine from a plain function, as decorators do."""
    return run(task, llm)


def runs_out(task: dict, llm) -> float:
    return next(iter(()))


def demonstrate(tasks: list[dict]) -> list[list[dict]]:
    """Return a conversation per question, answered with four good tokens."""
    return [
        [
            {"role": "user", "content": task["question"]},
            {"role": "assistant", "content": "!!!!"},
        ]
        for task in tasks
    ]


def demonstrate_some(tasks: list[dict]) -> list[list[dict]]:
    """Return demonstrations of every second task only."""
    return demonstrate(tasks[::2])


async def swallows_its_end(task: dict, llm) -> float:
    """Ignore cancellation and return a reward too late."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    await asyncio.sleep(0.1)
    return 1.0


async def waits_too_long(task: dict, llm) -> float:
    """Exceed the agent's own timeout."""
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)
    return 1.0


async def leaves(task: dict, llm) -> float:
    """Exit like a script."""
    sys.exit(0)


async def cancels_itself(task: dict, llm) -> float:
    """Await a cancelled task."""
    waiting = asyncio.create_task(asyncio.sleep(60))
    waiting.cancel()
    await waiting
    return 1.0
