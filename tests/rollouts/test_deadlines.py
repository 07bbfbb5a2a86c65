"""Tests of the clock of rollouts: what counts, what does not, and a server that is gone."""

import asyncio
import time

import pytest

from lightning_jax.gateway.sessions.waits import Lost
from lightning_jax.rollouts import deadlines
from lightning_jax.rollouts.deadlines import DeadlineClock
from lightning_jax.system.clock import PausableClock


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "TICK_S", 0.05)


def _agent(seconds: float) -> asyncio.Task[None]:
    return asyncio.create_task(asyncio.sleep(seconds))


async def _nothing() -> Lost:
    return Lost()


async def _wait(
    clock: DeadlineClock, agent: asyncio.Task[None], timeout_s: float
) -> tuple[bool, float, float]:
    """Return (True if in time, seconds of stalls, seconds waited)."""
    started = time.monotonic()
    in_time, stalled_s = await clock.wait(agent, timeout_s, lambda: False, _nothing)
    waited_s = time.monotonic() - started
    agent.cancel()
    return in_time, stalled_s, waited_s


async def test_agents_in_time_and_too_late() -> None:
    clock = DeadlineClock(PausableClock())
    early, late = await asyncio.gather(
        _wait(clock, _agent(0.1), 10.0), _wait(clock, _agent(10.0), 0.3)
    )
    assert early[0] and early[2] < 5.0
    assert not late[0] and 0.3 <= late[2] < 5.0


async def test_stall_does_not_count() -> None:
    clock = DeadlineClock(PausableClock())
    waiting = asyncio.create_task(_wait(clock, _agent(10.0), 0.4))
    await asyncio.sleep(0.1)
    time.sleep(1.0)
    in_time, stalled_s, waited_s = await waiting
    assert not in_time and waited_s >= 1.3
    assert stalled_s >= 0.9
    # A rollout that begins after the stall knows nothing of it.
    assert (await _wait(clock, _agent(0.0), 1.0))[1] < 0.9


async def test_agent_that_ends_during_a_stall_is_in_time() -> None:
    clock = DeadlineClock(PausableClock())
    waiting = asyncio.create_task(_wait(clock, _agent(0.2), 0.3))
    await asyncio.sleep(0.1)
    time.sleep(1.0)
    assert (await waiting)[0]


async def test_pause_does_not_count() -> None:
    pauses = PausableClock()
    clock = DeadlineClock(pauses)
    waiting = asyncio.create_task(_wait(clock, _agent(10.0), 0.3))
    await asyncio.sleep(0.1)
    with pauses.paused():
        await asyncio.sleep(0.5)
        with pauses.paused():
            await asyncio.sleep(0.5)
        assert not waiting.done()
    in_time, _, waited_s = await waiting
    assert not in_time and waited_s >= 1.3 - 0.05
    assert pauses.total_s >= 1.0


async def test_waits_for_the_server_do_not_count() -> None:
    started, asked = time.monotonic(), 0

    async def lost() -> Lost:  # the first half second
        nonlocal asked
        asked += 1
        return Lost(min(time.monotonic() - started, 0.5), 0.0)

    agent = _agent(10.0)
    in_time, _ = await DeadlineClock(PausableClock()).wait(agent, 0.3, lambda: False, lost)
    assert not in_time
    assert time.monotonic() - started >= 0.8 - 0.05
    assert asked <= 4  # another process may answer it
    agent.cancel()


async def test_starved_agent_ends_though_its_time_is_not_over() -> None:
    started, agent = time.monotonic(), _agent(10.0)

    async def lost() -> Lost:
        return Lost(*[time.monotonic() - started] * 2)

    in_time, _ = await DeadlineClock(PausableClock()).wait(agent, 0.3, lambda: False, lost)
    assert not in_time and (await lost()).starve(0.3)
    agent.cancel()


@pytest.mark.parametrize(
    ("lost", "starved"),
    [
        (Lost(5.0, 0.5), False),  # its calls are answered, only late
        (Lost(5.0, 1.5), True),
        (Lost(11.0, 0.5), True),
    ],
)
def test_starved_is_who_gets_no_token_or_always_waits(lost: Lost, starved: bool) -> None:
    assert lost.starve(timeout_s=1.0) is starved


async def test_a_rollout_that_is_over_ends_the_wait() -> None:
    clock, over = DeadlineClock(PausableClock()), asyncio.Event()
    agent = _agent(10.0)
    waiting = asyncio.create_task(clock.wait(agent, 60.0, over.is_set, _nothing))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    over.set()
    assert (await asyncio.wait_for(waiting, 5.0))[0] is False
    # One that is over from the start does not wait either.
    assert (await clock.wait(agent, 60.0, lambda: True, _nothing))[0] is False
    agent.cancel()


async def test_clock_has_no_timer_while_nobody_waits() -> None:
    clock = DeadlineClock(PausableClock())
    await _wait(clock, _agent(0.01), 1.0)
    await asyncio.sleep(0.15)
    assert clock._due is None
    time.sleep(0.3)  # not a stall of anybody's rollout
    in_time, stalled_s, _ = await _wait(clock, _agent(0.01), 1.0)
    assert in_time and stalled_s < 0.25
