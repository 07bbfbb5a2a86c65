"""Shared parts of the gateway's tests: a running gateway and everything around it."""

import io
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai

from lightning_jax.engine.engine import Engine
from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.traces.store import Store
from lightning_jax.types import LLM

BODY: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
}
LONG: dict[str, Any] = BODY | {"max_tokens": 480, "logit_bias": {"258": -100}}  # never ends early
Connect = Callable[[LLM], openai.AsyncOpenAI]


@dataclass
class Bench:
    """Running gateway with its parts."""

    gateway: Gateway
    loop: Engine
    store: Store
    model: LoadedModel
    http: aiohttp.ClientSession

    def rollout(self, rollout_id: str = "r1", seed: int = 7, **settings: Any) -> LLM:
        return self.gateway.open_rollout(RolloutSettings(rollout_id, seed, **settings))

    async def post(
        self,
        body: Any,
        *,
        base: str | None = None,
        path: str = "/v1/chat/completions",
        key: str = "right-key",
        **headers: str,
    ) -> tuple[int, Any, Any]:
        """Return status, JSON body and headers of one raw request. `body` may be bytes.

        `base` is a rollout's URL, with or without /v1 (such as `LLM.base_url`). The default is the
        gateway's own URL.
        """
        auth = {"Authorization": f"Bearer {key}"} | headers
        url = (base or self.gateway.url).removesuffix("/v1") + path
        raw = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.http.post(url, headers=auth, data=raw) as response:
            return response.status, await response.json(), response.headers


MakeBench = Callable[..., AbstractAsyncContextManager[Bench]]
