"""Shared parts of the engine's tests: a running loop, and a full pass to compare with."""

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.pages import PageCopier, page_bytes
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.device.table import ENDLESS, End, SlotTable, unpack_sampled
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.sampling import Sampled
from lightning_jax.engine.types import Completion, SamplingParams
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.transformer import forward, unembed

GRAMMAR = 'start: "ab" /[a-z]{6,20}/ "z"'
SERVE = ServeConfig(slots=4, max_len=96, prefill_buckets=(8, 32), max_queue=8)


@dataclass
class Bench:
    """Running loop with its model and engine."""

    model: LoadedModel
    engine: SlotPrograms
    loop: EngineLoop

    def ids(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text)


class Slots:
    """Slots of an engine without its loop, with their state."""

    def __init__(self, engine: SlotPrograms, params: Any) -> None:
        self.engine, self.params = engine, params
        self.state, self.table = engine.init_state(), SlotTable(engine.num_slots)
        self.running: list[int] = []

    def fill(self, *fills: Fill) -> None:
        cache = self.engine.prefill(self.params, self.state.cache, fills)
        self.state = replace(self.state, cache=cache)

    def activate(
        self,
        slot: int,
        ids: list[int],
        sampling: SamplingParams,
        seed: int = 5,
        adapter: int | None = None,
        end: End = ENDLESS,
    ) -> None:
        """Let a slot decode whose row holds all of `ids` but the last one."""
        self.table.begin(slot, ids[-1], len(ids) - 1, sampling, seed, adapter, end)
        self.running = sorted({*self.running, slot})

    def begin(self, slot: int, ids: list[int], sampling: SamplingParams | None = None) -> None:
        self.fill(Fill(slot, 0, ids[:-1]))
        self.activate(slot, ids, sampling or greedy())

    def step(self, slots: list[int] | None = None, **options: Any) -> Sampled:
        """Decode one step of these slots, by default of all that have begun."""
        chosen = self.running if slots is None else slots
        self.state, packed = self.engine.generate(
            self.params, self.state, self.table, chosen, **options
        )
        return unpack_sampled(np.asarray(packed))

    def decode(self, slots: list[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Return these slots' tokens and behavior log-probabilities, [steps, slots]."""
        sampled = [self.step() for _ in range(steps)]
        return (
            np.array([one.tokens[slots] for one in sampled]),
            np.array([one.behavior_logprobs[slots] for one in sampled]),
        )


def greedy(max_tokens: int = 10, **settings) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **settings)


def with_pages(engine: SlotPrograms, num_pages: int) -> SlotPrograms:
    """Return the same compiled engine with another page pool."""
    other = copy.copy(engine)
    mib = num_pages * page_bytes(engine.config.shape, engine.dtype) / 2**20
    serve = replace(SERVE, prefix_cache_mib=mib)
    other.pages = PageCopier(engine.config.shape, serve, engine.dtype, engine._cache)
    assert other.pages.num_pages == num_pages
    return other


def full_logprobs(model: Any, ids: list[int]) -> np.ndarray:
    """Return log-probabilities [T, V] of the token after each one, from a pass without cache."""
    padded = np.pad(ids, (0, -len(ids) % 128))  # later tokens do not affect earlier ones
    return np.asarray(full_pass(model.params, model.config, padded))[: len(ids)]


@partial(jax.jit, static_argnums=1)
def full_pass(params: Any, config: Any, ids: Any) -> Any:
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, ids[None], positions)
    return jax.nn.log_softmax(unembed(params, config, hidden[0]), axis=-1)


def same(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
    assert one.text == other.text
    assert one.forced == other.forced
    np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, atol=1e-5)
    np.testing.assert_allclose(one.sampling_logprobs, other.sampling_logprobs, atol=1e-5)
    best, others = (
        [pair for token in result.top_logprobs for pair in token] for result in (one, other)
    )
    assert [token_id for token_id, _ in best] == [token_id for token_id, _ in others]
    np.testing.assert_allclose([p for _, p in best], [p for _, p in others], atol=1e-5)
