"""Tests of a teacher behind a URL, served by this package's own gateway."""

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from coded import raises_coded

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.app import Gateway
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.names import ModelError
from lightning_jax.models.sharding import make_mesh
from lightning_jax.rl.config import BatchConfig, DistillConfig
from lightning_jax.rl.distill import make_scorer
from lightning_jax.settings import ConfigError
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train import remote_teacher
from lightning_jax.train.remote_teacher import RemoteTeacher, TeacherError, connect

MODEL = tiny_model(seed=1, num_layers=1)
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


async def test_scores_are_those_of_the_model_in_this_process(url: str) -> None:
    teacher = await asyncio.to_thread(
        connect, _config(url, api_key_env="GATEWAY_KEY"), MODEL.tokenizer
    )
    with contextlib.closing(teacher):
        found = await asyncio.to_thread(teacher.score, SEQUENCES)
    mesh = make_mesh(MeshConfig(fsdp=1))
    batch = BatchConfig(rows=1, row_len=64, max_targets=32, head_chunk=32)
    expected = make_scorer(MODEL.config, batch, mesh=mesh, dtype="float32")(MODEL.params, SEQUENCES)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert found[1] is not None and found[1][1] == 0.0 and len(found[1]) == 3


async def test_calls_at_another_temperature_are_not_scored(url: str) -> None:
    teacher = await asyncio.to_thread(
        connect, _config(url, api_key_env="GATEWAY_KEY"), MODEL.tokenizer
    )
    cold = dataclasses.replace(SEQUENCES[0], temperature=0.5)
    with contextlib.closing(teacher):
        found = await asyncio.to_thread(teacher.score, [cold, SEQUENCES[0]])
    assert found[0] is None and found[1] is not None


@pytest.mark.parametrize("logprobs", [None, {"token_logprobs": [None, -1.0]}])
async def test_server_without_scores_is_refused(logprobs: dict[str, Any] | None) -> None:
    async def answer(request: web.Request) -> web.Response:
        text = MODEL.tokenizer.decode((await request.json())["prompt"])
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": logprobs}
        return web.json_response({"id": "x", "object": "text_completion", "choices": [choice]})

    await _refused(answer, TeacherError, "not_scored")


async def test_server_with_another_vocabulary_is_refused() -> None:
    async def answer(request: web.Request) -> web.Response:
        number = len((await request.json())["prompt"])
        scores = {"token_logprobs": [None, *[-1.0] * number]}
        choice = {"index": 0, "text": "other words", "finish_reason": "length", "logprobs": scores}
        return web.json_response({"id": "x", "object": "text_completion", "choices": [choice]})

    await _refused(answer, ModelError, "mismatch")


async def test_wrong_key_is_one_sentence() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "wrong key"}}, status=401)

    await _refused(answer, TeacherError, "teacher_failed")


async def _refused(answer: Any, error: type[Exception], reason: str) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        config = _config(str(server.make_url("/v1")))
        with raises_coded(error, reason, "distill.teacher_url"):
            await asyncio.to_thread(connect, config, MODEL.tokenizer)


def test_server_that_is_down_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_teacher, "MAX_RETRIES", 0)
    with raises_coded(TeacherError, "teacher_failed", "distill.teacher_url"):
        connect(_config("http://127.0.0.1:9/v1"), MODEL.tokenizer)


def test_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with raises_coded(ConfigError, "missing", "TEACHER_KEY"):
        connect(_config("http://127.0.0.1:9/v1", api_key_env="TEACHER_KEY"), MODEL.tokenizer)
    monkeypatch.setattr(RemoteTeacher, "check", lambda self: None)
    monkeypatch.setitem(os.environ, "TEACHER_KEY", "mine")
    config = _config("http://127.0.0.1:9/v1", api_key_env="TEACHER_KEY")
    with connect(config, MODEL.tokenizer).client as client:
        assert isinstance(client, openai.OpenAI) and client.api_key == "mine"
