"""Agents for the tests: ordinary programs on the plain openai client."""

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

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


def not_a_coroutine(task: dict, llm) -> float:
    return 1.0


def demonstrate(tasks: list[dict]) -> list[list[dict]]:
    """Each question is answered with four good tokens' text."""
    return [
        [
            {"role": "user", "content": task["question"]},
            {"role": "assistant", "content": "!!!!"},
        ]
        for task in tasks
    ]
