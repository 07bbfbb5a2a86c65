"""Discrete-event simulation of a run: agents, engines and trainer, together or apart.

    from layouts_sim import simulate

A rollout is a chain of turns. A turn waits for Python, is prefilled, gains one token in each decode
step, and is followed by its tool. The duration of a decode step grows with the number of requests.
Which groups begin and which ones a step takes follows `lightning_jax.train.loop.groups`,
which a test compares.
Nothing here reads a clock or a device: the result is a function of the arguments.

Decoding is a fluid: all requests of an engine advance by the same fraction of a decode step.
A prompt is prefilled alone, and the other requests of its engine wait meanwhile.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Action = Callable[[], None]


@dataclass(frozen=True)
class Turn:
    """One call of an agent and the wait for the tool that follows it."""

    prompt_tokens: float  # to prefill, without those in the prefix cache
    response_tokens: float
    tool_s: float


@dataclass(frozen=True)
class Workload:
    """Rollouts of a run. `turns` draws the turns of one rollout."""

    tasks_per_step: int
    group_size: int
    turns: Callable[[np.random.Generator], Sequence[Turn]]
    concurrency: int = 1 << 30  # rollouts running at once
    shared_tokens: float = 0.0  # prompt of a group, trained once for the group


@dataclass(frozen=True)
class EngineRates:
    """Speed of one engine."""

    slots: int
    step_s: float  # decode step, apart from what each request adds
    step_s_per_request: float
    prefill_tokens_per_s: float


@dataclass(frozen=True)
class PythonCosts:
    """Seconds of an interpreter."""

    agent_s: float = 0.0  # agent, per call
    gateway_s: float = 0.0  # gateway, per call
    token_s: float = 0.0  # gateway, per sampled token
    step_s: float = 0.0  # engine's thread, per decode step


@dataclass(frozen=True)
class Layout:
    """Devices and processes of a run."""

    name: str
    num_engines: int
    train_tokens_per_s: float
    train_fixed_s: float = 0.0  # of each step, such as credit and batching
    publish_s: float = 0.0
    ahead: int = 0  # rollout.ahead
    max_staleness: int = 4  # algorithm.max_staleness
    # Share of the devices' time that decoding has during an update. None: devices of its own.
    decode_share: float | None = None
    num_interpreters: int = 1  # processes that hold engines and gateways
    num_workers: int = 0  # processes that run agents; 0: the ones of the engines


@dataclass(frozen=True)
class Step:
    """One step of the trainer. Times are seconds since the start."""

    began: float  # when the trainer began to wait for rollouts
    taken_at: float
    ended: float  # when the weights were published
    sampler_wait_s: float  # in which no rollout ran or waited
    decode_busy_s: float  # engine seconds with at least one request
    num_rollouts: int
    response_tokens: float
    trained_tokens: float
    age_mean: float
    age_max: int


@dataclass(eq=False, slots=True)
class Group:
    """Rollouts of one task. `version` is the weights version when they began."""

    version: int
    left: int  # unfinished rollouts
    trained_tokens: float = 0.0
    response_tokens: float = 0.0
    token_versions: float = 0.0  # sum over tokens of the version that sampled them
    oldest: int = 1 << 30

    @property
    def is_complete(self) -> bool:
        return self.left == 0


def groups_to_take(
    groups: Sequence[Group], number: int, *, step: int, per_step: int, max_staleness: int
) -> list[Group] | None:
    """Return the oldest complete groups, or None if the step has to wait for others.

    `groups` are in order. The step waits if a later one would have more groups that are due, by
    their version plus `max_staleness`, than the steps until then can take.
    """
    chosen = [group for group in groups if group.is_complete][:number]
    if len(chosen) < number:
        return None
    for version in {group.version for group in groups}:
        num_due = sum(group.version <= version for group in groups)
        num_taken = sum(group.version <= version for group in chosen)
        num_later = per_step * max(version + max_staleness - step, 0)
        if num_taken < min(num_due - num_later, number):
            return None
    return chosen


class _Clock:
    """Queue of events."""

    def __init__(self) -> None:
        self.now, self._events, self._number = 0.0, list[tuple[float, int, Action]](), 0

    def at(self, time: float, action: Action) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, action))

    def step(self) -> bool:
        """Run the next event. Return False if there is none."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True


