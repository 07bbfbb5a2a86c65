"""Agents as coroutine functions, and one execution of an agent up to its outcome.

Workers import this module, so it needs neither JAX nor the gateway.
"""

import asyncio
import contextvars
import copy
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lightning_jax.rollouts.agents.outcome import Outcome, failure, outcome_of, outcome_of_error
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.settings import ConfigError
from lightning_jax.settings.loading import load_function, read_options
from lightning_jax.system.network import go_direct
from lightning_jax.system.threads import start_thread
from lightning_jax.types import LLM, Task

log = logging.getLogger(__name__)

GRACE_S = 10.0  # time for a cancelled agent to end its programs

# A reward, or a mapping with "reward" and other numbers, which are stored and averaged.
Result = float | Mapping[str, float] | None
Agent = Callable[[Task, LLM], Awaitable[Result]]
AgentFunction = Callable[[Task, LLM], Any]  # plain or a coroutine function


def load_agent(reference: str, options: Mapping[str, Any] | None = None) -> Agent:
    """Return the agent that `FILE:FUNCTION` names. Raises ConfigError if there is none."""
    return as_agent(load_function(reference), options)


def as_agent(function: Any, options: Mapping[str, Any] | None = None) -> Agent:
    """Return a coroutine function; a plain function is called in a thread.

    If it has an attribute `check_options`, that is called with the options, and may refuse them.
    Raises ConfigError if it cannot be called with a task, an LLM and the options by name.
    """
    if not callable(function):
        raise ConfigError(
            f"the agent is {function!r}; pass a function (task, llm) that returns the reward",
            reason="not_callable",
            key="agent",
        )
    options = read_options(function, ("task", "llm"), options or {}, "agent")
    if check := getattr(function, "check_options", None):
        check(**options)
    if options:
        function = functools.partial(function, **options)
    if inspect.iscoroutinefunction(function):
        return function

    async def agent(task: Task, llm: LLM) -> Result:
        return await call_foreign("the agent", function, task, llm)

    return agent


async def call_foreign(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of the user's: plain, in a thread of its own, or coroutine.

    Errors call it `name`.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)

    def call() -> Any:
        try:
            return function(*arguments)
        except StopIteration as error:  # a future cannot hold StopIteration
            raise RuntimeError(f"{name} raised StopIteration") from error

    running = start_thread(contextvars.copy_context().run, call)
    result = await asyncio.wrap_future(running)
    return await result if inspect.isawaitable(result) else result


async def run_agent(agent: Agent, task: Task, llm: LLM, config: RolloutConfig) -> Outcome:
    """Return the outcome of the agent on the task, whatever it returns or raises.

    Raises CancelledError if cancelled, or if the agent cancels itself.
    """
    go_direct(llm.base_url)
    try:
        return outcome_of(await agent(_copied(task), llm), config)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  (foreign code: fails only its rollout)
        return outcome_of_error(error, llm)


def ended_outcome(running: asyncio.Task[Outcome]) -> Outcome:
    """Return the outcome of a task of `run_agent` that has ended."""
    if running.cancelled():
        return failure("CancelledError", "the agent cancelled itself")
    return running.result()


async def end_agent(running: asyncio.Task[Any], rollout_id: str) -> None:
    """Cancel an agent and wait up to GRACE_S for its cleanup."""
    running.cancel()
    await asyncio.wait({running}, timeout=GRACE_S)
    if not running.done():
        log.warning(
            "%s: the agent still runs %g s after it was cancelled, and its calls are refused; an "
            "agent that catches CancelledError must raise it again",
            rollout_id,
            GRACE_S,
        )


def _copied(task: Task) -> Task:
    """Return a copy of the task that the rollout may change.

    Values that cannot be copied are shared.
    """
    copies = {}
    for name, value in task.items():
        try:
            copies[name] = copy.deepcopy(value)
        except Exception:  # noqa: BLE001  (a lock, a connection, a custom __deepcopy__)
            copies[name] = value
    return copies
