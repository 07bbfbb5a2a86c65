"""Agents for the tests: ordinary programs on the plain openai client."""

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

GOOD_IDS = range(48)  # of the tiny model's 259 tokens: a random policy earns about 0.19


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # 30 ms each, so one for all clients


@asynccontextmanager
async def _client(llm, **settings) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.DefaultAsyncHttpxClient(verify=_tls()) as http:
        yield openai.AsyncOpenAI(
            base_url=llm.base_url, api_key=llm.api_key, http_client=http, **settings
        )


async def run(task: dict, llm) -> float:
    """The share of sampled tokens that are good ones."""
    async with _client(llm) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["question"]}],
            max_tokens=4,
            extra_body={"return_token_ids": True},
        )
    ids = (reply.choices[0].model_extra or {})["token_ids"]
    return sum(token in GOOD_IDS for token in ids) / len(ids)


async def two_turns(task: dict, llm) -> float:
    """Two calls, the second of which goes on from the first."""
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
    """Three sub-agents: two say their names, one asks for its policy. Good tokens of all count."""
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
    """No reward."""


async def odd(task: dict, llm) -> str:
    """No number."""
    return "good"


async def measured(task: dict, llm) -> dict[str, float]:
    """A reward, and what else the agent measured."""
    return {"reward": 0.5, "f1": 0.25, "searches": 2}


async def not_finite(task: dict, llm) -> dict[str, float]:
    return {"reward": 0.5, "f1": float("nan")}


async def without_reward(task: dict, llm) -> dict[str, float]:
    return {"f1": 0.5}


async def posts_reward(task: dict, llm) -> dict[str, float]:
    """Its reward goes another way."""
    url = f"{llm.base_url.removesuffix('/v1')}/reward"
    async with aiohttp.ClientSession() as http, http.post(url, json={"reward": 0.75}) as answer:
        assert answer.status == 200, await answer.text()
    return {"f1": 0.5}


async def posts_and_returns(task: dict, llm) -> dict[str, float]:
    return await posts_reward(task, llm) | {"reward": 0.25}


async def traced(task: dict, llm) -> float:
    """Instrumented with the SDK of OpenTelemetry; sends what it made over OTLP."""
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
    place, key = llm.base_url.split("/rollout/")[0], {"Authorization": f"Bearer {llm.api_key}"}
    async with (
        aiohttp.ClientSession(headers=key) as http,
        http.post(f"{place}/v1/traces", data=request.SerializeToString()) as answer,
    ):
        assert answer.status == 200, await answer.text()
    return reward


async def cut_off(task: dict, llm) -> float:
    """Stands on a service that is down."""
    raise ConnectionRefusedError("the search gave no answer")


async def broken(task: dict, llm) -> float:
    """A mistake of the agent's own."""
    raise KeyError("no such tool")


async def slow(task: dict, llm) -> float:
    await asyncio.sleep(60)
    return 1.0


async def impatient(task: dict, llm) -> float:
    """Gives up when the server does not answer."""
    async with _client(llm, max_retries=0) as client:
        await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": "?"}], max_tokens=100
        )
    return 1.0


def plain(task: dict, llm) -> float:
    """No coroutine; it may start an event loop of its own."""
    return asyncio.run(run(task, llm))


def hands_on(task: dict, llm):
    """A plain function in front of a coroutine function, as decorators make them."""
    return run(task, llm)


def runs_out(task: dict, llm) -> float:
    return next(iter(()))


def demonstrate(tasks: list[dict]) -> list[list[dict]]:
    """Each question is answered with four good tokens' text."""
    return [
        [
            {"role": "user", "content": task["question"]},
            {"role": "assistant", "content": "!!!!"},
        ]
        for task in tasks
    ]


def demonstrate_some(tasks: list[dict]) -> list[list[dict]]:
    """Of each second task nobody knows how to do it."""
    return demonstrate(tasks[::2])


async def swallows_its_end(task: dict, llm) -> float:
    """Is cancelled and goes on, to a reward that comes too late."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    await asyncio.sleep(0.1)
    return 1.0


async def waits_too_long(task: dict, llm) -> float:
    """Has a time limit of its own."""
    async with asyncio.timeout(0.01):
        await asyncio.sleep(60)
    return 1.0


async def leaves(task: dict, llm) -> float:
    """Ends as a script would."""
    sys.exit(0)


async def cancels_itself(task: dict, llm) -> float:
    """Awaits what it has cancelled."""
    waiting = asyncio.create_task(asyncio.sleep(60))
    waiting.cancel()
    await waiting
    return 1.0
