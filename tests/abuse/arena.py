"""Rollouts on a server for the tests of hostile requests, and the memory that they take."""

import asyncio
import ctypes
import gc
import json
import sys
import time

import psutil
from attacker import Attacker
from honest import Conversation, converse

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.gateway.app import RolloutSettings
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.testing.service import Service
from lightning_jax.types import LLM, Rollout

SERVE = ServeConfig(slots=8, max_len=512, prefill_buckets=(32, 128), api_key="right-key")
SEED = 11
REFERENCE_S = 0.004  # duration on that core of the work in `slowdown`


def warm_engine(model: LoadedModel) -> SlotPrograms:
    """Make an engine with all its programs compiled, so that no request waits for one."""
    engine = SlotPrograms(model.config, SERVE)
    EngineLoop(engine, model.params, 0, model.tokenizer, SERVE).warmup()
    return engine


def open_attacker(service: Service, rollout_id: str, seed: int) -> Attacker:
    """Open a rollout for an attacker."""
    llm = open_rollout(service, rollout_id, seed)
    return Attacker(llm.base_url, llm.api_key, neighbour_id="honest")


def open_rollout(service: Service, rollout_id: str, seed: int) -> LLM:
    """Open a rollout that is on record, as the runner does."""
    rollout = Rollout(rollout_id, "t", "g", "train", 0, index=0, attempt=1, status="queued")
    service.store.add_rollout(rollout)
    return service.gateway.open_rollout(RolloutSettings(rollout_id, seed, max_tokens=400))


async def honest_rollout(service: Service, rollout_id: str) -> Conversation:
    """Run an honest agent in a rollout of its own."""
    llm = open_rollout(service, rollout_id, SEED)
    try:
        return await asyncio.to_thread(converse, llm)
    finally:
        service.gateway.close_rollout(rollout_id)


def slowdown() -> float:
    """Return how many times longer Python takes now than on an idle AMD EPYC core; at least 1."""
    rows = [{"id": n, "text": "word " * 8, "values": [n * 0.5] * 8} for n in range(600)]
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        json.loads(json.dumps(rows))
        sum(n * n for n in range(20_000))
        seconds.append(time.thread_time() - start)
    return max(1.0, min(seconds) / REFERENCE_S)


def resident_mib() -> float:
    """Return this process's resident memory, without what the C library keeps for later."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20