class _Interpreter:
    """Python of one process: one piece of work at a time, first come, first served."""

    def __init__(self, clock: _Clock) -> None:
        self._clock, self.free_at = clock, 0.0

    def run(self, seconds: float, then: Action) -> None:
        if seconds <= 0.0:
            then()
            return
        self.free_at = max(self._clock.now, self.free_at) + seconds
        self._clock.at(self.free_at, then)


class _Engine:
    """Continuous batching of one engine. `on_busy` is called when it starts or stops."""

    def __init__(
        self, clock: _Clock, rates: EngineRates, least_step_s: float, on_busy: Callable[[int], None]
    ) -> None:
        self._clock, self._rates, self._least_step_s = clock, rates, least_step_s
        self._on_busy = on_busy
        self.num_rollouts = 0  # pinned to this engine
        self.interpreter = _Interpreter(clock)
        self.busy_s = 0.0
        self._running: list[tuple[float, int, Action]] = []  # by number of the last decode step
        self._waiting: deque[tuple[float, float, Action]] = deque()
        self._steps = 0.0  # decode steps so far
        self._prefill_s = 0.0  # prefill that is due before the next decode step
        self._at = 0.0  # time of `_steps` and `_prefill_s`
        self._speed = 1.0  # share of the device
        self._epoch = self._number = 0

    def submit(self, prompt: float, response: float, done: Action) -> None:
        self._advance()
        self._waiting.append((prompt, response, done))
        self._admit()
        self._schedule()

    def set_speed(self, speed: float) -> None:
        self._advance()
        self._speed = speed
        self._schedule()

    def _step_s(self) -> float:
        rates = self._rates
        step_s = rates.step_s + rates.step_s_per_request * len(self._running)
        return max(step_s, self._least_step_s)

    def _advance(self) -> None:
        """Account for the time since the last event."""
        passed, self._at = self._clock.now - self._at, self._clock.now
        if not self._running:
            return
        self.busy_s += passed
        passed *= self._speed
        prefill_s = min(passed, self._prefill_s)
        self._prefill_s -= prefill_s
        self._steps += (passed - prefill_s) / self._step_s()

    def _admit(self) -> None:
        was_idle = not self._running
        while self._waiting and len(self._running) < self._rates.slots:
            prompt, response, done = self._waiting.popleft()
            self._prefill_s += prompt / self._rates.prefill_tokens_per_s
            self._number += 1
            heapq.heappush(self._running, (self._steps + response, self._number, done))
        if was_idle and self._running:
            self._on_busy(1)

    def _schedule(self) -> None:
        self._epoch += 1
        if not self._running or self._speed <= 0.0:
            return
        steps = max(self._running[0][0] - self._steps, 0.0)
        seconds = (self._prefill_s + steps * self._step_s()) / self._speed
        self._clock.at(self._clock.now + seconds, lambda epoch=self._epoch: self._finish(epoch))

    def _finish(self, epoch: int) -> None:
        if epoch != self._epoch:  # the batch has changed since
            return
        self._advance()
        ended = list[Action]()
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            ended.append(heapq.heappop(self._running)[2])
        self._admit()
        if not self._running:
            self._on_busy(-1)
        self._schedule()
        for done in ended:
            done()


@dataclass
class _Update:
    """Update that is running, in seconds of the trainer alone."""

    left_s: float
    at: float
    epoch: int = 0
    speed: float = 1.0


