"""A gateway over a real engine with a tiny model, on a port of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.config import ServeConfig
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.routing import Routing
from lightning_jax.models.load import LoadedModel
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.serve.engine import Engine
from lightning_jax.serve.loop import EngineLoop
from lightning_jax.store import Store


@dataclass(frozen=True)
class Service:
    """What answers calls, and what it is made of."""

    gateway: Gateway
    loop: EngineLoop
    store: Store
    model: LoadedModel


@asynccontextmanager
async def run_service(
    folder: Path,
    model: LoadedModel,
    engine: Engine,
    serve: ServeConfig,
    *,
    version: int = 0,
    tokenizer: Tokenizer | None = None,
    routing: Routing | None = None,
    initial: LoadedModel | None = None,
) -> AsyncIterator[Service]:
    """Starts it, and ends it afterwards; its store is a file in `folder`.

    One engine may serve many services, and `initial` beside the model: it holds compiled programs
    and no state.
    """
    words = tokenizer or model.tokenizer
    loop = EngineLoop(engine, model.params, version, words, serve)
    frozen = EngineLoop(engine, initial.params, 0, words, serve) if initial else None
    store = Store(folder / "store.sqlite")
    gateway = Gateway(
        loop, words, store, model_name=model.name, serve=serve, routing=routing, initial=frozen
    )
    loops = [loop, frozen] if frozen else [loop]
    for each in loops:
        each.start()
    try:
        await gateway.start()
        yield Service(gateway, loop, store, model)
    finally:
        await gateway.close()
        for each in loops:
            each.close()
        store.close()
