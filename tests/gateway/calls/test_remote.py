"""Tests of a gateway without a model, whose calls all go to another server."""

from contextlib import closing

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from coded import raises_coded

from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.gateway.calls.remote import RemoteEngine, remote_role, remote_routing
from lightning_jax.settings import ConfigError
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.store import TemporaryStore

URL = "http://localhost:8000/v1"


@pytest.mark.parametrize("url", ["", "policy", "localhost:8000", "http://me:x@host/v1"])
def test_an_unusable_url_is_refused(url: str) -> None:
    with raises_coded(ConfigError, "invalid", "url"):
        remote_role(url)


def test_calls_of_the_policy_go_to_the_server_and_others_stay() -> None:
    roles = {
        "judge": RoleConfig(model="far*", trains=False, served_by="http://other/v1"),
        "writer": RoleConfig(agent="writer", policy="a"),
        "checker": RoleConfig(agent="checker", trains=False, served_by="initial"),
        "summary": RoleConfig(message="^Summarize", trains=False),
    }
    routing = remote_routing(roles, remote_role(URL, "k", "big"))
    served = {}
    for agent, model in (("judge", "far"), ("writer", ""), ("checker", ""), ("", "policy")):
        route = routing.route(agent=agent, model=model, system="", message="")
        served[route.role_name] = (route.role.served_by, route.role.served_model, route.trains)
    ours = (URL, "big", False)
    assert served == {
        "judge": ("http://other/v1", None, False),
        "writer": ours,
        "checker": ours,
        "": ours,
    }


async def test_the_server_answers_and_a_wrong_port_is_infrastructure() -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.headers.get("Authorization"), (await request.json())["model"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}}
        return web.json_response({"id": "1", "choices": [choice], "model": "big"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    messages = [{"role": "user", "content": "Hello"}]
    with closing(TemporaryStore()) as store:
        async with TestServer(app) as server:
            url = str(server.make_url("/v1"))
            routing = remote_routing({}, remote_role(url, "its-key", "big"))
            async with Gateway(RemoteEngine("big"), store, routing=routing) as gateway:
                llm = gateway.open_rollout(RolloutSettings("r1", seed=0))
                async with openai.AsyncOpenAI(
                    base_url=llm.base_url, api_key=llm.api_key, max_retries=0
                ) as client:
                    send = client.chat.completions.create
                    reply = await send(model=llm.model, messages=messages)  # pyright: ignore
                    assert reply.choices[0].message.content == "Hi"
                    assert asked == [("Bearer its-key", "big")]
                    await server.close()
                    with pytest.raises(openai.InternalServerError) as failed:
                        await send(model=llm.model, messages=messages)  # pyright: ignore
                assert failed.value.code == "upstream_error" and url in str(failed.value)
                assert gateway.close_rollout("r1").unanswered == ("upstream_error",)
                assert gateway.engine.status == "ok"
        answered, lost = store.spans("r1")
        assert answered.attributes[attributes.SERVED_BY] == url and lost.error is not None
