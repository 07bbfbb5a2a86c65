"""Tests that OpenAI's own clients get answers and that every call records what training needs."""

import asyncio
import itertools
import json
import re
from typing import Any

import numpy as np
import openai
import pytest
from gateway_bench import Bench, Connect
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.app import RolloutSettings
from lightning_jax.traces import attributes
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.types import LLM

ASK: list[Any] = [{"role": "user", "content": "Say something."}]
PROMPT = "<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n"


async def _ask(client: openai.AsyncOpenAI, messages: list[Any] = ASK, **fields: Any) -> Any:
    fields = {"model": "policy", "max_tokens": 12} | fields
    return await client.chat.completions.create(messages=messages, **fields)


async def test_the_async_client_gets_an_answer_and_its_span(bench: Bench, connect: Connect) -> None:
    llm = bench.rollout()
    assert re.fullmatch(rf"{bench.gateway.url}/rollout/r1~[0-9a-f]{{16}}/v1", llm.base_url)
    assert llm.model == "policy"
    reply = await _ask(connect(llm), extra_body={"return_token_ids": True}, logprobs=True)
    (choice,) = reply.choices
    (transition,), reasons = spans_to_transitions(bench.store.spans("r1"))
    assert reasons == {}
    assert transition.prompt_token_ids == tuple(bench.model.tokenizer.encode(PROMPT))
    assert bench.model.tokenizer.decode(transition.response_token_ids) == choice.message.content
    assert reply.prompt_token_ids == list(transition.prompt_token_ids)
    assert choice.token_ids == list(transition.response_token_ids)
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    assert logprobs == list(transition.behavior_logprobs)
    assert all(-20 < logprob < 0 for logprob in logprobs)
    assert set(transition.policy_versions) == {3}
    assert choice.finish_reason == transition.finish_reason
    assert reply.usage.prompt_tokens == len(transition.prompt_token_ids)
    assert reply.usage.completion_tokens == len(choice.token_ids) <= 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + len(choice.token_ids)


async def test_a_stream_is_a_write_a_token_and_one_for_each_end(bench: Bench) -> None:
    llm = bench.rollout()
    body = {"model": "policy", "max_tokens": 3, "messages": ASK, "stream": True}
    headers = {"Authorization": f"Bearer {llm.api_key}"}
    url = f"{llm.base_url}/chat/completions"
    async with bench.http.post(url, json=body, headers=headers) as response:
        writes = [data async for data, _ in response.content.iter_chunks()]
    (transition,), _ = spans_to_transitions(bench.store.spans("r1"))
    assert len(writes) <= 1 + len(transition.response_token_ids) + 1
    role, *_ = writes[0].split(b"\n\n")
    *_, finish, done, end = writes[-1].split(b"\n\n")
    assert json.loads(role[6:])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(finish[6:])["choices"][0]["finish_reason"] == transition.finish_reason
    assert (done, end) == (b"data: [DONE]", b"")


async def test_a_call_is_one_span_with_the_genai_conventions(
    bench: Bench, connect: Connect
) -> None:
    client = connect(bench.rollout(temperature=0.5))
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"x-agent-name": "writer", "traceparent": traceparent}
    reply = await _ask(client, model="policy:checker", stop=["zz"], extra_headers=headers)
    (span,) = bench.store.spans("r1")
    assert (span.name, span.error) == ("chat policy:checker", None)
    assert span.trace_id == traceparent.split("-")[1]
    assert span.parent_span_id == traceparent.split("-")[2]
    assert 0 < span.end_ns - span.start_ns < 60e9
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy:checker",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": reply.id,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.stop_sequences": ("zz",),
        "gen_ai.response.finish_reasons": (reply.choices[0].finish_reason,),
        "gen_ai.usage.input_tokens": reply.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": reply.usage.completion_tokens,
        "lightning.rollout_id": "r1",
        "lightning.agent": "writer",
        "lightning.policy": "policy:checker",
    }
    assert {name: span.attributes[name] for name in expected} == expected


