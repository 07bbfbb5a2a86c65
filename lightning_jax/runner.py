"""Runs agents: many rollouts at once, each under a deadline, each ending in exactly one status.

A rollout is *scored* when its agent returned a reward, an *agent failure* when the agent raised,
ran out of time or returned none, and an *infrastructure failure* when it broke off after a call
that the server could not answer, or raised the built-in ConnectionError because something that it
stands on, a search service say, is down. Only the last is tried again, and it never counts as a
reward.
"""

import asyncio
import copy
import hashlib
import importlib.util
import inspect
import logging
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_jax.agent_child import module_name_of
from lightning_jax.config import ConfigError, RolloutConfig
from lightning_jax.descriptors import is_exhausted
from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.gateway.rollouts import derive_seed
from lightning_jax.store import CRASH, Store
from lightning_jax.tracing.tracer import below_root, root_span
from lightning_jax.types import FINISHED, LLM, Rollout, RolloutStatus, Task, UserError

log = logging.getLogger(__name__)

GRACE_S = 10.0  # what an agent gets to end its programs once it is cancelled

# A reward, or a mapping with "reward" and other numbers, which are kept and averaged.
Result = float | Mapping[str, float] | None
Agent = Callable[[Task, LLM], Awaitable[Result]]
_loaded: dict[str, ModuleType] = {}  # the files of agents, by path and time of their last edit


@dataclass(frozen=True)
class RolloutRequest:
    """One rollout to run. `place` is the task's place in its step, `index` the rollout's in its
    group.
    """

    task: Task
    phase: str
    step: int
    place: int
    index: int

    @property
    def group_id(self) -> str:
        return f"{self.phase}-{self.step:05d}-{self.place:03d}"

    def rollout(self, attempt: int) -> Rollout:
        return Rollout(
            rollout_id=f"{self.group_id}-{self.index:02d}-{attempt}",
            task_id=str(self.task["id"]),
            group_id=self.group_id,
            phase=self.phase,
            step=self.step,
            index=self.index,
            attempt=attempt,
            status="queued",
        )


