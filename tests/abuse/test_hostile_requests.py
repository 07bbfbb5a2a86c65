"""One agent harms nobody: an honest rollout beside every hostile request goes on as if alone."""

import asyncio
import math
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest
from aiohttp import ClientResponse, ClientSession
from arena import SERVE, honest_rollout, open_attacker, open_rollout, resident_mib, slowdown
from hostile_requests import CASES, CHAT, STATUSES, Case, chat
from stalls import Stall, loop_stalls

from lightning_jax.testing.service import Service

# Limits that one of the tries must keep; a busy machine exceeds them, too.
PATIENCE_S = 1.0  # how much longer a call may wait beside an attack
MAX_STOP_S = 0.05  # of the event loop, divided by `slowdown`
TRIES = 3
MAX_GROWTH_MIB = 150  # of resident memory; what a call compiles is part of it
LONGEST_STOP_MS = "longest_stop_ms"  # tests/conftest.py prints the largest one


@pytest.fixture(scope="session")
def attackers() -> Iterator[Executor]:
    """A process of its own for the hostile clients."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(int).result()  # it has started
        yield pool


@pytest.mark.parametrize("attack", CASES.values(), ids=CASES)
async def test_honest_rollout_beside_it_is_unharmed(
    service: Service,
    attackers: Executor,
    attack: Case,
    record_property: Callable[[str, object], None],
) -> None:
    alone = await honest_rollout(service, "alone")
    before, longest_wait_s, longest_stop = resident_mib(), math.inf, Stall(math.inf)
    stop_s = math.inf
    for number in range(TRIES):
        attacker = open_attacker(service, f"hostile-{number}", number)
        attacking = asyncio.wrap_future(attackers.submit(attack, attacker))
        async with loop_stalls() as stalls:
            await asyncio.sleep(0.1)  # it is under way
            beside = await honest_rollout(service, f"honest-{number}")
            seen = await attacking
        service.gateway.close_rollout(f"hostile-{number}")
        statuses = seen if isinstance(seen, list) else [seen]
        assert beside.token_ids == alone.token_ids
        assert not [status for status in statuses if status >= 500]
        expected = STATUSES.get(attack.__name__)
        assert expected is None or statuses == [expected]
        longest_stop = min(longest_stop, stalls.longest, key=lambda stall: stall.seconds)
        stop_s = min(stop_s, stalls.longest.seconds / slowdown())
        longest_wait_s = min(longest_wait_s, beside.longest_wait_s)
        max_wait_s = alone.longest_wait_s + PATIENCE_S
        if longest_wait_s < max_wait_s and stop_s < MAX_STOP_S:
            break
    after = await honest_rollout(service, "after")
    assert after.token_ids == alone.token_ids
    record_property(LONGEST_STOP_MS, 1e3 * longest_stop.seconds)
    assert longest_wait_s < alone.longest_wait_s + PATIENCE_S
    assert stop_s < MAX_STOP_S, longest_stop
    assert resident_mib() < before + MAX_GROWTH_MIB


async def test_one_call_leaves_a_slot_to_others_with_its_key(service: Service) -> None:
    """Admissions in order: each neighbour starts before a second response of the large call."""
    url, headers = f"{service.gateway.local_url}{CHAT}", {"Authorization": "Bearer right-key"}
    large = chat(n=64, max_tokens=480, ignore_eos=True, logprobs=True, top_logprobs=20, stream=True)
    async with ClientSession(headers=headers) as client, client.post(url, json=large) as response:
        await _until_it_decodes(service, response, SERVE.slots - 1)
        started = [_num_started(service)]
        for seed in range(3):
            async with client.post(url, json=chat(seed=seed)) as answer:
                assert answer.status == 200
            started.append(_num_started(service))
    first = SERVE.slots - 1
    assert started == [first, first + 1, first + 2, first + 3]


async def test_calls_of_one_rollout_share_its_slots(service: Service) -> None:
    llm = open_rollout(service, "both", seed=1)
    url, headers = f"{llm.base_url}/chat/completions", {"Authorization": f"Bearer {llm.api_key}"}
    large = chat(n=64, max_tokens=200, ignore_eos=True, stream=True)
    async with ClientSession(headers=headers) as client, client.post(url, json=large) as response:
        await _until_it_decodes(service, response)
        async with client.post(url, json=chat()) as answer:
            assert answer.status == 200
        assert _num_started(service) < 64  # not behind all of the large call


async def _until_it_decodes(service: Service, response: ClientResponse, number: int = 1) -> None:
    while _num_started(service) < number:  # a stream opens before its first token
        await response.content.readany()


def _num_started(service: Service) -> int:
    """Return the number of responses that have had a slot."""
    return int(service.loop.stats()["serve/requests"])
