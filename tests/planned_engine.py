"""Engine for the tests that answers each prompt with a text that a function chooses."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from slow_engine import SlowEngine

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.generation import Generation, PromptTooLong
from lightning_jax.engine.response import Response, SampledToken
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer


class PlannedEngine(SlowEngine):
    """Engine without a model that writes `plan(prompt)`, then the end of the turn."""

    def __init__(
        self, plan: Callable[[str], str], tokenizer: Tokenizer, max_len: int = 100_000
    ) -> None:
        super().__init__()
        self.model_name, self.tokenizer, self.plan = "planned", tokenizer, plan
        self.serve = ServeConfig(api_key="right-key", max_len=max_len)

    def submit(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *others: Any, **named: Any
    ) -> Generation:
        if len(prompt_ids) >= self.serve.max_len:
            raise PromptTooLong(len(prompt_ids), self.serve.max_len)
        text = self.plan(self.tokenizer.decode(prompt_ids))
        ids = [*self.tokenizer.encode(text), *sorted(self.tokenizer.eos_ids)[:1]]
        response = Response(
            StreamDecoder(self.tokenizer), self.tokenizer.eos_ids, sampling, sampling.max_tokens
        )
        generation = Generation(self._cancel)
        self._tasks[generation] = asyncio.create_task(_write(ids, generation, response))
        return generation


async def _write(ids: Sequence[int], generation: Generation, response: Response) -> None:
    try:
        for token_id in ids:
            await asyncio.sleep(0)
            reason = response.push(SampledToken(token_id, -1.0, -1.0, -1.0, 0))
            generation.receive(response.chunk(), response.completion(reason) if reason else None)
            if reason:
                return
    except asyncio.CancelledError:
        generation.receive(None, response.completion("cancelled"))
