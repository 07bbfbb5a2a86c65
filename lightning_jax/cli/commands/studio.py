"""`lightning-jax studio`: serve a page that shows runs while they train."""

import asyncio
import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightning_jax.cli.command import Command, Port, UsageError, argument, flag
from lightning_jax.cli.runtime import cancel_at_stop
from lightning_jax.engine.config import ServeConfig

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
        from lightning_jax.studio.live.catalog import Catalog
        from lightning_jax.studio.live.server import serve_until_stopped

        if self.key is not None and self.no_key:
            raise UsageError(
                "--key and --no-key are both set; drop one of them.", reason="conflict", key="--key"
            )
        catalog = Catalog(self.runs or [Path("runs")])
        key = self.key or os.environ.get(KEY) or secrets.token_urlsafe(24)
        key = None if self.no_key else key

        def announce(url: str) -> None:
            log.info("runs found: %d; serving the page at %s", len(catalog.runs()), url)

        async def until_stopped() -> None:
            with cancel_at_stop():
                await serve_until_stopped(catalog, self.host, self.port, key, announce)

        try:
            asyncio.run(until_stopped())
        except asyncio.CancelledError:
            log.info("stopped")
        return 0
