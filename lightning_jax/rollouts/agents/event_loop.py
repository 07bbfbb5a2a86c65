"""Separate event loop and thread for agents.

An agent that blocks, for example in a synchronous client, delays other agents but neither the
server nor the deadlines. A watchdog logs the line that blocks. Each `asyncio.to_thread` call of an
agent gets its own thread, so a call that never returns does not block the others.
"""

import asyncio
import contextvars
import logging
import sys
import sysconfig
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from lightning_jax.rollouts.agents.functions import GRACE_S, Agent, Result
from lightning_jax.system.process_state import ProcessState
from lightning_jax.system.threads import start_thread
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

TICK_S = 1.0
PATIENCE = 10  # ticks without an iteration of the loop


@asynccontextmanager
async def isolate_agent(agent: Agent) -> AsyncIterator[Agent]:
    """Yield the agent wrapped to run on its own event loop while this context is open."""
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_ThreadPerCall())
    stopping = threading.Event()
    thread = threading.Thread(target=_serve, args=(loop, stopping), name="agents", daemon=True)
    thread.start()

    shared = _Shared()

    async def run(task: Task, llm: LLM) -> Result:
        with shared.used():
            return await _run_on(loop, agent, task, llm)

    try:
        with watched_loop(loop, thread):
            yield run
    finally:
        stopping.set()
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, 2 * GRACE_S)
        if thread.is_alive():
            log.warning(
                "an agent still blocks its event loop; exiting without waiting for it",
                extra={"event": "agent_blocks_exit"},
            )


class _Shared:
    """State of the process that all agents share, restored when none of them runs.

    It is restored at once if the others could not go on with it.
    """

    def __init__(self) -> None:
        self._state, self._num_running = ProcessState(), 0
        self._warned: set[str] = set()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count an agent while it runs."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running or self._state.is_unusable:
                self._restore()

    def _restore(self) -> None:
        new = [name for name in self._state.restore() if name not in self._warned]
        self._warned.update(new)
        if new:
            log.warning(
                "an agent changed what all agents of a process share (%s), which was restored; "
                "undo it in the agent, or give agents processes of their own (agent.python)",
                ", ".join(new),
                extra={"event": "shared_state_changed", "changed": new},
            )


def _serve(loop: asyncio.AbstractEventLoop, stopping: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    while not stopping.is_set():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio passes both on
            log.warning(
                "a background task of an agent raised %r; the other agents continue",
                error,
                extra={"event": "agent_task_exited", "error": error},
            )
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_S))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


async def _run_on(loop: asyncio.AbstractEventLoop, agent: Agent, task: Task, llm: LLM) -> Result:
    """Run the agent on `loop`, and return its result or raise its error.

    If cancelled, cancel the agent and wait for it.
    """
    ending: Future[tuple[Result, BaseException | None]] = Future()
    running: list[asyncio.Task[Any]] = []

    async def guarded() -> tuple[Result, BaseException | None]:
        try:
            return await agent(task, llm), None
        except BaseException as error:  # noqa: BLE001  (sys.exit would also stop the loop)
            return None, error

    def finish(run: asyncio.Task[tuple[Result, BaseException | None]]) -> None:
        ending.set_result((None, asyncio.CancelledError()) if run.cancelled() else run.result())

    def start() -> None:
        running.append(loop.create_task(guarded()))
        running[0].add_done_callback(finish)

    # This context makes the agent's spans children of the rollout's span.
    loop.call_soon_threadsafe(start, context=contextvars.copy_context())
    done = asyncio.wrap_future(ending)
    try:
        await asyncio.wait({done})
    except asyncio.CancelledError:
        loop.call_soon_threadsafe(lambda: running[0].cancel())
        await asyncio.wait({done})
        raise
    result, error = done.result()
    if error is not None:
        raise error
    return result


@contextmanager
def watched_loop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, tick_s: float = TICK_S
) -> Iterator[None]:
    """Log, while this context is open, when the loop in `thread` is blocked, and at which line.

    Ticks are counted instead of seconds, because a process that was suspended has not blocked.
    """
    turned, stop = threading.Event(), threading.Event()

    def watch() -> None:
        missed = 0
        while not stop.wait(tick_s):
            missed = 0 if turned.is_set() else missed + 1
            turned.clear()
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(turned.set)
            if missed == PATIENCE:
                where = current_line(thread)
                log.warning(
                    "an agent has blocked the event loop of all agents for %g s at %s; make it a "
                    "plain function, use an async client or asyncio.to_thread, or run it in its "
                    "own process (agent.python)",
                    missed * tick_s,
                    where,
                    extra={"event": "agent_blocks_loop", "where": where},
                )

    turned.set()
    watcher = threading.Thread(target=watch, name="loop-watchdog", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def current_line(thread: threading.Thread) -> str:
    """Return the thread's innermost line outside the standard library and installed packages."""
    assert thread.ident is not None, "it was started"
    stack = traceback.extract_stack(sys._current_frames()[thread.ident])
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    ours = [frame for frame in stack if not frame.filename.startswith(libraries)]
    frame = (ours or list(stack))[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name} ({frame.line})"


class _ThreadPerCall(ThreadPoolExecutor):
    """Executor with one thread per call. The process does not wait for the threads at exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return start_thread(fn, *args, **kwargs)
