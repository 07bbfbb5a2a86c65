"""Fixtures: a tiny model, one engine compiled once, and loops over it that close after the test."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.pages import PageCopier, page_bytes
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.testing.tiny import tiny_model

SERVE = ServeConfig(slots=4, max_len=96, prefill_buckets=(8, 32), max_queue=8)


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return tiny_model(0)


@pytest.fixture(scope="session")
def other_params() -> Any:
    return tiny_model(1).params


@pytest.fixture(scope="session")
def engine(model: LoadedModel) -> SlotPrograms:
    return SlotPrograms(model.config, SERVE)


def with_pages(engine: SlotPrograms, num_pages: int) -> SlotPrograms:
    """Return the same compiled engine with another page pool."""
    other = copy.copy(engine)
    mib = num_pages * page_bytes(engine.config.shape, engine._dtype) / 2**20
    serve = replace(SERVE, prefix_cache_mib=mib)
    other.pages = PageCopier(engine.config.shape, serve, engine._dtype, engine._cache)
    assert other.pages.num_pages == num_pages
    return other


@dataclass
class Bench:
    """Running loop with its model and engine."""

    model: LoadedModel
    engine: SlotPrograms
    loop: EngineLoop

    def ids(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text)


@pytest.fixture
def bench(model: LoadedModel, engine: SlotPrograms) -> Iterator[Bench]:
    loop = EngineLoop(engine, model.params, 0, model.tokenizer, SERVE)
    loop.start()
    yield Bench(model, engine, loop)
    loop.close()


@pytest.fixture
def jetstream_loop(model: LoadedModel, engine: SlotPrograms) -> Iterator[Any]:
    pytest.importorskip("jetstream")
    from lightning_jax.engine.jetstream.loop import JetStreamLoop

    loop = JetStreamLoop(engine, model.params, 0, model.tokenizer, SERVE)
    loop.start()
    yield loop
    loop.close()
