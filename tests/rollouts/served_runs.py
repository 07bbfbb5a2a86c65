"""Runners over one tiny model, which tests of rollouts share."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import toy_agent

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.rollouts.agents.functions import load_agent
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.rollouts.runner import Runner
from lightning_jax.testing.service import run_service
from lightning_jax.testing.tiny import tiny_model

TOY = Path(toy_agent.__file__)
TASKS = [{"id": f"t{i}", "question": f"{i}?"} for i in range(3)]
SERVE = ServeConfig(slots=4, max_len=128, prefill_buckets=(16, 64))


@functools.cache  # built and compiled once for all tests
def model_and_engine() -> tuple[LoadedModel, SlotPrograms]:
    model = tiny_model()
    return model, SlotPrograms(model.config, SERVE)


@asynccontextmanager
async def open_runner(path: Path, function: str, **settings: object) -> AsyncIterator[Runner]:
    """Yield a runner of a function of the toy agent."""
    config = RolloutConfig(**{"retry_delay_s": 0.0} | settings)  # type: ignore[arg-type]
    agent = load_agent(f"{TOY}:{function}")
    async with run_service(path, *model_and_engine(), SERVE) as service:
        yield Runner(agent, service.gateway, config, seed=0)