@dataclass
class _Run:
    """State of a simulated run."""

    workload: Workload
    layout: Layout
    rates: EngineRates
    python: PythonCosts
    num_steps: int
    seed: int
    clock: _Clock = field(default_factory=_Clock)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout, python = self.layout, self.python
        per_process = -(-layout.num_engines // layout.num_interpreters)
        least = python.step_s * per_process
        self.engines = [
            _Engine(self.clock, self.rates, least, self._on_busy) for _ in range(layout.num_engines)
        ]
        interpreters = [_Interpreter(self.clock) for _ in range(layout.num_interpreters)]
        for index, engine in enumerate(self.engines):
            engine.interpreter = interpreters[index % len(interpreters)]
        self.workers = [_Interpreter(self.clock) for _ in range(layout.num_workers)]
        self.untaken: list[Group] = []
        self.queue: deque[tuple[Group, Sequence[Turn]]] = deque()
        self.version = self.wanted = self.num_begun = self.num_running = self.num_busy = 0
        self.update: _Update | None = None
        self.began = self.idle_s = self.idle_before = self.busy_before = 0.0
        self.idle_since: float | None = 0.0

    # Trainer

    def begin_step(self) -> None:
        self.began = self.clock.now
        self.wanted = self.workload.tasks_per_step
        self._begin_groups()
        self._take()

    def _take(self) -> None:
        """Take the oldest complete groups if the trainer waits and has enough."""
        if not self.wanted or sum(group.left == 0 for group in self.untaken) < self.wanted:
            return
        groups = groups_to_take(
            self.untaken,
            self.wanted,
            step=self.version,
            per_step=self.workload.tasks_per_step,
            max_staleness=self.layout.max_staleness,
        )
        if groups is None:
            return
        chosen = set(map(id, groups))
        self.untaken = [group for group in self.untaken if id(group) not in chosen]
        self.wanted = 0
        tokens = sum(group.trained_tokens for group in groups)
        work_s = self.layout.train_fixed_s + tokens / self.layout.train_tokens_per_s
        self.update = _Update(work_s, self.clock.now)
        for engine in self.engines:
            engine.set_speed(1.0 if self.layout.decode_share is None else self.layout.decode_share)
        self._begin_groups()
        self._pace(groups, self.clock.now)

    def _pace(self, groups: list[Group], taken_at: float) -> None:
        """Keep the speed of the update in step with the engines, and end it when it is done."""
        update = self.update
        assert update is not None
        update.left_s -= (self.clock.now - update.at) * update.speed
        share = self.layout.decode_share
        update.at = self.clock.now
        update.speed = 1.0 if share is None or not self.num_busy else 1.0 - share
        update.epoch += 1
        self._repace = lambda: self._pace(groups, taken_at)

        def end(epoch: int = update.epoch) -> None:
            if self.update is update and update.epoch == epoch:
                self.update = None
                for engine in self.engines:
                    engine.set_speed(1.0)
                published = self.clock.now + self.layout.publish_s
                self.clock.at(published, lambda: self._publish(groups, taken_at))

        if update.speed > 0.0:
            self.clock.at(self.clock.now + max(update.left_s, 0.0) / update.speed, end)

    def _on_busy(self, change: int) -> None:
        before, self.num_busy = self.num_busy, self.num_busy + change
        if self.update is not None and (before == 0) != (self.num_busy == 0):
            self.clock.at(self.clock.now, self._repace_if_running)

    def _repace_if_running(self) -> None:
        if self.update is not None:
            self._repace()

    def _publish(self, groups: list[Group], taken_at: float) -> None:
        idle_s = self.idle_s
        if self.idle_since is not None:
            idle_s += self.clock.now - self.idle_since
        busy_s = sum(engine.busy_s for engine in self.engines)
        tokens = sum(group.response_tokens for group in groups)
        versions = sum(group.token_versions for group in groups)
        step = Step(
            began=self.began,
            taken_at=taken_at,
            ended=self.clock.now,
            sampler_wait_s=idle_s - self.idle_before,
            decode_busy_s=busy_s - self.busy_before,
            num_rollouts=len(groups) * self.workload.group_size,
            response_tokens=tokens,
            trained_tokens=sum(group.trained_tokens for group in groups),
            age_mean=max(self.version - versions / max(tokens, 1e-9), 0.0),
            age_max=self.version - min(group.oldest for group in groups),
        )
        self.steps.append(step)
        self.idle_before, self.busy_before = idle_s, busy_s
        self.version += 1
        if self.version < self.num_steps:
            self.begin_step()

    # Rollouts

    def _begin_groups(self) -> None:
        """Begin as many groups as `Groups` of a run would."""
        per_step = self.workload.tasks_per_step
        later = (self.num_steps - 1 - self.version) * per_step
        room = self.wanted + min(self.layout.ahead, later) - len(self.untaken)
        for _ in range(max(room, 0)):
            size, number = self.workload.group_size, self.num_begun
            group = Group(self.version, size, self.workload.shared_tokens)
            self.untaken.append(group)
            for index in range(size):
                rng = np.random.default_rng((self.seed, number, index))
                self.queue.append((group, self.workload.turns(rng)))
            self.num_begun += 1
        self._start_rollouts()

    def _start_rollouts(self) -> None:
        while self.queue and self.num_running < self.workload.concurrency:
            if self.idle_since is not None:
                self.idle_s += self.clock.now - self.idle_since
                self.idle_since = None
            self.num_running += 1
            group, turns = self.queue.popleft()
            engine = min(self.engines, key=lambda engine: engine.num_rollouts)
            engine.num_rollouts += 1
            worker = min(self.workers or [engine.interpreter], key=lambda python: python.free_at)
            self._turn(group, turns, 0, engine, worker)

    def _turn(
        self, group: Group, turns: Sequence[Turn], index: int, engine: _Engine, agent: _Interpreter
    ) -> None:
        """Make the call of a turn, or end the rollout after the last one."""
        if index == len(turns):
            self._end_rollout(group, engine)
            return
        turn, python = turns[index], self.python
        begun = 0

        def call() -> None:
            work_s = python.gateway_s + python.token_s * turn.response_tokens
            engine.interpreter.run(work_s, submit)

        def submit() -> None:
            nonlocal begun
            begun = self.version
            engine.submit(turn.prompt_tokens, turn.response_tokens, answered)

        def answered() -> None:
            group.response_tokens += turn.response_tokens
            group.trained_tokens += turn.prompt_tokens + turn.response_tokens
            group.token_versions += turn.response_tokens * (begun + self.version) / 2
            group.oldest = min(group.oldest, begun)
            then = self.clock.now + turn.tool_s
            self.clock.at(then, lambda: self._turn(group, turns, index + 1, engine, agent))

        agent.run(python.agent_s, call)

    def _end_rollout(self, group: Group, engine: _Engine) -> None:
        engine.num_rollouts -= 1
        self.num_running -= 1
        group.left -= 1
        self._start_rollouts()
        if not self.num_running and not self.queue:
            self.idle_since = self.clock.now
        if group.is_complete:
            self._take()


def simulate(
    workload: Workload,
    layout: Layout,
    rates: EngineRates,
    python: PythonCosts | None = None,
    *,
    num_steps: int,
    seed: int = 0,
) -> list[Step]:
    """Return the steps of a run. The same seed gives every layout the same rollouts."""
    run = _Run(workload, layout, rates, python or PythonCosts(), num_steps, seed)
    run.begin_step()
    while run.clock.step():
        pass
    return run.steps


@dataclass(frozen=True)
class Figures:
    """Rates, waits and ages of a run, without its first steps."""

    step_s: float
    rollouts_per_s: float
    tokens_per_s: float  # sampled tokens that were trained
    trainer_wait_share: float
    sampler_wait_share: float
    age_mean: float
    age_max: float


@dataclass(frozen=True)
class Summary(Figures):
    """Figures of a simulated run."""

    trainer_busy_share: float
    decode_busy_share: float  # of the engines' time


def summarize(steps: Sequence[Step], num_engines: int, *, skip: int = 0) -> Summary:
    """Summarize the steps after the first `skip`. Ages are weighted by tokens."""
    kept = steps[skip:]
    seconds = kept[-1].ended - kept[0].began
    tokens = sum(step.response_tokens for step in kept)
    wait_s = sum(step.taken_at - step.began for step in kept)
    return Summary(
        step_s=seconds / len(kept),
        rollouts_per_s=sum(step.num_rollouts for step in kept) / seconds,
        tokens_per_s=tokens / seconds,
        trainer_wait_share=wait_s / seconds,
        sampler_wait_share=sum(step.sampler_wait_s for step in kept) / seconds,
        trainer_busy_share=1 - wait_s / seconds,
        decode_busy_share=sum(step.decode_busy_s for step in kept) / seconds / num_engines,
        age_mean=sum(step.age_mean * step.response_tokens for step in kept) / tokens,
        age_max=max(step.age_max for step in kept),
    )
