"""Attackers that try everything at once for a long time, beside honest rollouts.

Left out of `make test`: python -m pytest -m slow tests/abuse/test_long_fuzz.py (FUZZ_MINUTES, 60).
"""

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from arena import SERVE, honest_rollout, open_rollout, resident_mib
from attacker import Attacker
from hostile_requests import CASES, CHAT, chat, required_tool

from lightning_jax.serve.engine import Engine
from lightning_jax.testing.service import Service, run_service
from lightning_jax.testing.stalls import loop_stalls
from lightning_jax.testing.tiny import tiny_model

MINUTES = float(os.environ.get("FUZZ_MINUTES", "60"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
ATTACKERS = 3
PATHS = (
    *(CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"),
    *("/v1beta/models/policy:generateContent", "/v1/traces", "/reward"),
)
WORDS = (
    *("type", "object", "array", "string", "integer", "properties", "items", "anyOf", "allOf"),
    *("oneOf", "not", "pattern", "enum", "const", "minimum", "maxLength", "required", "$ref"),
    *("messages", "tools", "n", "stop", "model", "input", "prompt", "role", "content", "user"),
)


def random_json(rng: random.Random, depth: int = 0) -> Any:
    """Return a JSON value of words that mean something to the server."""
    scalars: list[Any] = [None, True, -1, 0, 2**63, 1e308, "", "#", rng.choice(WORDS), "^(a|b)*c"]
    if depth > 5 or rng.random() < 0.4:
        return rng.choice(scalars)
    if rng.random() < 0.3:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {rng.choice(WORDS): random_json(rng, depth + 1) for _ in range(rng.randrange(6))}


def random_request(rng: random.Random, attacker: Attacker) -> list[int]:
    """Send one request that is nearly right, or a schema that nearly is one."""
    match rng.randrange(3):
        case 0:
            schema = {"type": "object", "properties": {"a": random_json(rng)}}
            return [attacker.post(CHAT, required_tool(schema))[0]]
        case 1:
            return [attacker.post(rng.choice(PATHS), random_json(rng))[0]]
        case _:
            body = chat(**{rng.choice([*chat(), *WORDS]): random_json(rng)})
            return [attacker.post(CHAT, body, **random_headers(rng))[0]]


def random_headers(rng: random.Random) -> dict[str, str]:
    """Return headers that the server reads, with values that it may not expect."""
    names = (
        *("x-stainless-retry-count", "x-stainless-read-timeout", "Idempotency-Key", "traceparent"),
        *("x-agent-name", "Content-Encoding", "Content-Type", "Authorization", "Expect", "Range"),
    )
    values = (
        "",
        "0",
        "-1",
        "9" * 40,
        "gzip",
        "nan",
        "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        "ü",
    )
    latin = {name: rng.choice(values) for name in rng.sample(names, rng.randrange(3))}
    return {name: value.encode().decode("latin-1") for name, value in latin.items()}


@pytest.mark.slow
async def test_server_outlives_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(0)
    engine = Engine(model.config, SERVE)
    async with run_service(tmp_path, model, engine, SERVE) as service:
        alone = await honest_rollout(service, "alone")
        before, until = resident_mib(), time.monotonic() + 60 * MINUTES
        statuses: Counter[int] = Counter()
        failed: list[Any] = []
        async with loop_stalls() as stalls:
            attacks = [
                asyncio.create_task(_attack(service, number, until, statuses, failed))
                for number in range(ATTACKERS)
            ]
            waits = []
            while time.monotonic() < until:
                beside = await honest_rollout(service, f"honest-{len(waits)}")
                assert beside.token_ids == alone.token_ids
                waits.append(beside.longest_wait_s)
                await asyncio.sleep(0.2)
            await asyncio.gather(*attacks)
        after = await honest_rollout(service, "after")
        grown = resident_mib() / before
    with capsys.disabled():
        print(  # noqa: T201 (the result)
            f"\n{sum(statuses.values())} hostile requests {dict(statuses)}; {len(waits)} honest "
            f"rollouts, longest wait {max(waits):.2f} s; longest stop of the loop "
            f"{1e3 * stalls.longest_s:.0f} ms at {stalls.longest.line}; memory x {grown:.2f}"
        )
    assert after.token_ids == alone.token_ids
    assert not failed, failed[:3]


async def _attack(
    service: Service, number: int, until: float, statuses: Counter[int], failed: list[Any]
) -> None:
    """Open one hostile rollout after another, each with a few attacks."""
    rng = random.Random(f"{SEED}-{number}")
    count = 0
    while time.monotonic() < until:
        count += 1
        rollout_id = f"hostile-{number}-{count}"
        attacker = Attacker(open_rollout(service, rollout_id, count), neighbour_id="honest-0")
        for _ in range(20):
            if rng.random() < 0.1:
                name = rng.choice(list(CASES))
                seen = await asyncio.to_thread(CASES[name], attacker)
            else:
                name = "random"
                seen = await asyncio.to_thread(random_request, rng, attacker)
            found = seen if isinstance(seen, list) else [seen]
            statuses.update(found)
            if any(status >= 500 for status in found):
                failed.append((rollout_id, name, found))
        with contextlib.suppress(ValueError):
            service.gateway.close_rollout(rollout_id)
