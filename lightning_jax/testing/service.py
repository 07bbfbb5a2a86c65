"""Gateway on its own port, over a real engine with a tiny model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.routing import Routing
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.traces.store import Store


@dataclass(frozen=True)
class Service:
    """Gateway that answers calls, with its parts."""

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
    """Run a service until the block ends. Its store is a file in `folder`.

    Several services, and `initial` next to the model, may share one engine, because it holds
    compiled programs and no state.
    """
    words = tokenizer or model.tokenizer
    loop = EngineLoop(engine, model.params, version, words, serve)
    frozen = EngineLoop(engine, initial.params, 0, words, serve) if initial else None
    store = Store(folder / "store.sqlite")
    gateway = Gateway(
        loop, words, store, model_name=model.name, serve=serve, routing=routing, initial=frozen
    )
    loops = [loop, frozen] if frozen else [loop]
    for engine_loop in loops:
        engine_loop.start()
    try:
        await gateway.start()
        yield Service(gateway, loop, store, model)
    finally:
        await gateway.close()
        for engine_loop in loops:
            engine_loop.close()
        store.close()
