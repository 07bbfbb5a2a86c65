"""A live page over the runs of a folder, for tests."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

from lightning_jax.gateway.sessions.open_rollouts import ReadActivity
from lightning_jax.studio.live.catalog import Catalog
from lightning_jax.studio.live.server import LiveServer
from lightning_jax.studio.live.watch import Watch


class Live:
    """Client of a live server over the runs of a folder."""

    def __init__(
        self, folder: Path, key: str | None = None, activity: ReadActivity | None = None
    ) -> None:
        self.catalog = Catalog([folder])
        self.server = LiveServer(self.catalog, key, activity)
        self.server.watch = Watch(self.catalog, self.server.lane, poll_s=0.02)
        self.server.answers.max_age_s = 0.0
        self.client: TestClient = TestClient(TestServer(self.server.application()))

    @property
    def run(self) -> str:
        (run,) = self.catalog.runs()
        return f"/api/runs/{run.key}"

    async def get(self, path: str, status: int = 200, **query: Any) -> Any:
        """Return the JSON of a path below `run`, or of one that starts with /api."""
        path = path if path.startswith("/api") else self.run + path
        async with self.client.get(path, params=query) as response:
            assert response.status == status, await response.text()
            return await response.json()


@contextlib.asynccontextmanager
async def live(
    folder: Path, key: str | None = None, activity: ReadActivity | None = None
) -> AsyncIterator[Live]:
    found = Live(folder, key, activity)
    async with found.client:
        yield found
