"""Tests of a teacher behind a URL, served by this package's own gateway."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from coded import raises_coded

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.app import Gateway
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.model_files import ModelError
from lightning_jax.rl.batches.batch import NO_TOKEN
from lightning_jax.rl.config import BatchConfig, DistillConfig
from lightning_jax.rl.distill import make_scorer
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config
from lightning_jax.train.state import remote_teacher
from lightning_jax.train.state.remote_teacher import RemoteTeacher, TeacherError, connect

MODEL = tiny_model(seed=1, num_layers=1)
POLICY = (MODEL.tokenizer, MODEL.config.shape.vocab_size)
SEQUENCES = [
    dataclasses.replace(sequence([5, 6, 7], [8, 9]), teacher_coef=1.0),
    dataclasses.replace(
        sequence([5, 6, 7], [10, 11, 12]), teacher_coef=1.0, loss_mask=(True, False, True)
    ),
    dataclasses.replace(sequence([1, 2], [3]), teacher_coef=1.0, teacher_prompt_ids=(4, 5, 6, 7)),
]


@pytest.fixture
async def url(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    serve = ServeConfig(slots=4, max_len=128, prefill_buckets=(64,))
    async with Engine(MODEL, serve=serve) as engine, Gateway(engine, records=False) as gateway:
        monkeypatch.setenv("GATEWAY_KEY", gateway.api_key)
        yield f"{gateway.url}/v1"


def _config(url: str, **changes: Any) -> DistillConfig:
    return DistillConfig(teacher_url=url, served_model="policy", **changes)


@pytest.mark.parametrize("kl", ["forward", "sampled"])
async def test_scores_are_those_of_the_model_in_this_process(kl: str, url: str) -> None:
    config = _config(url, api_key_env="GATEWAY_KEY", kl=kl)
    teacher = await asyncio.to_thread(connect, config, *POLICY)
    with contextlib.closing(teacher):
        found = await asyncio.to_thread(teacher.score, SEQUENCES)
    mesh = make_mesh(MeshConfig(fsdp=1))
    batch = BatchConfig(rows=1, row_len=64, max_targets=32, head_chunk=32)
    assert config.num_top == (20 if kl == "forward" else 0)
    scorer = make_scorer(MODEL.config, batch, mesh=mesh, dtype="float32", top_k=config.num_top)
    for ours, theirs, item in zip(found, scorer(MODEL.params, SEQUENCES), SEQUENCES, strict=True):
        assert ours is not None and theirs is not None
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        if kl == "sampled":
            assert ours.top is None
            continue
        kept = list(item.loss_mask)
        assert ours.top is not None and theirs.top is not None
        np.testing.assert_array_equal(ours.top.ids[kept], theirs.top.ids[kept])
        np.testing.assert_allclose(ours.top.logprobs[kept], theirs.top.logprobs[kept], atol=1e-4)
    assert found[1] is not None and found[1].logprobs[1] == 0.0 and len(found[1].logprobs) == 3


@pytest.mark.parametrize("temperature, is_refused", [(0.5, True), (2.0, True), (1.0, False)])
def test_a_run_at_another_temperature_is_refused_before_it_begins(
    temperature: float, is_refused: bool
) -> None:
    """A server scores at temperature 1, so it would score no call. A model loaded here can."""
    settings = ["distill.teacher_url=http://localhost:1/v1", "distill.served_model=m"]
    chosen = f"rollout.temperature={temperature}"
    if not is_refused:
        load_config(Config, [*settings, chosen])
        return
    with raises_coded(ConfigError, "conflict", "rollout.temperature"):
        load_config(Config, [*settings, chosen])
    load_config(Config, ["distill.teacher=tiny", chosen])


@pytest.mark.parametrize("temperature", ["null", "0", "0.05"])
def test_temperatures_that_may_be_trained_at_1_are_not_refused(temperature: str) -> None:
    """Nearly greedy samples are trained at temperature 1, and null leaves it to the agent."""
    settings = ["distill.teacher_url=http://localhost:1/v1", "distill.served_model=m"]
    load_config(Config, [*settings, f"rollout.temperature={temperature}"])


@pytest.mark.parametrize("names", ["text", "too few", "none"])
async def test_server_that_names_no_ids_is_refused(names: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        ids, number = body["prompt"], len(body["prompt"]) + 1
        named: Any = [None, *[{"5": -0.5}] * (number - 1)]
        named = {"text": named, "too few": [None, {"token_id:5": -0.5}], "none": None}[names]
        scores = {"token_logprobs": [None, *[-1.0] * (number - 1)], "top_logprobs": named}
        choice = {
            "index": 0,
            "text": MODEL.tokenizer.decode(ids),
            "finish_reason": "length",
            "logprobs": scores,
        }
        return web.json_response({"id": "x", "object": "text_completion", "choices": [choice]})

    await _refused(answer, TeacherError, "no_ids", "distill.kl")


def test_likeliest_tokens_by_hand() -> None:
    """A server also names the sampled token, and tokens that the policy does not have."""
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none")
    with contextlib.closing(RemoteTeacher(client, "m", MODEL.tokenizer, 2, 100)) as teacher:
        ids, logprobs = teacher._likeliest(
            [
                {"token_id:7": -3.0, "token_id:5": -0.25, "token_id:6": -2.0},
                {"token_id:500": -0.5, "token_id:8": -1.0},
                {"token_id:9": 0.0},
            ]
        )
    kept = logprobs > NO_TOKEN
    assert kept.tolist() == [[True, True], [False, True], [True, False]]
    assert ids[kept].tolist() == [5, 6, 8, 9]
    assert logprobs[kept].tolist() == [-0.25, -2.0, -1.0, 0.0]


async def test_calls_at_another_temperature_are_not_scored(url: str) -> None:
    teacher = await asyncio.to_thread(connect, _config(url, api_key_env="GATEWAY_KEY"), *POLICY)
    cold = dataclasses.replace(SEQUENCES[0], temperature=0.5)
    with contextlib.closing(teacher):
        found = await asyncio.to_thread(teacher.score, [cold, SEQUENCES[0]])
    assert found[0] is None and found[1] is not None


@pytest.mark.parametrize(
    ("text", "logprobs", "error", "reason"),
    [
        (None, None, TeacherError, "not_scored"),
        (None, {"token_logprobs": [None, -1.0]}, TeacherError, "not_scored"),
        ("other words", None, ModelError, "mismatch"),
    ],
)
async def test_server_that_does_not_score_these_tokens_is_refused(
    text: str | None, logprobs: dict[str, Any] | None, error: type[Exception], reason: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        whole = {"token_logprobs": [None, *[-1.0] * len(prompt)]}  # with the sampled token
        choice = {"index": 0, "finish_reason": "length", "logprobs": whole if text else logprobs}
        choice["text"] = text or MODEL.tokenizer.decode(prompt)
        return web.json_response({"id": "x", "object": "text_completion", "choices": [choice]})

    await _refused(answer, error, reason)


async def test_wrong_key_is_one_sentence() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "wrong key"}}, status=401)

    await _refused(answer, TeacherError, "teacher_failed")


async def _refused(
    answer: Any, error: type[Exception], reason: str, key: str = "distill.teacher_url"
) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        config = _config(str(server.make_url("/v1")))
        with raises_coded(error, reason, key):
            await asyncio.to_thread(connect, config, *POLICY)


def test_server_that_is_down_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_teacher, "MAX_RETRIES", 0)
    with raises_coded(TeacherError, "teacher_failed", "distill.teacher_url"):
        connect(_config("http://127.0.0.1:9/v1"), *POLICY)


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with raises_coded(ConfigError, "missing", "TEACHER_KEY"):
        connect(_config("http://127.0.0.1:9/v1", api_key_env="TEACHER_KEY"), *POLICY)
    monkeypatch.setattr(RemoteTeacher, "check", lambda self: None)
    monkeypatch.setitem(os.environ, "TEACHER_KEY", "mine")
    config = _config("http://127.0.0.1:9/v1", api_key_env="TEACHER_KEY")
    with connect(config, *POLICY).client as client:
        assert isinstance(client, openai.OpenAI) and client.api_key == "mine"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    asked: list[str] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", complete)
    async with TestServer(app) as server:
        with raises_coded(TeacherError, "teacher_failed"):
            await asyncio.to_thread(connect, _config(str(server.make_url("/v1"))), *POLICY)
    assert asked == ["/v1/completions"]
