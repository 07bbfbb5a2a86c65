"""A program on the run's port cannot read the page: other attempts, answers and rewards."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.gateway.calls.remote import RemoteEngine
from lightning_jax.studio.live.server import page_of
from lightning_jax.traces.store import Store
from lightning_jax.train.directory import SETTINGS, STORE
from lightning_jax.train.loop.startup import add_page


@pytest.mark.parametrize("api_key", [None, "owner-key"])
async def test_rollout_does_not_open_the_page(
    tmp_path: Path, api_key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    Store(tmp_path / STORE).close()
    (tmp_path / SETTINGS).write_text("seed: 0\n")
    gateway = Gateway(RemoteEngine("policy", ServeConfig(api_key=api_key)), records=False)
    add_page(page_of, tmp_path, api_key, gateway)
    caplog.set_level("INFO")
    async with gateway, ClientSession() as client:
        llm = gateway.open_rollout(RolloutSettings("one", seed=0))
        page = f"{gateway.local_url}/studio/api/runs"
        for key in ("", llm.api_key, llm.calls_key, "x"):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            for query in ("", f"?key={key}"):
                async with client.get(page + query, headers=headers) as response:
                    assert response.status == 401
        (address,) = [word for word in caplog.text.split() if "/studio/" in word]
        key = urlsplit(address).fragment.removeprefix("key=") or api_key
        assert api_key is None or api_key not in caplog.text  # the owner's own is not printed
        async with client.get(page, headers={"Authorization": f"Bearer {key}"}) as response:
            assert response.status == 200
