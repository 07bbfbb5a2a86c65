"""Tests of roles: who answers a call, its record, and failures of the other server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from gateway_bench import Bench, Connect, MakeBench
from yarl import URL

from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.convert import spans_to_transitions

MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]
BODY: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}


@asynccontextmanager
async def _upstream() -> AsyncIterator[tuple[str, list[Any]]]:
    """Run a server scripted by the model name, and yield (URL, requests that it got)."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "models" in request.path:
            asked.append((request.path_qs, request.headers.get("x-goog-api-key"), body))
            return web.json_response({"candidates": []})
        asked.append((request.path, request.headers.get("Authorization"), body))
        if body["model"] == "busy":
            return web.json_response({"error": {"message": "later"}}, status=503)
        if body["model"] == "moved":
            location = f"http://127.0.0.1:{runner.addresses[0][1]}/stolen"
            return web.Response(status=307, headers={"Location": location})
        if body["model"] in ("long", "long and told"):
            response = web.StreamResponse()
            if body["model"] == "long and told":
                response.content_length = 2**20
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    await response.write(b"x" * 2**14)
            return response
        if body["model"] == "torn":
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b"half")
            assert request.transport is not None
            request.transport.close()
            return response
        message = {"role": "assistant", "content": f"I am {body['model']}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {
                "id": "far-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
            }
        )

    async def anything(request: web.Request) -> web.StreamResponse:
        asked.append((request.raw_path, request.headers.get("Authorization"), None))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/v1beta/models/{model}", answer)
    app.router.add_route("*", "/{rest:.*}", anything)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()


def _far(url: str, **more: Any) -> dict[str, RoleConfig]:
    return {"judge": RoleConfig(model="far*", trains=False, served_by=url, **more)}


async def test_another_server_answers_and_the_call_is_recorded(
    make_bench: MakeBench, connect: Connect
) -> None:
    async with _upstream() as (url, asked):
        roles = _far(url, served_model="big", api_key="its-key")
        async with make_bench(roles=roles) as bench:
            client = connect(bench.rollout())
            proxied = await client.chat.completions.create(
                model="far-judge", messages=MESSAGES, extra_headers={"x-agent-name": "judge"}
            )
            sampled = await client.chat.completions.create(**BODY)
            assert proxied.choices[0].message.content == "I am big" and sampled.model == "policy"
            (path, key, body) = asked[0]
            assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer its-key", "big")
            far, _ = bench.store.spans("r1")
            assert (
                far.attributes[attributes.SERVED_BY] == url
                and far.attributes[attributes.ROLE] == "judge"
                and far.attributes[attributes.DIALECT] == "chat"
            )
            assert (
                far.attributes[attributes.AGENT] == "judge"
                and "I am big" in far.attributes["output.value"]
            )
            assert "its-key" not in str(far)
            transitions, reasons = spans_to_transitions(bench.store.spans("r1"))
            assert len(transitions) == 1 and reasons == {"served_elsewhere": 1}


@pytest.mark.parametrize("ending", ["", "/v1", "/v1/"])
async def test_geminis_clients_name_model_and_key_in_the_url(
    make_bench: MakeBench, ending: str
) -> None:
    """Gemini's clients put our model name and key in the URL; the other server gets its own
    instead.
    """
    async with _upstream() as (url, asked):
        served_by = url.removesuffix("/v1") + ending
        roles = _far(served_by, served_model="big", api_key="its-key")
        async with make_bench(roles=roles) as bench:
            body = {"contents": [{"parts": [{"text": "hi"}]}]}
            path = "/v1beta/models/far-judge:generateContent?key=right-key&alt=json"
            status, _, _ = await bench.post(body, base=bench.rollout().base_url, path=path)
            assert status == 200
            assert asked == [("/v1beta/models/big:generateContent?alt=json", "its-key", body)]


@pytest.mark.parametrize(
    "name",
    [
        "far/../../../admin/delete",
        "far%2f..%2f..%2f..%2fadmin%2fdelete",
        "far/%2e%2e/%2e%2e/admin",
        "far%3fa=b",
        "far%23",
        "far%5c..%5cadmin",
        "far/..;/admin",
        "far//admin",
        "far/./admin",
        "far%00",
        "far%252e%252e",
    ],
)
async def test_a_models_name_does_not_lead_out_of_its_path(
    make_bench: MakeBench, name: str
) -> None:
    async with _upstream() as (url, asked):
        roles = _far(url.removesuffix("/v1"), api_key="its-key")
        async with make_bench(roles=roles) as bench:
            base = bench.rollout().base_url.removesuffix("/v1")
            to = URL(f"{base}/v1beta/models/{name}:generateContent", encoded=True)
            headers = {"x-goog-api-key": "right-key"}
            async with bench.http.post(to, json={"contents": []}, headers=headers) as response:
                assert response.status == 400
                error = (await response.json())["error"]
                assert error["status"] == "INVALID_ARGUMENT" and "model" in error["message"]
            assert asked == []
            (span,) = bench.store.spans("r1")
            assert span.attributes["error.type"] == "invalid_value"
            assert bench.gateway.close_rollout("r1").unanswered == ()


