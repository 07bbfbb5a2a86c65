"""A model with all its programs, and garbage collection as in a run.

A collection blocks the event loop too.
"""

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from arena import SERVE, warm_engine
from gateway_bench import Bench

from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.system.memory import freeze_objects
from lightning_jax.testing.service import Service, run_service
from lightning_jax.testing.tiny import tiny_model


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return tiny_model(0)


@pytest.fixture(scope="session")
def engine(model: LoadedModel) -> SlotPrograms:
    return warm_engine(model)


@pytest.fixture
async def service(
    model: LoadedModel, engine: SlotPrograms, tmp_path: Path
) -> AsyncIterator[Service]:
    async with run_service(tmp_path, model, engine, SERVE) as service:
        yield service


@pytest.fixture
async def bench(service: Service, model: LoadedModel) -> AsyncIterator[Bench]:
    async with aiohttp.ClientSession() as http:
        yield Bench(service.gateway, service.loop, service.store, model, http)


@pytest.fixture(autouse=True, scope="module")
def frozen_as_in_a_run() -> Iterator[None]:
    """Collect garbage as a run does.

    tests/conftest.py makes collections so rare that each blocks the event loop for 15 to 30 ms.
    """
    gc.unfreeze()
    with freeze_objects():
        yield
    gc.freeze()
