"""Requests of coding agents, as recorded, through the gateway: streams, token ids and roles."""

import json
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_bodies import RECORDINGS, Body, Recording, ReturnedCall
from planned_engine import PlannedEngine
from templates import QWEN25

from lightning_jax.cli.catalog import STARTER
from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.settings import load_config
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.traces.tree import is_gateway_call
from lightning_jax.train.config import Config
from lightning_jax.types import Span

TOKENIZER = tiny_tokenizer().with_chat(template=QWEN25)
TEXT = "I read it."


class Agent:
    """Coding agent whose requests were recorded, in a rollout of its template."""

    def __init__(self, recording: Recording, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.recording, self.gateway, self._http = recording, gateway, http
        self._llm = gateway.open_rollout(RolloutSettings("r1", 7))

    async def ask(self, body: Body, path: str = "") -> list[Body]:
        """Return the events of an answer."""
        key = self._llm.api_key
        headers = {**self.recording.headers, "x-api-key": key, "x-goog-api-key": key}
        headers["Authorization"] = f"Bearer {key}"
        url = self._llm.base_url.removesuffix("/v1") + (path or self.recording.path)
        async with self._http.post(url, json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
        lines = [line.removeprefix("data:").strip() for line in text.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def spans(self) -> list[Span]:
        assert self.gateway.store is not None
        return [span for span in self.gateway.store.spans("r1") if is_gateway_call(span)]


@pytest.fixture(params=RECORDINGS)
async def agent(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Agent]:
    recording = RECORDINGS[request.param]
    called = json.dumps({"name": recording.name, "arguments": recording.arguments})

    def plan(prompt: str) -> str:
        if "<tool_response>" in prompt or "<tools>" not in prompt:
            return "Done."
        return f"{TEXT}\n<tool_call>\n{called}\n</tool_call>"

    roles = load_config(Config, [str(STARTER / request.param / "config.yaml")]).roles
    engine = PlannedEngine(plan, TOKENIZER)
    with closing(Store(tmp_path / "store.sqlite")) as store:
        async with (
            Gateway(engine, store, routing=Routing(roles)) as gateway,
            aiohttp.ClientSession() as http,
        ):
            yield Agent(recording, gateway, http)


def _anthropic(events: list[Body]) -> tuple[str, str, str, str]:
    """Return (text, name, arguments, id) of a stream of Anthropic's Messages."""
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    (call,) = (block for block in starts if block["type"] == "tool_use")
    text = "".join(delta.get("text", "") for delta in deltas)
    arguments = "".join(delta.get("partial_json", "") for delta in deltas)
    return text, call["name"], arguments, call["id"]


def _gemini(events: list[Body]) -> tuple[str, str, str, str]:
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    (call,) = (part["functionCall"] for part in parts if "functionCall" in part)
    text = "".join(part.get("text", "") for part in parts)
    return text, call["name"], json.dumps(call["args"]), call["id"]


def _chat(events: list[Body]) -> tuple[str, str, str, str]:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
    text = "".join(delta.get("content") or "" for delta in deltas)
    arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
    return text, pieces[0]["function"]["name"], arguments, pieces[0]["id"]


def read_call(events: list[Body]) -> ReturnedCall:
    """Return the text and the call in a stream of any of the client APIs."""
    item_ids: tuple[str, ...] = ()
    if any(event.get("type") == "response.completed" for event in events):
        items = events[-1]["response"]["output"]
        message, call = items
        fields: Any = (message["content"][0]["text"], call["name"], call["arguments"])
        fields, item_ids = (*fields, call["call_id"]), (message["id"], call["id"])
    elif "candidates" in events[0]:
        fields = _gemini(events)
    else:
        fields = _chat(events) if "choices" in events[0] else _anthropic(events)
    text, name, arguments, call_id = fields
    return ReturnedCall(text, name, json.loads(arguments), call_id, item_ids)


async def test_conversation_goes_on_with_the_sampled_tokens(agent: Agent) -> None:
    recording = agent.recording
    call = read_call(await agent.ask(recording.first))
    assert call.text.strip() == TEXT
    assert (call.name, call.arguments) == (recording.name, recording.arguments)
    assert await agent.ask(recording.follow(recording.first, call))
    first, second = (span.attributes for span in agent.spans())
    sampled = (*first[attributes.PROMPT_TOKEN_IDS], *first[attributes.RESPONSE_TOKEN_IDS])
    assert tuple(second[attributes.PROMPT_TOKEN_IDS])[: len(sampled)] == sampled
    assert TOKENIZER.decode(second[attributes.RESPONSE_TOKEN_IDS]).startswith("Done.")
    assert {first[attributes.ROLE], second[attributes.ROLE]} == {"agent"}
    assert first[attributes.TRAINS] and second[attributes.TRAINS]


async def test_added_arguments_keep_the_sampled_tokens(agent: Agent) -> None:
    """Claude Code fills in the defaults of arguments, and OpenCode renames unknown tools."""
    recording = agent.recording
    call = read_call(await agent.ask(recording.first))
    added = replace(call, arguments={"replace_all": False, **call.arguments})
    await agent.ask(recording.follow(recording.first, added))
    renamed = replace(call, name="invalid", arguments={"tool": call.name})
    await agent.ask(recording.follow(recording.first, renamed))
    first, *others = (span.attributes for span in agent.spans())
    sampled = (*first[attributes.PROMPT_TOKEN_IDS], *first[attributes.RESPONSE_TOKEN_IDS])
    prompts = [tuple(other[attributes.PROMPT_TOKEN_IDS]) for other in others]
    assert [prompt[: len(sampled)] == sampled for prompt in prompts] == [True, False]
    assert [other[attributes.PREFIX_BREAKS] for other in others] == [0, 1]


async def test_side_calls_have_roles_that_do_not_train(agent: Agent) -> None:
    recording = agent.recording
    for body in recording.side_calls.values():
        await agent.ask(body, recording.side_path)
    roles = [span.attributes[attributes.ROLE] for span in agent.spans()]
    assert roles == list(recording.side_calls)
    assert not any(span.attributes[attributes.TRAINS] for span in agent.spans())