def make_requests(
    tasks: Sequence[Task], phase: str, step: int, group_size: int
) -> list[RolloutRequest]:
    """`group_size` requests for each task, the rollouts of one task next to each other."""
    return [
        RolloutRequest(task, phase, step, place, index)
        for place, task in enumerate(tasks)
        for index in range(group_size)
    ]


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `FILE:FUNCTION` names. Raises ConfigError when there is none."""
    path, _, name = reference.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"{reference!r} names the file {path!r}, which does not exist; expected "
            f"FILE:FUNCTION, with the "
            "file relative to where you started the program."
        )
    state = f"{file.resolve()} {file.stat().st_mtime_ns}"  # one that was edited is read again
    if state not in _loaded:
        _loaded[state] = _load_module(file, state)
    function = getattr(_loaded[state], name, None)
    if not callable(function):
        raise ConfigError(f"{reference!r} names {name!r}, but {path} has no such function.")
    return function


def _load_module(file: Path, state: str) -> ModuleType:
    folder = str(file.resolve().parent)
    if folder not in sys.path:  # it may import what lies beside it; last, to hide nothing
        sys.path.append(folder)
    digest = hashlib.sha1(state.encode()).hexdigest()[:12]
    module_name = module_name_of(str(file), f"_loaded_{digest}")
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec and spec.loader, f"no import machinery for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:  # an agent's framework is not our dependency
        del sys.modules[module_name]
        raise ConfigError(f"{file} cannot be loaded: {error}") from error
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def load_agent(reference: str) -> Agent:
    """The agent that `FILE:FUNCTION` names. Raises ConfigError when there is none.

    A plain function becomes a coroutine function that calls it in a thread.
    """
    function = load_function(reference)
    if inspect.iscoroutinefunction(function):
        return function

    def call(task: Task, llm: LLM) -> Any:
        try:
            return function(task, llm)
        except StopIteration as error:  # no future can hold it
            raise RuntimeError("the agent raised StopIteration") from error

    async def agent(task: Task, llm: LLM) -> Result:
        result = await asyncio.to_thread(call, task, llm)
        return await result if inspect.isawaitable(result) else result

    return agent


async def run_rollouts(
    requests: Sequence[RolloutRequest],
    runner: "Runner",
    *,
    on_done: Callable[[Rollout], None] = lambda rollout: None,
) -> list[Rollout]:
    """The finished rollout of each request, in order. At most `concurrency` run at once.

    Raises TooManyFailures when too large a share of them ends as infrastructure failure.
    """
    gate = asyncio.Semaphore(runner.config.concurrency)

    async def one(request: RolloutRequest) -> Rollout:
        async with gate:
            rollout = await runner.run(request)
        on_done(rollout)
        return rollout

    try:
        async with asyncio.TaskGroup() as group:
            futures = [group.create_task(one(request)) for request in requests]
    except ExceptionGroup as failed:  # of ours: what an agent raises fails its rollout only
        raise failed.exceptions[0] from None
    rollouts = [future.result() for future in futures]
    broken = [r for r in rollouts if r.status == "infrastructure_failure"]
    if len(broken) > runner.config.max_infrastructure_failures * len(rollouts):
        reasons = ", ".join(f"{n} {why}" for why, n in Counter(r.reason for r in broken).items())
        raise TooManyFailures(
            f"{len(broken)} of {len(rollouts)} rollouts failed by infrastructure ({reasons}); "
            f"expected at "
            f"most {runner.config.max_infrastructure_failures:.0%} "
            f"(rollout.max_infrastructure_failures). First: {broken[0].rollout_id}: "
            f"{broken[0].detail}"
        )
    return rollouts


class TooManyFailures(UserError, RuntimeError):
    """The infrastructure fails so often that going on would train on a biased sample."""


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    status: RolloutStatus
    reward: float | None = None
    reason: str | None = None
    detail: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Runner:
    """Runs one rollout of an agent against the gateway, with retries; the store keeps what came of
    it.
    """

    agent: Agent
    gateway: Gateway
    store: Store
    config: RolloutConfig
    seed: int

    async def run(self, request: RolloutRequest) -> Rollout:
        """The request's finished rollout: a stored one where a crash left it, else a new one."""
        known = [
            r for r in self.store.rollouts(group_id=request.group_id) if r.index == request.index
        ]
        newest = max(known, key=lambda rollout: rollout.attempt, default=None)
        # Only the newest: after a change of settings the ones before it are another run's.
        if (
            newest is not None
            and not newest.superseded
            and newest.status in FINISHED
            and newest.task_id == str(request.task["id"])
        ):
            return newest
        attempt = newest.attempt if newest else 0
        last = attempt + self.config.max_attempts
        # One that ended with its process is made again as it would have been.
        num_lost = sum(rollout.reason == CRASH for rollout in known)
        while True:
            attempt += 1
            rollout = await self._attempt(request, attempt, draw=attempt - num_lost)
            if rollout.status in FINISHED or attempt == last:
                return rollout
            log.warning("%s: %s: %s", rollout.rollout_id, rollout.reason, rollout.detail)

    async def _attempt(self, request: RolloutRequest, attempt: int, *, draw: int) -> Rollout:
        rollout = request.rollout(attempt)
        self.store.add_rollout(rollout)
        llm = self.gateway.open_rollout(self._settings(rollout, draw))
        self.store.set_status(rollout.rollout_id, "running")
        start_ns = time.time_ns()
        try:
            outcome = await self._outcome(rollout.rollout_id, request.task, llm)
        except BaseException:
            self.gateway.close_rollout(rollout.rollout_id)
            raise
        errors = self.gateway.close_rollout(rollout.rollout_id).num_errors
        if outcome.status == "agent_failure":
            if errors:  # the agent broke off after a call that the server could not answer
                outcome = replace(
                    outcome, status="infrastructure_failure", reason=next(iter(errors))
                )
            else:
                outcome = replace(outcome, reward=self.config.agent_failure_reward)
        told = {"lightning.status": outcome.status, "lightning.task_id": rollout.task_id}
        error = outcome.detail or outcome.reason
        span = root_span(rollout.rollout_id, start_ns, time.time_ns(), told, error)
        self.store.add_span(rollout.rollout_id, span)
        self.store.set_status(rollout.rollout_id, **vars(outcome))
        return replace(rollout, **vars(outcome))

    async def _outcome(self, rollout_id: str, task: Task, llm: LLM) -> Outcome:
        """What the agent itself tells. Spans that it makes go below the rollout's root.

        It is a task of its own, so that whatever it does, leaving the process and cancelling itself
        included, ends no more than its rollout.
        """
        with below_root(rollout_id):
            running = asyncio.create_task(self._told(rollout_id, task, llm))
        try:
            await asyncio.wait({running}, timeout=self.config.timeout_s)
            late = not running.done()
        finally:
            if not running.done():
                await _end(running, rollout_id)
        if late:
            return _failure("deadline", f"the agent ran longer than {self.config.timeout_s:g} s")
        if running.cancelled():
            return _failure("CancelledError", "the agent was cancelled from within itself")
        return running.result()

    async def _told(self, rollout_id: str, task: Task, llm: LLM) -> Outcome:
        try:
            result = await self.agent(_copied(task), llm)
            return outcome_of(result, self.gateway.posted_reward(rollout_id))
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except SystemExit as error:  # asyncio would end the whole run by it
            return _failure("SystemExit", f"the agent called sys.exit({error.code!r})")
        except BaseException as error:  # noqa: BLE001  (foreign code: it fails its rollout only)
            return _outcome_of_error(error)

    def _settings(self, rollout: Rollout, draw: int) -> RolloutSettings:
        greedy = rollout.phase == "eval"
        return RolloutSettings(
            rollout_id=rollout.rollout_id,
            seed=derive_seed(self.seed, rollout.group_id, rollout.index, draw),
            temperature=0.0 if greedy else self.config.temperature,
            top_p=1.0 if greedy else self.config.top_p,
            top_k=0 if greedy else self.config.top_k,
            max_tokens=self.config.max_tokens,
            call_timeout_s=self.config.call_timeout_s,
        )


