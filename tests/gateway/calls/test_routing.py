"""Tests of several policies behind one URL: who answers, with which weights, and the record."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gateway_bench import Bench

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.dialects.all import read_traits
from lightning_jax.models.config import LoraConfig, PolicyConfig
from lightning_jax.models.lora import one_of
from lightning_jax.models.policies import Policy, PolicyTable
from lightning_jax.models.transformer import forward, unembed
from lightning_jax.testing.service import run_service
from lightning_jax.testing.tiny import tiny_policies
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.roles import assign_roles
from lightning_jax.types import Transition

SERVE = ServeConfig(slots=2, max_len=128, prefill_buckets=(64,), api_key="right-key")
MODEL = tiny_policies(LoraConfig(rank=2))
ROUTING = Routing(
    roles={
        "far": RoleConfig(agent="checker", trains=False, served_by="initial"),
        "second": RoleConfig(agent="second*", policy="rewriter"),
        "poet": RoleConfig(system="in verse", policy="writer"),
    },
    policies=PolicyTable.of(
        {"writer": PolicyConfig(), "rewriter": PolicyConfig(trains=False)}, are_adapters=True
    ),
)
ASK: list[Any] = [{"role": "user", "content": "Say something, please."}]
TEXT = [{"type": "text", "text": "b"}]
BODY: dict[str, Any] = {"model": "writer", "messages": ASK, "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> SlotPrograms:
    return SlotPrograms(MODEL.config, SERVE)


@pytest.fixture
async def bench(engine: SlotPrograms, tmp_path: Path) -> AsyncIterator[Bench]:
    arguments = (tmp_path, MODEL, engine, SERVE)
    async with (
        run_service(*arguments, routing=ROUTING, initial=MODEL) as service,
        aiohttp.ClientSession() as http,
    ):
        yield Bench(service.gateway, service.loop, service.store, MODEL, http)


def calls(bench: Bench) -> tuple[Transition, ...]:
    spans = bench.store.spans("r1")
    found = spans_to_transitions(spans)[0]
    return assign_roles(spans, found, ROUTING.roles, ROUTING.policies)


@partial(jax.jit, static_argnums=1)
def whole_table(params: Any, config: Any, ids: Any) -> Any:
    hidden, _ = forward(params, config, ids[None], jnp.arange(len(ids))[None])
    return jax.nn.log_softmax(unembed(params, config, hidden)[0])


def logprobs(call: Transition, adapter: int) -> np.ndarray:
    """Return the log-probs of the response's tokens under one adapter alone, without a cache."""
    model, ids = one_of(MODEL, adapter), [*call.prompt_token_ids, *call.response_token_ids]
    padded = np.pad(ids, (0, SERVE.max_len - len(ids)))  # later tokens do not affect it
    table = np.asarray(whole_table(model.params, model.config, padded))
    first = len(call.prompt_token_ids)
    return table[np.arange(first - 1, len(ids) - 1), ids[first:]]


async def test_policies_answer_with_separate_adapters_and_caches(bench: Bench) -> None:
    base, hits = bench.rollout().base_url, []
    for name in ("writer", "rewriter:latest", "writer", "rewriter"):
        before = bench.loop.stats()["serve/prefix_hit_tokens"]
        status, _, _ = await bench.post(BODY | {"model": name}, base=base)
        assert status == 200
        hits.append(bench.loop.stats()["serve/prefix_hit_tokens"] - before)
    assert hits[:2] == [0.0, 0.0] and min(hits[2:]) > 16
    found = calls(bench)
    assert [call.answered_by for call in found] == ["writer", "rewriter"] * 2
    assert [call.trains for call in found] == [True, False] * 2
    for call in found:
        adapter = ROUTING.policies.indices[call.answered_by]
        np.testing.assert_allclose(call.behavior_logprobs, logprobs(call, adapter), atol=1e-5)
    assert not np.allclose(found[0].behavior_logprobs, found[1].behavior_logprobs)


async def test_roles_route_agents_that_all_ask_for_one_name(bench: Bench) -> None:
    base, plain = bench.rollout().base_url, BODY | {"model": "policy"}
    verse = [{"role": "system", "content": "Speak in verse."}, *ASK]
    assert (await bench.post(plain | {"messages": verse}, base=base))[0] == 200
    assert (await bench.post(plain | {"model": "policy:second-try"}, base=base))[0] == 200
    named = {"x-agent-name": "second"}  # the role overrides the requested name
    assert (await bench.post(BODY, base=base, **named))[0] == 200
    assert (await bench.post(plain | {"model": "policy:checker"}, base=base))[0] == 200
    found = calls(bench)
    assert [call.answered_by for call in found] == ["writer", "rewriter", "rewriter", ""]
    assert [call.role for call in found] == ["poet", "second", "second", "far"]
    assert [call.trains for call in found] == [True, False, False, False]
    spans = [span.attributes for span in bench.store.spans("r1")]
    answered_by = [values.get(attributes.ANSWERED_BY) for values in spans]
    assert answered_by == ["writer", "rewriter", "rewriter", None]
    assert [values[attributes.TRAINS] for values in spans] == [True, False, False, False]


