"""Execution of agents: many rollouts at once, each with a deadline and exactly one final status.

A rollout is *scored* if its agent returned a reward. It is an *agent failure* if the agent raised,
ran out of time or returned no reward. It is an *infrastructure failure* if the agent stopped after
a call that the server could not answer. A connection error that the agent raised also counts: a
service such as search is down.

A rollout is *stopped* if its run was stopped before it ended.

Only an infrastructure failure is retried, and it never counts as a reward. A lost connection to the
gateway is an agent failure if the agent gave up a call that the gateway was working on.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

from lightning_jax.errors import UserError
from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.gateway.sessions.open_rollouts import derive_seed
from lightning_jax.gateway.sessions.waits import Lost
from lightning_jax.rollouts.agents.functions import Agent, end_agent, ended_outcome, run_agent
from lightning_jax.rollouts.agents.outcome import (
    DEADLINE,
    Outcome,
    failure,
    final_outcome,
    with_posted,
)
from lightning_jax.rollouts.config import MEASURING, RolloutConfig
from lightning_jax.rollouts.deadlines import DeadlineClock
from lightning_jax.rollouts.rewards.scoring import RewardScorer
from lightning_jax.rollouts.servers import GatewayServer, OpenedRollout, RolloutServer
from lightning_jax.rollouts.workers.pool import Execution, WorkerPool
from lightning_jax.system.clock import PausableClock
from lightning_jax.system.threads import run_in_thread
from lightning_jax.traces import attributes
from lightning_jax.traces.context import below
from lightning_jax.traces.store import CRASH, STOP, Store
from lightning_jax.types import FINISHED, LLM, Metrics, Rollout, Span, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutRequest:
    """Rollout to run.

    `task_index` is the task's position in its step, `index` the rollout's position in its group.
    """

    task: Task
    phase: str
    step: int
    task_index: int
    index: int
    prompts: Mapping[str, str] | None = None  # None: those of the runner

    @property
    def group_id(self) -> str:
        return group_id(self.phase, self.step, self.task_index)

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


def group_id(phase: str, step: int, task_index: int) -> str:
    """Return the id of the rollouts of one task."""
    return f"{phase}-{step:05d}-{task_index:03d}"


def make_requests(
    tasks: Sequence[Task], phase: str, step: int, group_size: int, *, first_index: int = 0
) -> list[RolloutRequest]:
    """Return `group_size` requests per task, with the rollouts of one task next to each other.

    Task indices start at `first_index`.
    """
    return [
        RolloutRequest(task, phase, step, task_index, index)
        for task_index, task in enumerate(tasks, first_index)
        for index in range(group_size)
    ]


async def run_requests(
    requests: Sequence[RolloutRequest],
    runner: "Runner",
    *,
    on_done: Callable[[Rollout], None] = lambda rollout: None,
) -> list[Rollout]:
    """Return the finished and scored rollout of each request, in order.

    The runner's sink gets them, too.

    Raises TooManyFailures if too large a share of them ends as infrastructure failures.
    """

    async def one(request: RolloutRequest) -> Rollout:
        rollout = await runner.run_in_turn(request)
        on_done(rollout)
        return rollout

    try:
        async with asyncio.TaskGroup() as group:
            futures = [group.create_task(one(request)) for request in requests]
    except ExceptionGroup as failed:  # from our code: an agent's error fails only its rollout
        raise failed.exceptions[0] from None
    rollouts = [future.result() for future in futures]
    if runner.scorer is not None:
        pairs = groupby(zip(requests, rollouts, strict=True), key=lambda pair: pair[0].group_id)
        attempts = [list(group) for _, group in pairs]
        scoring = [runner.scorer.score(g[0][0].task, [r for _, r in g]) for g in attempts]
        rollouts = [rollout for group in await asyncio.gather(*scoring) for rollout in group]
    if runner.sink is not None:
        await runner.store.wait_for_spans()
        await run_in_thread(runner.sink.send, rollouts)
    check_infrastructure(rollouts, runner.config)
    return rollouts


def check_infrastructure(rollouts: Sequence[Rollout], config: RolloutConfig) -> None:
    """Raise TooManyFailures if too large a share of the rollouts are infrastructure failures."""
    broken = [r for r in rollouts if r.status == "infrastructure_failure"]
    if len(broken) > config.max_infrastructure_failures * len(rollouts):
        reasons = ", ".join(f"{n} {why}" for why, n in Counter(r.reason for r in broken).items())
        raise TooManyFailures(
            f"{len(broken)} of {len(rollouts)} rollouts failed for infrastructure reasons "
            f"({reasons}), more than "
            f"rollout.max_infrastructure_failures={config.max_infrastructure_failures:.0%}. "
            f"First: {broken[0].rollout_id}: {broken[0].detail}",
            reason="too_many_failures",
            key=broken[0].rollout_id,
        )


class TooManyFailures(UserError, RuntimeError):
    """Infrastructure failures so frequent that training would use a biased sample."""


@runtime_checkable
class RolloutSink(Protocol):
    """Place that finished and scored rollouts are sent to. Any thread may call its methods."""

    def send(
        self, rollouts: Sequence[Rollout], numbers: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        """Take rollouts, with numbers of their calls by span id. Never waits for the place."""
        ...

    def counts(self) -> Metrics:
        """Return what the place took so far, and what it did not."""
        ...


@dataclass(frozen=True)
class Runner:
    """Executor of single rollouts against the gateway, with retries. Results go to its store.

    Rollouts run in workers, or `agent` runs in this process.
    """

    agent: Agent | WorkerPool
    gateway: Gateway
    config: RolloutConfig
    seed: int
    scorer: RewardScorer | None = None  # of the rewards, after the agent's own
    at: RolloutServer | None = None  # None: `gateway`
    prompts: dict[str, str] = field(default_factory=dict)  # for agents; a search changes them
    is_judged: bool = False  # see LLM
    sink: RolloutSink | None = None  # gets what `run_requests` returns
    gate: asyncio.Semaphore = field(init=False)  # of `concurrency`
    idle: PausableClock = field(init=False)  # of the time in which no rollout runs or waits
    clock: DeadlineClock = field(init=False)
    server: RolloutServer = field(init=False)

    def __post_init__(self) -> None:
        server = GatewayServer(self.gateway) if self.at is None else self.at
        object.__setattr__(self, "server", server)
        object.__setattr__(self, "gate", asyncio.Semaphore(self.config.concurrency))
        object.__setattr__(self, "idle", PausableClock())
        object.__setattr__(self, "clock", DeadlineClock(self.gateway.pauses))

    @property
    def store(self) -> Store:
        assert self.gateway.store is not None, "rollouts are recorded"
        return self.gateway.store

    async def run_in_turn(self, request: RolloutRequest) -> Rollout:
        """Like `run`, with up to `concurrency` rollouts at once, first come, first served."""
        with self.idle.paused():
            async with self.gate:
                return await self.run(request)

    async def run(self, request: RolloutRequest) -> Rollout:
        """Return the request's finished rollout: stored before a crash, or else a new one."""
        stored = await self.store.in_order(self.store.rollouts, group_id=request.group_id)
        attempts = [rollout for rollout in stored if rollout.index == request.index]
        newest = max(attempts, key=lambda rollout: rollout.attempt, default=None)
        # Only the newest: after a change of settings, older attempts are from another run.
        if (
            newest is not None
            and not newest.superseded
            and newest.status in FINISHED
            and newest.task_id == str(request.task["id"])
        ):
            return newest
        attempt = newest.attempt if newest else 0
        last = attempt + self.config.max_attempts
        # An attempt that a stop or a crash ended is repeated with the same seed.
        num_lost = sum(rollout.reason in (STOP, CRASH) for rollout in attempts)
        reasons: list[str | None] = []
        while True:
            attempt += 1
            async with self._executor(request.task, reasons) as execution:
                rollout = await self.run_once(request, attempt, execution, draw=attempt - num_lost)
            if rollout.status in FINISHED or attempt == last:
                return rollout
            reasons.append(rollout.reason)
            log.warning("%s: %s: %s", rollout.rollout_id, rollout.reason, rollout.detail)
            # Doubled each time, plus up to half at random.
            jitter = derive_seed(self.seed, rollout.rollout_id, "retry") / 2**31
            await asyncio.sleep(self.config.backoff_s(attempt) * (1 + jitter / 2))

    async def run_once(
        self, request: RolloutRequest, attempt: int, execution: Execution, *, draw: int
    ) -> Rollout:
        """Return the rollout of one attempt, whatever its status. `draw` selects its seed."""
        try:
            return await self._attempt(request, attempt, execution, draw=draw)
        except asyncio.CancelledError:
            stopped = request.rollout(attempt).rollout_id
            await self.store.in_order(self.store.abandon_running, STOP, stopped)
            raise

    def _executor(
        self, task: Task, reasons: Sequence[str | None]
    ) -> AbstractAsyncContextManager[Execution]:
        """Return the context of an attempt, which waits until the agent can run."""
        if isinstance(self.agent, WorkerPool):
            return self.agent.reserve(self.config, task, reasons)
        agent, config = self.agent, self.config
        return nullcontext(Execution(lambda _, task, llm: run_agent(agent, task, llm, config)))

    async def _attempt(
        self, request: RolloutRequest, attempt: int, execution: Execution, *, draw: int
    ) -> Rollout:
        rollout = request.rollout(attempt)
        await self.store.in_order(self.store.add_rollout, rollout, request.task)
        opened = await self.server.open(self._settings(rollout, draw), rollout.group_id)
        prompts = dict(self.prompts if request.prompts is None else request.prompts)
        try:
            await self.store.in_order(self.store.set_status, rollout.rollout_id, "running")
            llm = replace(opened.llm, prompts=prompts, is_judged=self.is_judged)
            outcome, stalled_s = await self._outcome(
                opened, rollout.rollout_id, request.task, llm, execution
            )
        except BaseException:
            await self.server.close(rollout.rollout_id)
            raise
        traffic = await self.server.close(rollout.rollout_id)
        outcome = final_outcome(outcome, traffic, stalled_s, self.config)
        values = {
            attributes.OPERATION_NAME: attributes.INVOKE_AGENT,
            attributes.ROLLOUT_ID: rollout.rollout_id,
            attributes.STATUS: outcome.status,
            attributes.TASK_ID: rollout.task_id,
        }
        if prompts:
            values[attributes.PROMPTS] = json.dumps(prompts, ensure_ascii=False)
        span = opened.root.end("rollout", values, outcome.detail or outcome.reason)
        result = {**outcome.fields, "worker": execution.worker()}
        await self.store.in_order(self._record, rollout.rollout_id, span, result)
        return replace(rollout, **result)

    def _record(self, rollout_id: str, root: Span, result: Mapping[str, Any]) -> None:
        """Write the result of a rollout. The status comes last, because a resumed run trusts it."""
        self.store.add_span(rollout_id, root)
        self.store.set_status(rollout_id, **result)

    async def _outcome(
        self, opened: OpenedRollout, rollout_id: str, task: Task, llm: LLM, execution: Execution
    ) -> tuple[Outcome, float]:
        """Return (outcome according to the agent, seconds in which the event loop stalled).

        Spans of the agent become children of the root span.

        The agent runs in its own task. Even if it exits or cancels itself, only its rollout ends.
        """
        with below(opened.root):
            running = asyncio.create_task(execution.run(rollout_id, task, llm))

        def over() -> bool:
            return opened.loss() is not None or self.server.is_over(rollout_id)

        async def lost() -> Lost:
            silent_s = await execution.silent_s(running)
            return (await self.server.lost(rollout_id))._replace(silent_s=silent_s)

        try:
            in_time, stalled_s = await self.clock.wait(running, self.config.timeout_s, over, lost)
            if not in_time:  # before the agent hangs up on a call that decodes
                await self.server.expire(rollout_id)
        finally:
            if not running.done():
                await end_agent(running, rollout_id)
        if not in_time:
            late = f"the agent ran longer than {self.config.timeout_s:g} s"
            return failure(DEADLINE, late), stalled_s
        posted = await self.server.posted_reward(rollout_id)
        needs_reward = self.scorer is None or self.scorer.needs_agent_reward
        outcome = with_posted(ended_outcome(running), posted, needs_reward=needs_reward)
        return outcome, stalled_s

    def _settings(self, rollout: Rollout, draw: int) -> RolloutSettings:
        greedy = rollout.phase in MEASURING
        return RolloutSettings(
            rollout_id=rollout.rollout_id,
            seed=derive_seed(self.seed, rollout.group_id, rollout.index, draw),
            temperature=0.0 if greedy else self.config.temperature,
            top_p=1.0 if greedy else self.config.top_p,
            top_k=0 if greedy else self.config.top_k,
            max_tokens=self.config.max_tokens,
            call_timeout_s=self.config.call_timeout_s,
            max_abs_reward=self.config.max_abs_reward,
            max_spans=self.config.max_spans,
            max_spans_mib=self.config.max_spans_mib,
        )
