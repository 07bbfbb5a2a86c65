"""Stand-in for an engine, to measure what is around it: answers are ready-made tokens."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.generation import Generation
from lightning_jax.engine.response import Chunk, TimeLimit
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.tokenizer import Tokenizer


class StandInEngine:
    """Engine whose subclasses say how a generation gets its tokens."""

    status = "ok"
    version = 0

    def __init__(self, model_name: str, tokenizer: Tokenizer, num_slots: int) -> None:
        self.model_name, self.tokenizer, self.num_slots = model_name, tokenizer, num_slots
        self.serve = ServeConfig(api_key="bench")

    async def prepare(self, grammar: str, owner: str = "") -> None:
        """Accept every grammar."""

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        adapter: int | None = None,
        tenant: str | None = None,
        time_limit: TimeLimit | None = None,
        call: str | None = None,
    ) -> Generation:
        """Return a generation that `answer` completes."""
        generation = Generation(lambda _: None)
        self.answer(generation, sampling)
        return generation

    def stats(self) -> dict[str, float]:
        """Return no counters."""
        return {}

    def answer(self, generation: Generation, sampling: SamplingParams) -> None:
        """Begin to answer, at the earliest in the next turn of the event loop."""
        raise NotImplementedError


def ready_made(tokenizer: Tokenizer, words: str, logprob: float = 0.0) -> list[Chunk]:
    """Return a chunk for each token of the words."""
    blank = Chunk("", (0,), (logprob,), (logprob,), (0,), (False,), ((),))
    return [
        replace(blank, text=tokenizer.decode([token]), token_ids=(token,))
        for token in tokenizer.encode(words)
    ]
