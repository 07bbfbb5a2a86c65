"""`lightning-jax studio`: serve a page that shows runs while they train."""

import argparse
import asyncio
import logging
import os
import secrets
from pathlib import Path

from lightning_jax.cli.runtime import Port, number_of

log = logging.getLogger(__name__)

PORT = 8265
KEY = "LIGHTNING_STUDIO_KEY"


def add_studio(parser: argparse.ArgumentParser) -> None:
    from lightning_jax.engine.config import ServeConfig

    runs = "run directories, or folders that hold some (default: runs)"
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="*", help=runs)
    port = "port to listen on, 0 for any free one (default: %(default)s)"
    parser.add_argument("--port", type=number_of(Port), default=PORT, help=port)
    host = "address to listen on (default: %(default)s)"
    parser.add_argument("--host", default=ServeConfig.host, help=host)
    keys = parser.add_mutually_exclusive_group()
    key = f"key that the page asks for (default: ${KEY}, or a random one in the printed URL)"
    keys.add_argument("--key", help=key)
    no_key = "ask for no key; every program of this machine can then read the runs"
    keys.add_argument("--no-key", action="store_true", help=no_key)


def run_studio(arguments: argparse.Namespace) -> int:
    """Serve a page of runs: rewards, failures, groups, rollouts and their tokens, as they train.

    Runs are only read. Stop with Ctrl-C.
    """
    from lightning_jax.cli.runtime import cancel_at_stop
    from lightning_jax.studio.live.catalog import Catalog
    from lightning_jax.studio.live.server import serve_until_stopped

    catalog = Catalog(arguments.runs or [Path("runs")])
    key = arguments.key or os.environ.get(KEY) or secrets.token_urlsafe(24)
    key = None if arguments.no_key else key

    def announce(url: str) -> None:
        log.info("runs found: %d; serving the page at %s", len(catalog.runs()), url)

    async def until_stopped() -> None:
        with cancel_at_stop():
            await serve_until_stopped(catalog, arguments.host, arguments.port, key, announce)

    try:
        asyncio.run(until_stopped())
    except asyncio.CancelledError:
        log.info("stopped")
    return 0
