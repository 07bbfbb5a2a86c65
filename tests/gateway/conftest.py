"""Gateway over a real engine with a tiny model, compiled once for all tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from gateway_bench import Bench, Connect, MakeBench

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.slots import SlotPrograms
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.testing.service import run_service
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces.roles import Roles
from lightning_jax.types import LLM

SERVE = ServeConfig(slots=4, max_len=512, prefill_buckets=(32, 128), api_key="right-key")


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return tiny_model(0)


@pytest.fixture(scope="session")
def engine(model: LoadedModel) -> SlotPrograms:
    return SlotPrograms(model.config, SERVE)


@pytest.fixture
def make_bench(model: LoadedModel, engine: SlotPrograms, tmp_path: Path) -> MakeBench:
    """Return a function that starts a gateway.

    Its arguments change the ServeConfig, the tokenizer, the roles or the initial model.
    """

    @asynccontextmanager
    async def make(
        tokenizer: Tokenizer | None = None,
        roles: Roles | None = None,
        initial: LoadedModel | None = None,
        **changes: Any,
    ) -> AsyncIterator[Bench]:
        serve = replace(SERVE, **changes)
        arguments = (tmp_path, model, engine, serve)
        others = {"tokenizer": tokenizer, "routing": Routing(roles or {}), "initial": initial}
        async with (
            run_service(*arguments, version=3, **others) as service,
            aiohttp.ClientSession() as http,
        ):
            yield Bench(service.gateway, service.loop, service.store, model, http)

    return make


@pytest.fixture
async def bench(make_bench: MakeBench) -> AsyncIterator[Bench]:
    async with make_bench() as bench:
        yield bench


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Yield a function that makes official clients, as an agent would. Close them at the end."""
    async with AsyncExitStack() as stack:

        def make(llm: LLM) -> openai.AsyncOpenAI:
            client = openai.AsyncOpenAI(
                base_url=llm.base_url, api_key=llm.api_key, max_retries=0, timeout=30.0
            )
            stack.push_async_callback(client.close)
            return client

        yield make
