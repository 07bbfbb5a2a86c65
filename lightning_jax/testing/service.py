"""Gateway on its own port, over a real engine with a tiny model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.policies import INITIAL
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.traces.store import Store


@dataclass(frozen=True)
class Service:
    """Gateway that answers calls, with its parts."""

    gateway: Gateway
    loop: Engine
    store: Store
    model: LoadedModel


@asynccontextmanager
async def run_service(
    folder: Path,
    model: LoadedModel,
    programs: SlotPrograms,
    serve: ServeConfig,
    *,
    version: int = 0,
    tokenizer: Tokenizer | None = None,
    routing: Routing | None = None,
    initial: LoadedModel | None = None,
) -> AsyncIterator[Service]:
    """Run a service until the block ends. Its store is a file in `folder`.

    Several services, and `initial` next to the model, may share `programs`.
    """
    model = replace(model, tokenizer=tokenizer or model.tokenizer)
    engine = Engine(model, serve, version=version, programs=[programs])
    if initial:
        engine.add(Engine(initial, serve, programs=[programs]), are_counted=False)
        routing = routing or Routing()
        routing = replace(routing, policies=routing.policies.with_fixed(INITIAL))
    store = Store(folder / "store.sqlite")
    gateway = Gateway(engine, store, routing=routing)
    engine.start()
    try:
        await gateway.start()
        yield Service(gateway, engine, store, model)
    finally:
        await gateway.close()
        engine.close()
        store.close()