async def _end(agent: asyncio.Task[Any], rollout_id: str) -> None:
    """Cancels an agent and waits for what it has to put in order, but not for ever."""
    agent.cancel()
    await asyncio.wait({agent}, timeout=GRACE_S)
    if not agent.done():
        log.warning(
            "%s: its agent was cancelled and runs on after %g s; its calls are refused. An agent "
            "that catches CancelledError must raise it again.",
            rollout_id,
            GRACE_S,
        )


def outcome_of(result: Any, posted: float | None = None) -> Outcome:
    """What an agent's return value says: its reward and metrics, or that it cannot be used. Without
    a reward in it the `posted` one counts.
    """
    reward = result.get("reward") if isinstance(result, Mapping) else result
    reward = posted if reward is None else reward
    if reward is None:
        return _failure(
            "no_reward",
            f"the agent returned {repr(result)[:200]} and posted no reward; expected a number",
        )
    told = (dict(result) if isinstance(result, Mapping) else {}) | {"reward": reward}
    numbers = {name: _scalar(value) for name, value in told.items()}
    for name, value in numbers.items():
        if not isinstance(name, str) or not _is_finite(value):
            return _failure(
                "bad_reward",
                f"the agent returned {repr(value)[:200]} as {str(name)[:50]}; expected a finite "
                "number",
            )
    return Outcome(
        "scored",
        float(numbers.pop("reward")),
        metrics={_storable(name): float(value) for name, value in numbers.items()},
    )


def _copied(task: Task) -> Task:
    """The task for one rollout alone, which may change it; what cannot be copied is shared."""
    own = {}
    for name, value in task.items():
        try:
            own[name] = copy.deepcopy(value)
        except Exception:  # noqa: BLE001  (a lock, a connection, whatever an object's own rule does)
            own[name] = value
    return own


def _outcome_of_error(error: BaseException) -> Outcome:
    """What an agent raised. Of a group, as a task group raises it, the first of its errors counts
    that is not a connection's.
    """
    errors = _members(error)
    # Agents share this process's descriptors, so it is not one agent's fault if none is left.
    faults = [
        each for each in errors if not isinstance(each, ConnectionError) and not is_exhausted(each)
    ]
    told = (faults or errors)[0]
    status = "agent_failure" if faults else "infrastructure_failure"
    return Outcome(status, None, type(told).__name__, _detail(told))


def _members(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [member for each in error.exceptions for member in _members(each)]


def _detail(error: BaseException) -> str:
    """What it says; of one that says nothing, such as a time-out's, where it was raised."""
    try:
        words = str(error).strip()
    except Exception:  # noqa: BLE001  (foreign code, which may fail at that as well)
        words = ""
    if words:
        return _storable(words[:500])
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised without a message at {last.filename}:{last.lineno} in {last.name}"


def _storable(text: str) -> str:
    """The text with half surrogate pairs, which no database takes, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _scalar(value: Any) -> Any:
    """The number in an array without axes, as NumPy, JAX and PyTorch return them."""
    is_array = not isinstance(value, type) and getattr(value, "ndim", None) == 0
    return value.item() if is_array and hasattr(value, "item") else value


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _failure(reason: str, detail: str) -> Outcome:
    return Outcome("agent_failure", None, reason, detail)