async def test_a_call_for_no_policy_is_refused_and_the_policies_are_named(bench: Bench) -> None:
    base = bench.rollout().base_url
    for model, agent in (("policy", ""), ("policy:third", "'third'")):
        status, body, _ = await bench.post(BODY | {"model": model}, base=base)
        assert status == 404 and body["error"]["code"] == "model_not_found"
        message = body["error"]["message"]
        assert all(name in message for name in (repr(model), agent, "writer", "rewriter"))
    status, body, _ = await bench.post(BODY | {"model": "reviser"}, base=base)
    assert status == 404 and body["error"]["code"] == "model_not_found"
    assert all(name in body["error"]["message"] for name in ("'writer'", "'rewriter'"))


async def test_listings_name_the_policies(bench: Bench) -> None:
    key = {"Authorization": "Bearer right-key"}
    async with bench.http.get(f"{bench.gateway.url}/v1/models", headers=key) as answer:
        listed = [entry["id"] for entry in (await answer.json())["data"]]
    assert listed == ["writer", "rewriter", "policy", "tiny"]
    async with bench.http.get(f"{bench.gateway.url}/api/tags", headers=key) as answer:
        tags = [entry["name"] for entry in (await answer.json())["models"]]
    assert tags[:2] == ["writer:latest", "rewriter:latest"]


async def test_prompts_are_scored_by_the_policy_that_is_asked(bench: Bench) -> None:
    body = {"model": "rewriter", "prompt": "abcdefgh", "max_tokens": 1, "echo": True, "logprobs": 0}
    status, reply, _ = await bench.post(body, path="/v1/completions")
    assert status == 200
    scored = np.asarray(reply["choices"][0]["logprobs"]["token_logprobs"][1:8])
    ids = tuple(MODEL.tokenizer.encode("abcdefgh"))
    known = Transition("c", "r", ids[:1], ids[1:], (0.0,) * 7, (0.0,) * 7, (0,) * 7, "stop")
    np.testing.assert_allclose(scored, logprobs(known, 1), atol=1e-4)


async def test_an_adapter_that_is_not_there_is_refused(bench: Bench) -> None:
    for adapter in (None, 2):
        with pytest.raises(InvalidValue) as caught:
            bench.loop.submit([1, 2], SamplingParams(), Policy(adapter=adapter))
        assert (caught.value.key, caught.value.reason) == ("adapter", "unknown")


@pytest.mark.parametrize(
    ("body", "system"),
    [
        (
            {
                "messages": [
                    {"role": "system", "content": "a"},
                    {"role": "developer", "content": TEXT},
                    {"role": "user", "content": "x"},
                ]
            },
            "a\nb",
        ),
        ({"system": TEXT, "messages": [{"role": "user", "content": "x"}]}, "b"),
        ({"instructions": "a", "input": [{"role": "system", "content": "b"}]}, "a\nb"),
        ({"systemInstruction": {"parts": [{"text": "a"}, {"text": "b"}]}}, "a\nb"),
        ({"system_instruction": {"parts": [{"text": "a"}]}}, "a"),
        ({"messages": "odd", "system": 3}, ""),
    ],
)
def test_system_prompt_is_found_in_every_dialect(body: dict[str, Any], system: str) -> None:
    traits = read_traits(body | {"model": "policy:w"}, {}, {})
    assert (traits["agent"], traits["model"], traits["system"]) == ("w", "policy:w", system)
    assert read_traits({}, {"model": "m"}, {"x-agent-name": "a"})["agent"] == "a"


RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "ignore"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "a"),
        ({"messages": [{"role": "user", "content": [RESULT, *TEXT]}]}, "b"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}, ""),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, ""),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, "a"),
        ({"input": [{"type": "function_call_output", "output": "a", "content": "a"}]}, ""),
        ({"input": "a"}, "a"),
        ({"contents": [{"parts": [{"text": "a"}, {"functionResponse": {"name": "b"}}]}]}, "a"),
        ({"prompt": "a"}, "a"),
        ({"messages": "odd"}, "odd"),
        ({"messages": [3, None], "contents": 4}, ""),
    ],
)
def test_last_message_is_read_in_every_dialect(body: dict[str, Any], message: str) -> None:
    assert read_traits(body, {}, {})["message"] == message