async def test_honest_names_of_models_are_passed_on(make_bench: MakeBench) -> None:
    async with _upstream() as (url, asked):
        async with make_bench(roles=_far(url.removesuffix("/v1"))) as bench:
            base = bench.rollout().base_url
            for name in ("far-1.5@002", "far/large"):
                path = f"/v1beta/models/{name}:generateContent?alt=json&key=right-key&token=t"
                assert (await bench.post({"contents": []}, base=base, path=path))[0] == 200
        paths = [path for path, *_ in asked]
        assert paths == [
            "/v1beta/models/far-1.5@002:generateContent?alt=json",
            "/v1beta/models/far/large:generateContent?alt=json",
        ]


async def test_redirects_are_not_followed(make_bench: MakeBench) -> None:
    async with _upstream() as (url, asked):
        roles = _far(url, served_model="moved", api_key="its-key")
        async with make_bench(roles=roles) as bench:
            base = bench.rollout().base_url
            status, reply, _ = await bench.post(BODY | {"model": "far"}, base=base)
            assert (status, reply["error"]["code"]) == (502, "upstream_error")
            assert "roles.judge.served_by" in reply["error"]["message"]
            assert [path for path, *_ in asked] == ["/v1/chat/completions"]
            assert bench.gateway.close_rollout("r1").unanswered == ("upstream_error",)


@pytest.mark.parametrize("asked_for", ["long", "long and told"])
async def test_a_longer_answer_than_is_allowed_breaks_off(
    make_bench: MakeBench, asked_for: str
) -> None:
    async with _upstream() as (url, _):
        roles = _far(url, served_model=asked_for, max_response_mib=0.1)
        async with make_bench(roles=roles) as bench:
            to = f"{bench.rollout().base_url}/chat/completions"
            headers = {"Authorization": "Bearer right-key"}
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async with bench.http.post(
                    to, json=BODY | {"model": "far"}, headers=headers
                ) as response:
                    assert response.status == 502 or len(await response.read()) == 0
                    assert asked_for == "long and told"
            (span,) = bench.store.spans("r1")
            assert span.attributes["error.type"] == "upstream_error"
            assert span.error is not None and "roles.judge.max_response_mib" in span.error


async def test_a_server_that_fails_is_infrastructure(make_bench: MakeBench) -> None:
    async with (
        _upstream() as (url, _),
        make_bench(roles=_far(url, served_model="busy")) as bench,
    ):
        base = bench.rollout().base_url
        status, reply, _ = await bench.post(BODY | {"model": "far"}, base=base)
        assert status == 503 and reply["error"]["message"] == "later"
        assert bench.gateway.close_rollout("r1").unanswered == ("upstream_error",)
        (span,) = bench.store.spans("r1")
        assert span.attributes["error.type"] == "upstream_503"
    async with make_bench(roles=_far(url)) as bench:  # the server no longer listens
        base = bench.rollout("r2").base_url
        status, reply, _ = await bench.post(BODY | {"model": "far"}, base=base)
        assert (status, reply["error"]["code"]) == (502, "upstream_error")
        assert "roles.judge.served_by" in reply["error"]["message"]
        assert bench.gateway.close_rollout("r2").unanswered == ("upstream_error",)


@pytest.mark.parametrize(
    ("limit_s", "setting"), [(0.1, "rollout.call_timeout_s"), (None, "roles.judge.timeout_s")]
)
async def test_a_server_that_is_late_names_the_limit_to_raise(
    make_bench: MakeBench, limit_s: float | None, setting: str
) -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client hangs up
        writer.close()

    silent = await asyncio.start_server(never_answer, "127.0.0.1")
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/v1"
    async with silent, make_bench(roles=_far(url, timeout_s=0.2)) as bench:
        base = bench.rollout(call_timeout_s=limit_s).base_url
        status, reply, _ = await bench.post(BODY | {"model": "far"}, base=base)
        assert (status, reply["error"]["code"]) == (502, "upstream_error")
        assert setting in reply["error"]["message"]


async def test_an_answer_that_breaks_off_breaks_off(
    make_bench: MakeBench, connect: Connect
) -> None:
    async with (
        _upstream() as (url, _),
        make_bench(roles=_far(url, served_model="torn")) as bench,
    ):
        with pytest.raises(openai.APIError):
            await connect(bench.rollout()).chat.completions.create(model="far", messages=MESSAGES)
        (span,) = bench.store.spans("r1")
        assert span.attributes["error.type"] == "upstream_error"


async def test_initial_weights_answer_frozen_roles(make_bench: MakeBench) -> None:
    roles = {"checker": RoleConfig(agent="checker", trains=False, served_by="initial")}
    async with make_bench(roles=roles, initial=tiny_model(1)) as bench:
        base = bench.rollout().base_url
        for name in ("policy", "policy:checker"):
            assert (await bench.post(BODY | {"model": name}, base=base))[0] == 200
        policy, checker = spans_to_transitions(bench.store.spans("r1"))[0]
        assert policy.prompt_token_ids == checker.prompt_token_ids
        assert policy.behavior_logprobs != checker.behavior_logprobs
        assert set(policy.policy_versions) == {3} and set(checker.policy_versions) == {0}
        roles_noted = [s.attributes.get(attributes.ROLE) for s in bench.store.spans("r1")]
        assert roles_noted == [None, "checker"]


async def test_a_role_gives_a_models_name_a_meaning(bench: Bench, make_bench: MakeBench) -> None:
    status, _, _ = await bench.post(BODY | {"model": "gpt-4o"})
    assert status == 404
    await bench.gateway.close()
    async with make_bench(roles={"small": RoleConfig(model="gpt-*")}) as with_role:
        status, reply, _ = await with_role.post(BODY | {"model": "gpt-4o"})
        assert status == 200 and reply["model"] == "gpt-4o"
