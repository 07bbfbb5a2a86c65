"""Fixtures: a tiny model, one engine compiled once, and loops over it that close after the test."""

from collections.abc import Iterator
from typing import Any

import pytest
from engine_bench import SERVE, Bench

from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.testing.tiny import tiny_model


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return tiny_model(0)


@pytest.fixture(scope="session")
def other_params() -> Any:
    return tiny_model(1).params


@pytest.fixture(scope="session")
def engine(model: LoadedModel) -> SlotPrograms:
    return SlotPrograms(model.config, SERVE)


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
