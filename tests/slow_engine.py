"""Engine for the tests whose tokens come slowly, or not before it has a free slot."""

import asyncio
from collections.abc import Sequence
from typing import Any

from lightning_jax.engine.admission import LoopStatus
from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.engine import Engine
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.response import Response, SampledToken, TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.policies import ALL, Policy
from lightning_jax.models.tokenizer import StreamDecoder
from lightning_jax.testing.tiny import tiny_tokenizer


class SlowEngine(Engine):
    """Engine without a model, with `slots` and a token each `step_s`, all of them an "a".

    While `stands_still`, no response gets a token.
    """

    def __init__(self) -> None:
        self.model_name, self.tokenizer = "slow", tiny_tokenizer()
        self.serve = ServeConfig(api_key="right-key")
        self.slots, self.step_s = asyncio.Semaphore(4), 0.02
        self.stands_still = asyncio.Event()
        self.requests: list[SamplingParams] = []
        self._tasks: dict[Generation, asyncio.Task[None]] = {}

    @property
    def version(self) -> int:
        return 0

    @property
    def status(self) -> LoopStatus:
        return "ok"

    @property
    def num_slots(self) -> int:
        return 4

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Accept every grammar."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        policy: Policy = ALL,
        tenant: str | None = None,
        time_limit: TimeLimit | None = None,
        call: str | None = None,
    ) -> Generation:
        self.requests.append(sampling)
        decoder, eos_ids = StreamDecoder(self.tokenizer), self.tokenizer.eos_ids
        response = Response(decoder, eos_ids, sampling, sampling.max_tokens, time_limit)
        generation = Generation(self._cancel)
        self._tasks[generation] = asyncio.create_task(self._decode(generation, response))
        return generation

    def stats(self) -> dict[str, float]:
        return {}

    def _cancel(self, generation: Generation) -> None:
        self._tasks[generation].cancel()

    async def _decode(self, generation: Generation, response: Response) -> None:
        token: Any = SampledToken(self.tokenizer.encode("a")[0], -1.0, -2.0, -1.5, 3)
        reason = None
        try:
            async with self.slots:
                while reason is None:
                    await asyncio.sleep(self.step_s)
                    while self.stands_still.is_set():
                        await asyncio.sleep(0.01)
                    reason = response.push(token)
                    outcome = response.completion(reason) if reason else None
                    generation.receive(response.chunk(), outcome)
        except asyncio.CancelledError:
            generation.receive(None, response.completion("cancelled"))
