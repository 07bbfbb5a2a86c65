"""Server for a model without a run: every dialect, no run directory, no training."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import ExitStack

import jax

from lightning_jax.cli.commands.serve import ServerConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.http.server import check_address
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.lora import open_policy
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.precision import resolve_dtype
from lightning_jax.settings import ConfigError
from lightning_jax.system.memory import freeze_objects
from lightning_jax.system.process_state import handle_stop_signals
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.memory.cache_size import size_for_server

log = logging.getLogger(__name__)


def serve(config: ServerConfig, announce: Callable[[Gateway], None]) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish for up to `drain_s`.

    `announce` is called once requests are accepted. Before that, SIGINT raises KeyboardInterrupt. A
    second signal cancels running requests at once. Raises UserError if the model, the address or
    the record file is not available.
    """
    asyncio.run(check_address(config.serve))  # report a port in use before loading
    engine = _load(config)
    with ExitStack() as at_end:
        store = None
        if config.record:
            store = at_end.enter_context(contextlib.closing(Store(config.record)))
        runner = at_end.enter_context(asyncio.Runner())
        gateway = Gateway(engine, store, records=store is not None, any_model=config.any_model)
        # Last in, first out: running requests get an error from the engine, and time to send it.
        at_end.callback(lambda: runner.run(gateway.close()))
        at_end.callback(engine.close)
        at_end.enter_context(freeze_objects())
        engine.start()
        runner.run(gateway.start())
        log.info("the first answers wait for programs to compile, for seconds")
        runner.run(_until_stopped(engine, config.drain_s, lambda: announce(gateway)))


def _load(config: ServerConfig) -> Engine:
    """Return the engine. It has its own copy of the weights, and the loaded model is freed here."""
    named = resolve_dtype(config.model)
    if (number := len(jax.devices())) % config.tensor:
        raise ConfigError(
            f"tensor is {config.tensor}; expected a divisor of {number}, the number of devices "
            "here."
        )
    mesh = serving_mesh(None, MeshConfig(tensor=config.tensor))
    model = open_policy(named).load()
    settings = Config(
        model=named, serve=config.serve, mesh=MeshConfig(tensor=config.tensor), num_steps=0
    )
    serve = size_for_server(settings, model.config, config.serve, fits_slots=config.fits_slots)
    engine = Engine(model, serve, dtype=named.dtype, mesh=mesh)
    log.info(
        "slots: %d (--slots) of %d tokens (--max-len; the model has %d positions); prefix cache: "
        "%g MiB",
        *(serve.slots, serve.max_len, model.config.shape.max_positions, serve.prefix_cache_mib),
    )
    return engine


async def _until_stopped(engine: Engine, drain_s: float, on_start: Callable[[], None]) -> None:
    stop, event_loop = asyncio.Event(), asyncio.get_running_loop()
    with handle_stop_signals(lambda *_: event_loop.call_soon_threadsafe(stop.set)):
        on_start()  # only now, so that a signal right after it ends the server in good order
        await stop.wait()
        if not (open_requests := engine.num_open):
            return
        log.info(
            "shutting down: waiting up to %g s for %d requests (Ctrl-C again to stop now)",
            drain_s,
            open_requests,
        )
        stop.clear()
        drained, again = asyncio.create_task(engine.drain()), asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait(
            (drained, again), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (drained, again):
            task.cancel()
        if drained not in done:
            log.warning("%d requests were cancelled", engine.num_open)