async def test_the_choices_of_a_call_are_learned_from_at_its_temperature(
    bench: Bench, connect: Connect
) -> None:
    await _ask(connect(bench.rollout(temperature=0.5)), n=2)
    calls, _ = spans_to_transitions(bench.store.spans("r1"))
    assert [call.temperature for call in calls] == [0.5, 0.5]
    for call in calls:
        np.testing.assert_allclose(call.tempered_logprobs, call.sampling_logprobs, atol=1e-5)
        assert call.tempered_logprobs != call.behavior_logprobs


async def test_the_sync_client_works(bench: Bench) -> None:
    llm = bench.rollout()

    def talk() -> tuple[Any, str, list[str]]:
        with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            names = [model.id for model in client.models.list()]
            fields: dict[str, Any] = {"model": "policy", "messages": ASK, "max_tokens": 8}
            reply = client.chat.completions.create(**fields)
            chunks = list(client.chat.completions.create(**fields, stream=True))
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            return reply, text, names

    reply, streamed, models = await asyncio.to_thread(talk)
    first, second = spans_to_transitions(bench.store.spans("r1"))[0]
    assert reply.choices[0].message.content == bench.model.tokenizer.decode(
        first.response_token_ids
    )
    assert streamed == bench.model.tokenizer.decode(second.response_token_ids)
    assert models == ["policy", "tiny"]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_says_what_a_whole_answer_says(
    bench: Bench, connect: Connect, n: int
) -> None:
    client = connect(LLM(f"{bench.gateway.url}/v1", "right-key", "tiny"))
    fields = {"seed": 11, "n": n, "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = await _ask(client, **fields)
    stream = await _ask(client, **fields, stream=True, stream_options={"include_usage": True})
    texts, ids, logprobs, finish = [""] * n, [[] for _ in range(n)], [[] for _ in range(n)], {}
    prompt_ids = usage = None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", [])
            if choice.logprobs:
                logprobs[choice.index] += [e.logprob for e in choice.logprobs.content]
            if choice.finish_reason:
                finish[choice.index] = choice.finish_reason
        prompt_ids = getattr(chunk, "prompt_token_ids", prompt_ids)
        usage = chunk.usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    for choice, streamed in zip(whole.choices, logprobs, strict=True):
        assert streamed == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-5)
    assert finish == {choice.index: choice.finish_reason for choice in whole.choices}
    assert prompt_ids == whole.prompt_token_ids
    assert usage is not None and usage.prompt_tokens_details.cached_tokens > 0  # the first one's
    details = {"prompt_tokens_details": whole.usage.prompt_tokens_details}
    assert usage.model_copy(update=details) == whole.usage
    assert len({tuple(choice.token_ids) for choice in whole.choices}) == n


async def test_choices_become_transitions(bench: Bench, connect: Connect) -> None:
    reply = await _ask(connect(bench.rollout()), n=3, extra_body={"return_token_ids": True})
    spans = bench.store.spans("r1")
    call = next(span for span in spans if span.name == "chat policy")
    choices = [span for span in spans if span is not call]
    assert {span.parent_span_id for span in choices} == {call.span_id} and len(choices) == 3
    transitions, reasons = spans_to_transitions(spans)
    assert [list(t.response_token_ids) for t in transitions] == [
        choice.token_ids for choice in reply.choices
    ]
    assert reasons == {}


async def test_a_conversation_extends_token_for_token(bench: Bench, connect: Connect) -> None:
    client, messages = connect(bench.rollout()), list(ASK)
    for _ in range(4):
        reply = await _ask(client, messages)
        text = reply.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    transitions, _ = spans_to_transitions(bench.store.spans("r1"))
    for earlier, later in itertools.pairwise(transitions):
        path = earlier.prompt_token_ids + earlier.response_token_ids
        assert later.prompt_token_ids[: len(path)] == path
    # Random bytes are not UTF-8, so encoding their text again would give other ids.
    again = bench.model.tokenizer.encode(messages[1]["content"])
    assert again != list(transitions[0].response_token_ids)
    await _ask(client, [{"role": "user", "content": "another start"}, *messages[1:]])
    assert bench.gateway.stats()["serve/prefix_breaks"] == 1
    assert bench.gateway.close_rollout("r1").unanswered == ()


