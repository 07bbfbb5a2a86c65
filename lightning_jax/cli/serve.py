"""Server for a model without a run: every dialect, no run directory, no training."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import jax

from lightning_jax.cli.config import ServerConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.replicas import ReplicatedLoop, replicate, split_by_data
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.http import check_address
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.formats.load import load_model
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.models.sharding import serving_mesh
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.settings import ConfigError
from lightning_jax.traces.store import Store
from lightning_jax.train.runtime import freeze_objects

log = logging.getLogger(__name__)


def serve(config: ServerConfig, announce: Callable[[Gateway], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish for up to `drain_s`.

    `announce` is called once requests are answered. Before that, SIGINT raises KeyboardInterrupt. A
    second signal cancels running requests at once. Raises UserError if the model, the address or
    the record file is not available.
    """
    asyncio.run(check_address(config.serve))  # report a port in use before minutes of compiling
    loop, tokenizer = _load(config)
    with ExitStack() as at_end:
        store = None
        if config.record:
            store = at_end.enter_context(contextlib.closing(Store(config.record)))
        runner = at_end.enter_context(asyncio.Runner())
        name = config.model.name
        gateway = Gateway(loop, tokenizer, store, model_name=name, serve=config.serve)
        # Last in, first out: running requests get an error from the engine, and time to send it.
        at_end.callback(lambda: runner.run(gateway.close()))
        at_end.callback(loop.close)
        _compile(loop)
        at_end.enter_context(freeze_objects())
        loop.start()
        # Only now, because an earlier client would wait for minutes without an answer.
        runner.run(gateway.start())
        announce(gateway)
        runner.run(_until_stopped(loop, config.drain_s))


def _load(config: ServerConfig) -> tuple[EngineLoop | ReplicatedLoop, Tokenizer]:
    """Return the engine loop and the tokenizer.

    The engine has its own copy of the weights, and the loaded model is freed here.
    """
    named, serve = resolve_dtype(config.model), config.serve
    if (number := len(jax.devices())) % config.tensor:
        raise ConfigError(
            f"tensor is {config.tensor}; expected a divisor of {number}, the number of devices "
            "here."
        )
    mesh = serving_mesh(None, MeshConfig(tensor=config.tensor))
    model = load_model(named.name, named.dtype, named.activation_dtype)

    def make_loop(engine: Engine) -> EngineLoop:
        return EngineLoop(engine, model.params, 0, model.tokenizer, serve)

    engines = [
        Engine(model.config, serve, dtype=named.dtype, mesh=part) for part in split_by_data(mesh)
    ]
    return replicate(make_loop, engines, serve.slots), model.tokenizer


def _compile(loop: EngineLoop | ReplicatedLoop) -> None:
    log.info("compiling: takes minutes at the first start of a model on a machine, less afterwards")
    started = time.monotonic()
    loop.warmup()
    log.info("compiled in %.0f s", time.monotonic() - started)


async def _until_stopped(loop: EngineLoop | ReplicatedLoop, drain_s: float) -> None:
    with _signals() as stop:
        await stop.wait()
        if not (open_requests := loop.num_open):
            return
        log.info(
            "shutting down: waiting up to %g s for %d requests (Ctrl-C again to stop now)",
            drain_s,
            open_requests,
        )
        stop.clear()
        drained, again = asyncio.create_task(loop.drain()), asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait(
            (drained, again), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (drained, again):
            task.cancel()
        if drained not in done:
            log.warning("%d requests were cancelled", loop.num_open)


@contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGINT and SIGTERM set, instead of their usual effect."""
    event, event_loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        event_loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in numbers:
            event_loop.remove_signal_handler(number)
