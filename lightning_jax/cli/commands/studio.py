"""`lightning-jax studio`: serve a page that shows runs while they train."""

import asyncio
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lightning_jax.cli.command import Command, Port, UsageError, argument, flag
from lightning_jax.cli.runtime import run_until_stopped
from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import UserError

if TYPE_CHECKING:
    from aiohttp import web

    from lightning_jax.studio.live.server import LiveServer

log = logging.getLogger(__name__)

PORT = 8265
KEY = "LIGHTNING_STUDIO_KEY"


@dataclass(frozen=True, kw_only=True)
class Studio(Command):
    """Serve a page of runs: rewards, failures, groups, rollouts and their tokens, as they train.

    Runs are only read. Stop with Ctrl-C.
    """

    needs_jax: ClassVar[bool] = False
    runs: list[Path] = argument(
        "RUNS", "run directories, or folders that hold some (default: runs)", default_factory=list
    )
    port: Port = flag("port to listen on, 0 for any free one (default: %(default)s)", default=PORT)
    host: str = flag("address to listen on (default: %(default)s)", default=ServeConfig.host)
    key: str | None = flag(
        f"key that the page asks for (default: ${KEY}, or a random one in the printed URL)"
    )
    no_key: bool = flag(
        "ask for no key; every program of this machine can then read the runs", default=False
    )

    def run(self) -> int:
        from lightning_jax.gateway.http.server import local_url
        from lightning_jax.studio.live.catalog import Catalog
        from lightning_jax.studio.live.server import LiveServer

        if self.key is not None and self.no_key:
            raise UsageError.conflict("--key", "--key and --no-key are both set; drop one of them.")
        catalog = Catalog(self.runs or [Path("runs")])
        key = self.key or os.environ.get(KEY) or secrets.token_urlsafe(24)
        key = None if self.no_key else key

        async def serve() -> None:
            runner = await serve_live(LiveServer(catalog, key), self.host, self.port, key)
            try:
                url = local_url(runner.addresses[0]) + (f"/#key={key}" if key else "/")
                log.info("runs found: %d; serving the page at %s", len(catalog.runs()), url)
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()

        try:
            run_until_stopped(serve())
        except asyncio.CancelledError:
            log.info("stopped")
        return 0


async def serve_live(
    server: "LiveServer", host: str, port: int, key: str | None
) -> "web.AppRunner":
    """Start to serve. Raises UserError if others can reach the host and there is no key.

    Raises GatewayError if the address is not available.
    """
    from lightning_jax.gateway.http.server import is_exposed, listen

    if not key and is_exposed(host):
        raise UserError.missing(
            "--key",
            f"--host is {host!r}, which other machines can reach, and --no-key is set; leave out "
            "--no-key, or leave --host at 127.0.0.1.",
        )
    return await listen(server.application(), ServeConfig(host=host, port=port, api_key=key))