async def test_rollouts_repeat_with_their_seed(bench: Bench, connect: Connect) -> None:
    texts = {}
    for rollout_id, seed in (("a", 1), ("b", 1), ("c", 2)):
        client = connect(bench.rollout(rollout_id, seed))
        replies = [await _ask(client, seed=5) for _ in range(2)]
        texts[rollout_id] = [reply.choices[0].message.content for reply in replies]
    assert texts["a"] == texts["b"] != texts["c"]
    assert texts["a"][0] != texts["a"][1]


async def test_settings_of_the_rollout_win(bench: Bench, connect: Connect) -> None:
    client = connect(bench.rollout(temperature=0.0, max_tokens=5))
    replies = [await _ask(client, temperature=1.0, max_tokens=12) for _ in range(2)]
    assert replies[0].choices[0].message == replies[1].choices[0].message
    assert all(reply.usage.completion_tokens <= 5 for reply in replies)
    assert set(spans_to_transitions(bench.store.spans("r1"))[0][0].sampling_logprobs) == {0.0}


async def test_a_stop_string_ends_the_text_but_not_the_record(
    bench: Bench, connect: Connect
) -> None:
    client = connect(bench.rollout(temperature=0.0))
    text = (await _ask(client)).choices[0].message.content
    stop = text[5]
    reply = await _ask(client, stop=stop)
    assert reply.choices[0].message.content == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    last = spans_to_transitions(bench.store.spans("r1"))[0][1]
    assert stop in bench.model.tokenizer.decode(last.response_token_ids)


async def test_calls_outside_of_rollouts_are_served_and_never_trained(
    bench: Bench, connect: Connect
) -> None:
    client = connect(LLM(f"{bench.gateway.url}/v1", "right-key", "tiny"))
    reply = await _ask(client, model="tiny")
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert reply.model == "tiny"
    (span,) = bench.store.spans(None)
    assert attributes.ROLLOUT_ID not in span.attributes


async def test_langchain_works_unmodified(bench: Bench) -> None:
    llm = bench.rollout("task/1 ü")  # ids need not be safe in URLs
    chat = ChatOpenAI(
        model=llm.model,
        base_url=llm.base_url,
        api_key=SecretStr(llm.api_key),
        default_headers={"x-agent-name": "writer"},
        max_completion_tokens=8,
        temperature=0.7,
        extra_body={"return_token_ids": True},
    )
    first = await chat.ainvoke([HumanMessage("Say something.")])
    history = [HumanMessage("Say something."), AIMessage(first.text), HumanMessage("more")]
    pieces = [piece.text async for piece in chat.astream(history)]
    one, two = spans_to_transitions(bench.store.spans("task/1 ü"))[0]
    path = one.prompt_token_ids + one.response_token_ids
    assert two.prompt_token_ids[: len(path)] == path
    assert "".join(pieces) == bench.model.tokenizer.decode(two.response_token_ids)
    assert one.agent == two.agent == "writer"
    assert len(one.response_token_ids) <= 8


async def test_concurrent_rollouts_do_not_mix(bench: Bench, connect: Connect) -> None:
    clients = {f"r{i}": connect(bench.rollout(f"r{i}", seed=i)) for i in range(12)}
    replies = await asyncio.gather(*(_ask(client) for client in clients.values()))
    for rollout_id, reply in zip(clients, replies, strict=True):
        (transition,), _ = spans_to_transitions(bench.store.spans(rollout_id))
        text = bench.model.tokenizer.decode(transition.response_token_ids)
        assert text == reply.choices[0].message.content
    assert len({reply.choices[0].message.content for reply in replies}) == 12


async def test_health_needs_no_key(bench: Bench) -> None:
    async with bench.http.get(f"{bench.gateway.url}/healthz") as response:
        body = json.loads(await response.text())
    assert body["status"] == "ok" and body["engine"]["serve/running"] == 0.0


async def test_a_rollout_opens_and_closes_once(bench: Bench) -> None:
    bench.rollout()
    with pytest.raises(InvalidValue) as caught:
        bench.gateway.open_rollout(RolloutSettings("r1", 0))
    assert (caught.value.key, caught.value.reason) == ("r1", "exists")
    assert bench.gateway.close_rollout("r1").num_cancelled == 0
    with pytest.raises(InvalidValue) as caught:
        bench.gateway.close_rollout("r1")
    assert (caught.value.key, caught.value.reason) == ("r1", "not_found")
