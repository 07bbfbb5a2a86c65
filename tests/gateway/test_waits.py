"""Tests of the time that a rollout loses to waiting."""

import asyncio

from lightning_jax.engine.time_limit import TimeLimit
from lightning_jax.gateway.waits import Lost, Waits


async def test_time_is_lost_while_all_responses_wait() -> None:
    now_s = 0.0
    waits = Waits(lambda: now_s)
    first, second, third = TimeLimit(), TimeLimit(), TimeLimit()
    task = asyncio.ensure_future(asyncio.sleep(0))
    now_s = 5.0  # the agent works without a call
    waits.add([first, second])
    now_s = 7.0
    assert waits.lost == Lost(2.0, 2.0)
    waits.begin(first, task)
    assert waits.lost == Lost(2.0, 0.0)
    now_s = 11.0  # one decodes, so an agent cannot stop the clock by asking for more
    assert waits.lost == Lost(2.0, 0.0)
    waits.remove([first])
    now_s = 12.0
    waits.add([third])
    now_s = 14.0
    assert waits.lost == Lost(5.0, 3.0)
    waits.begin(second, task)
    assert waits.end_decoding() == {task}
    assert second.is_over() and not first.is_over() and not third.is_over()
    waits.remove([second, third, third])
    now_s = 99.0
    assert waits.lost == Lost(5.0, 0.0) and waits.end_decoding() == set()
    await task
