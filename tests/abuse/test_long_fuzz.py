"""Attackers that try everything at once for a long time, beside honest rollouts.

Left out of `make test`: python -m pytest -m slow tests/abuse/test_long_fuzz.py (FUZZ_MINUTES, 60).
"""

import asyncio
import contextlib
import multiprocessing
import os
import random
import time
from collections import Counter
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from arena import SERVE, honest_rollout, open_attacker, resident_mib, warm_engine
from hostile_requests import CASES, random_request
from stalls import LoopStalls, Stall, loop_stalls

from lightning_jax.testing.service import Service, run_service
from lightning_jax.testing.tiny import tiny_model

MINUTES = float(os.environ.get("FUZZ_MINUTES", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
ATTACKERS = 3


@pytest.mark.slow
async def test_server_outlives_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(0)
    engine = warm_engine(model)
    fuzz = Fuzz()
    with ProcessPoolExecutor(ATTACKERS, multiprocessing.get_context("spawn")) as pool:
        async with run_service(tmp_path, model, engine, SERVE) as service:
            await _outlive(service, pool, fuzz)
    with capsys.disabled():
        print(f"\n{fuzz}")  # noqa: T201 (the result)
    assert not fuzz.failed
    # Caches, such as the prefix cache, are full by half of the time. Nothing grows after that.
    assert fuzz.resident_mib[-1] < 1.1 * fuzz.resident_mib[len(fuzz.resident_mib) // 2]


@dataclass
class Fuzz:
    """Counts and measurements of one run."""

    statuses: Counter[int] = field(default_factory=Counter)  # of hostile requests; 0: hung up
    failed: list[Any] = field(default_factory=list)  # hostile requests with a 5xx
    waits_s: list[float] = field(default_factory=list)  # the longest of each honest rollout
    resident_mib: list[int] = field(default_factory=list)  # in the first minute, then each tenth
    longest_stop: Stall = field(default_factory=lambda: Stall(0.0))

    def note_stop(self, stalls: LoopStalls) -> None:
        """Keep the longest stop of the event loop."""
        self.longest_stop = max(self.longest_stop, stalls.longest, key=lambda stall: stall.seconds)

    def __str__(self) -> str:
        waits = sorted(self.waits_s)
        return (
            f"{self.statuses.total()} hostile requests {dict(self.statuses)}, failed "
            f"{self.failed[:3]}; {len(waits)} honest rollouts, waits median "
            f"{waits[len(waits) // 2]:.2f} s, longest {waits[-1]:.2f} s; longest stop of the loop "
            f"{1e3 * self.longest_stop.seconds:.0f} ms at {self.longest_stop.line}; "
            f"resident MiB {self.resident_mib}"
        )


async def _outlive(service: Service, pool: Executor, fuzz: Fuzz) -> None:
    """Run the attackers, and honest rollouts one after another beside them."""
    alone = await honest_rollout(service, "alone")
    started, seconds = time.monotonic(), 60 * MINUTES
    async with loop_stalls() as stalls:
        attacks = [
            asyncio.create_task(_attack(service, pool, number, started + seconds, fuzz))
            for number in range(ATTACKERS)
        ]
        while (passed := time.monotonic() - started) < seconds:
            beside = await honest_rollout(service, f"honest-{len(fuzz.waits_s)}")
            assert beside.token_ids == alone.token_ids
            fuzz.waits_s.append(beside.longest_wait_s)
            if passed > len(fuzz.resident_mib) * seconds / 10 + min(60, seconds / 20):
                fuzz.note_stop(stalls)
                fuzz.resident_mib.append(round(resident_mib()))  # stops the loop itself
                await asyncio.sleep(0.1)
                stalls.reset()
            await asyncio.sleep(0.2)
        await asyncio.gather(*attacks)
        fuzz.note_stop(stalls)
    after = await honest_rollout(service, "after")
    assert after.token_ids == alone.token_ids
    fuzz.resident_mib.append(round(resident_mib()))


async def _attack(service: Service, pool: Executor, number: int, until: float, fuzz: Fuzz) -> None:
    """Open one hostile rollout after another, each with a few attacks."""
    rng = random.Random(f"{SEED}-{number}")
    count = 0
    while time.monotonic() < until:
        count += 1
        rollout_id = f"hostile-{number}-{count}"
        attacker = open_attacker(service, rollout_id, count)
        for _ in range(20):
            if rng.random() < 0.1:
                name = rng.choice(list(CASES))
                running = pool.submit(CASES[name], attacker)
            else:
                name = f"random {rng.random()}"
                running = pool.submit(random_request, name, attacker)
            seen = await asyncio.wrap_future(running)
            found = seen if isinstance(seen, list) else [seen]
            fuzz.statuses.update(found)
            if any(status >= 500 for status in found):
                fuzz.failed.append((rollout_id, name, found))
        with contextlib.suppress(ValueError):
            service.gateway.close_rollout(rollout_id)
