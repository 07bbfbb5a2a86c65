"""Tests that shutdown waits for a thread, and that threads take turns."""

import asyncio
import threading
import time

import pytest

from lightning_jax.system.threads import DeviceTurns, run_in_thread


def test_it_returns_and_raises_what_the_function_does() -> None:
    assert asyncio.run(run_in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_in_thread(divmod, 7, 0))


@pytest.mark.parametrize("fails", [False, True])
def test_cancelled_it_ends_no_sooner_than_the_function(fails: bool) -> None:
    begun, may_end, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert may_end.wait(10)
        seen.append("work")
        assert not fails

    async def main() -> None:
        # The exception of abandoned work is not reported as never retrieved.
        asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
        task = asyncio.create_task(run_in_thread(work))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen.append("caller")

    asyncio.run(main())
    assert seen == ["work", "caller"]


def test_a_thread_that_takes_turns_again_and_again_lets_others_in() -> None:
    turns, is_over, taken = DeviceTurns(), threading.Event(), 0

    def again_and_again() -> None:
        while not is_over.is_set():
            with turns:
                time.sleep(0.01)

    busy = threading.Thread(target=again_and_again)
    busy.start()
    for _ in range(5):
        started = time.monotonic()
        with turns:
            taken += time.monotonic() - started < 5
    is_over.set()
    busy.join()
    assert taken == 5
