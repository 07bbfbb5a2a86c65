"""Tests of the typed helpers in OpenAI's client: parse and stream, sync and async."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import openai
import pytest
from gateway_bench import Bench, Connect
from pydantic import BaseModel, ConfigDict

from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.rl.batches.masks import with_masks
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.testing.records import trajectory
from lightning_jax.traces.convert import spans_to_transitions

T = TypeVar("T")
ASK: list[Any] = [{"role": "user", "content": "Decide."}]
CHAT: dict[str, Any] = {"model": "policy", "messages": ASK}
RESPONSES: dict[str, Any] = {"model": "policy", "input": ASK}


class Verdict(BaseModel):
    color: Literal["red", "green"]
    sure: bool


class Go(BaseModel):
    model_config = ConfigDict(extra="forbid")
    to: Literal["a", "b"]


GO: Any = openai.pydantic_function_tool(Go)
FLAT_GO: Any = {"type": "function", **GO["function"]}
# One call only: a random model would fill its context with calls.
NAMED: dict[str, Any] = {
    "tools": [GO],
    "tool_choice": {"type": "function", "function": {"name": "Go"}},
    "parallel_tool_calls": False,
}
FLAT: dict[str, Any] = NAMED | {
    "tools": [FLAT_GO],
    "tool_choice": {"type": "function", "name": "Go"},
}


async def _sync(bench: Bench, work: Callable[[openai.OpenAI], T]) -> T:
    llm = bench.rollout()

    def talk() -> T:
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
            return work(client)

    return await asyncio.to_thread(talk)


def _response_text(bench: Bench) -> str:
    (transition,), _ = spans_to_transitions(bench.store.spans("r1"))
    return bench.model.tokenizer.decode(transition.response_token_ids)


async def test_chat_parse(bench: Bench, connect: Connect) -> None:
    reply = await _sync(bench, lambda c: c.chat.completions.parse(**CHAT, response_format=Verdict))
    parsed = reply.choices[0].message.parsed
    assert parsed == Verdict.model_validate_json(_response_text(bench))
    client = connect(bench.rollout("r2"))
    called = await client.chat.completions.parse(**CHAT, **NAMED)
    (call,) = called.choices[0].message.tool_calls or []
    assert called.choices[0].finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Go)


async def test_a_span_has_its_grammar_unless_a_filter_shaped_its_tokens_too(
    bench: Bench, connect: Connect
) -> None:
    client, fields = connect(bench.rollout()), {**CHAT, "response_format": Verdict}
    others: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.5}, {"logit_bias": {"65": 1}})
    for more in others:
        await client.chat.completions.parse(**fields, **more)
    await client.chat.completions.create(**CHAT, max_tokens=2)
    transitions, _ = spans_to_transitions(bench.store.spans("r1"))
    assert [bool(t.grammar) for t in transitions] == [True, False, False, False]
    sequences, _ = prepare_step([trajectory(*transitions)], AlgorithmConfig(), policy_version=0)
    model = bench.model
    masked, metrics = with_masks(
        sequences, GrammarCompiler(model.tokenizer, model.config.shape.vocab_size)
    )
    assert metrics["train/calls_without_mask"] == 0.0
    assert [bool(item.masks) for item in masked] == [True, False, False, False]


async def test_a_cut_chat_answer_is_no_verdict(bench: Bench, connect: Connect) -> None:
    client = connect(bench.rollout())
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(**CHAT, response_format=Verdict, max_tokens=3)


async def test_chat_stream(bench: Bench) -> None:
    def work(client: openai.OpenAI) -> tuple[list[Any], Any]:
        with client.chat.completions.stream(**CHAT, response_format=Verdict) as stream:
            return list(stream), stream.get_final_completion()

    events, final = await _sync(bench, work)
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    assert deltas == _response_text(bench) == final.choices[0].message.content
    assert final.choices[0].message.parsed == Verdict.model_validate_json(deltas)
    assert events[-1].type == "content.done"


async def test_chat_stream_of_calls(bench: Bench, connect: Connect) -> None:
    client = connect(bench.rollout())
    async with client.chat.completions.stream(**CHAT, **NAMED, n=2) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    kinds = {event.type for event in events}
    assert {f"tool_calls.function.arguments.{kind}" for kind in ("delta", "done")} <= kinds
    for choice in final.choices:
        assert choice.message.tool_calls
        assert all(isinstance(c.function.parsed_arguments, Go) for c in choice.message.tool_calls)


async def test_responses_parse(bench: Bench, connect: Connect) -> None:
    reply = await _sync(bench, lambda c: c.responses.parse(**RESPONSES, text_format=Verdict))
    assert reply.output_parsed == Verdict.model_validate_json(_response_text(bench))
    client = connect(bench.rollout("r2"))
    called = await client.responses.parse(**RESPONSES, **FLAT)
    (call,) = called.output
    assert call.type == "function_call" and call.name == "Go"
    assert Go.model_validate_json(call.arguments)


async def test_responses_stream(bench: Bench, connect: Connect) -> None:
    def work(client: openai.OpenAI) -> tuple[list[Any], Any]:
        with client.responses.stream(**RESPONSES, text_format=Verdict) as stream:
            return list(stream), stream.get_final_response()

    events, final = await _sync(bench, work)
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == _response_text(bench) == final.output_text
    assert final.output_parsed == Verdict.model_validate_json(deltas)
    client = connect(bench.rollout("r2"))
    async with client.responses.stream(**RESPONSES, **FLAT) as stream:
        kinds = [event.type async for event in stream]
        called = await stream.get_final_response()
    assert kinds[-1] == "response.completed" and called.output
    assert kinds.count("response.function_call_arguments.done") == len(called.output)
    assert all(Go.model_validate_json(c.arguments) for c in called.output)  # type: ignore[union-attr]
