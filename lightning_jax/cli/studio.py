"""`lightning-jax studio`: serve a page that shows runs while they train."""

import argparse
import asyncio
import logging
import os
from pathlib import Path

from lightning_jax.cli.runtime import Port, number_of
from lightning_jax.engine.config import ServeConfig

log = logging.getLogger(__name__)

PORT = 8265
KEY = "LIGHTNING_STUDIO_KEY"


def add_studio(parser: argparse.ArgumentParser) -> None:
    runs = "run directories, or folders that hold some (default: runs)"
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="*", help=runs)
    port = "port to listen on, 0 for any free one (default: %(default)s)"
    parser.add_argument("--port", type=number_of(Port), default=PORT, help=port)
    host = "address to listen on; one that other machines can reach needs --key"
    parser.add_argument("--host", default=ServeConfig.host, help=f"{host} (default: %(default)s)")
    key = f"key that the page asks for (default: ${KEY}, or none)"
    parser.add_argument("--key", help=key)


def run_studio(arguments: argparse.Namespace) -> int:
    """Serve a page of runs: rewards, failures, groups, rollouts and their tokens, as they train.

    Runs are only read. Stop with Ctrl-C.
    """
    from lightning_jax.cli.runtime import cancel_at_stop
    from lightning_jax.studio.live.catalog import Catalog
    from lightning_jax.studio.live.server import serve_until_stopped

    catalog = Catalog(arguments.runs or [Path("runs")])
    key = arguments.key or os.environ.get(KEY) or None

    def announce(url: str) -> None:
        log.info("serving the page at %s; runs found: %d", url, len(catalog.runs()))

    async def until_stopped() -> None:
        with cancel_at_stop():
            await serve_until_stopped(catalog, arguments.host, arguments.port, key, announce)

    try:
        asyncio.run(until_stopped())
    except asyncio.CancelledError:
        log.info("stopped")
    return 0
