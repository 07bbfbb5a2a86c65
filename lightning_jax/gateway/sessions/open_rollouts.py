"""Rollouts that are open at the gateway: their sampling settings and their traffic."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.answer import Answer
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.prompt.render import ConversationMemory, Generated, Rendered
from lightning_jax.gateway.sessions.owners import Owner, Owners
from lightning_jax.gateway.sessions.running_calls import (
    RunningCall,
    RunningCalls,
    declared_timeout_s,
)
from lightning_jax.gateway.sessions.waits import Lost, Waits, counted_for
from lightning_jax.traces.context import OpenSpan, SpanSink

MAX_REFUSED = 20  # prompts of a rollout that are too long; then the rollout ends
EXPIRE_S = 10.0  # for the engine to end the responses of a rollout that meets its deadline


@dataclass(frozen=True)
class RolloutSettings:
    """Settings for the calls of one rollout. None leaves a choice to the agent."""

    rollout_id: str
    seed: int  # a call's seed is derived from this and the call's index
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None  # a ceiling, not an override
    # For one response, first waiting and then decoding; None: no limit.
    call_timeout_s: float | None = 60.0
    max_abs_reward: float = 1e6  # of a posted reward, and of the sum for one call
    max_spans: int = 10_000  # posted by its agent, including rewards of calls
    max_spans_mib: float = 64.0  # stored size of the posted spans


@dataclass(frozen=True)
class RolloutActivity:
    """One open rollout."""

    rollout_id: str
    start_ns: int  # since the epoch
    num_calls: int  # in flight
    num_tokens: int  # in the prompts and responses of all its calls


@dataclass(frozen=True)
class Activity:
    """Slots and counters of the engine, and the open rollouts with the longest first."""

    num_slots: int  # 0 if the engine is elsewhere
    stats: Mapping[str, float]  # as `Gateway.stats` returns them
    rollouts: tuple[RolloutActivity, ...]


ReadActivity = Callable[[], Activity]  # in the thread of the gateway's event loop


@dataclass(frozen=True)
class Traffic:
    """Calls of one rollout that got no answer."""

    # Codes of infrastructure errors for calls that no retry answered: engine_error, draining, ...
    unanswered: tuple[str, ...]
    num_cancelled: int  # the agent disconnected or ended before the answer was ready
    num_forgotten: int  # answers dropped because of serve.max_kept_mib_per_rollout
    lost: Lost = field(default_factory=Lost)  # to waiting
    loss: str | None = None  # how the server was lost, so that nothing else is known
    num_refused: int = 0  # calls whose prompts were too long

    @property
    def has_outgrown(self) -> bool:
        """True if so many prompts were too long that the rollout had to end."""
        return self.num_refused >= MAX_REFUSED


@dataclass
class HandledCall:
    """HTTP request for a call, while it is handled."""

    request: web.Request
    rollout: "OpenRollout | None"  # None: it is outside rollouts
    started: float = field(default_factory=time.monotonic)
    identity: str = ""  # the same for all tries of one call; "" until the body is read
    running: RunningCall | None = None  # None until the call has begun
    failure: str = ""  # code of an infrastructure failure that was forwarded to the client

    @property
    def reached_engine(self) -> bool:
        """True once the engine has accepted the call. Until then only the request was read."""
        return self.running is not None and self.running.was_accepted

    @property
    def will_be_sent_again(self) -> bool:
        """True if its client would retry a disconnected call, because its own timeout is over."""
        patience = declared_timeout_s(self.request.headers)
        return patience is not None and time.monotonic() - self.started >= 0.95 * patience


@dataclass(frozen=True)
class AnsweredCall:
    """Answered call and its span, for rewards that are posted for the call."""

    call_id: str
    span: OpenSpan
    num_choices: int


@dataclass
class OpenRollout:
    """Rollout whose agent is running."""

    settings: RolloutSettings
    root: OpenSpan = field(default_factory=OpenSpan)
    limits: ServeConfig = field(default_factory=ServeConfig)
    owner: Owner = field(init=False)
    memory: ConversationMemory = field(default_factory=ConversationMemory)
    # By response id, in order of arrival.
    answered: dict[str, AnsweredCall] = field(default_factory=dict)
    num_sampled: int = 0  # calls that got a seed
    reward: float | None = None  # as posted
    # Sums of the rewards posted for calls, by response id and choice.
    call_rewards: dict[tuple[str, int], float] = field(default_factory=dict)
    touched: float = field(default_factory=time.monotonic)  # time of the last request
    num_cancelled: int = 0
    in_flight: set[asyncio.Task] = field(default_factory=set)
    choices_in_flight: int = 0
    most_choices: int = 0  # maximum of `choices_in_flight`
    num_tokens: int = 0  # in the prompts and responses of all calls
    now_s: Callable[[], float] = time.monotonic  # clock of the waits, which stands still in pauses
    late: set[asyncio.Task] = field(default_factory=set)  # calls that decoded at the deadline
    has_expired: bool = False
    num_refused: int = 0  # calls whose prompts were too long; never reset
    left_out: set[str] = field(default_factory=set)  # kinds of tools and content that are logged
    unanswered: dict[str, str] = field(default_factory=dict)  # error code by a call's identity

    def __post_init__(self) -> None:
        max_bytes = int(self.limits.max_kept_mib_per_rollout * 2**20)
        self.conversations = SavedConversations(max_bytes)
        self.calls = RunningCalls(max_bytes)
        self.waits = Waits(self.now_s)
        self.owner = Owner(
            self.settings.rollout_id,
            self.root,
            max_spans=self.settings.max_spans,
            max_bytes=self.settings.max_spans_mib * 2**20,
        )

    @property
    def url_segment(self) -> str:
        """Name of the rollout in URLs: its id and its token."""
        return f"{self.settings.rollout_id}~{self.owner.token}"

    @property
    def calls_segment(self) -> str:
        """Name of the rollout in URLs that only answer calls."""
        return f"{self.settings.rollout_id}~{self.owner.calls_token}"

    @property
    def is_over(self) -> bool:
        """True if no more calls of the agent are answered."""
        return self.has_expired or self.num_refused >= MAX_REFUSED

    @property
    def idle_s(self) -> float:
        """Seconds since the last request, 0 while a call is in flight."""
        return 0.0 if self.in_flight else time.monotonic() - self.touched

    @contextmanager
    def counted(self, call: HandledCall) -> Iterator[None]:
        """Note a call's failure or cancellation, and let the rollout's end cancel it.

        Raise ApiError if too many are in flight, before the call's body is read.
        """
        task = asyncio.current_task()
        assert task is not None, "a call is answered outside of a task"
        limit = self.limits.max_calls_per_rollout
        if len(self.in_flight) >= limit:
            raise _too_many("too_many_calls", f"{limit} calls", "max_calls_per_rollout")
        self.in_flight.add(task)
        try:
            with counted_for(self.waits):
                yield
            if call.failure:
                self.unanswered[call.identity] = call.failure
            else:
                self.unanswered.pop(call.identity, None)
        except ApiError as error:
            if error.infrastructure:
                self.unanswered[call.identity] = error.code
            raise
        except (asyncio.CancelledError, ConnectionError):
            if task in self.in_flight:  # else `end` has counted it
                self.num_cancelled += 1
            raise
        finally:
            self.in_flight.discard(task)
            self.touched = time.monotonic()

    @contextmanager
    def responses(self, number: int) -> Iterator[None]:
        """Count responses as in flight while the body runs, with or without a listener.

        Raise ApiError if they would exceed the rollout's limits.
        """
        limit = self.limits.max_choices_per_rollout
        if self.choices_in_flight + number > limit:
            raise _too_many("too_many_choices", f"{limit} responses", "max_choices_per_rollout")
        limit = self.limits.max_tokens_per_rollout
        if self.num_tokens >= limit:
            raise ApiError(
                400,
                "too_many_tokens",
                f"this rollout has used {self.num_tokens} tokens, and "
                f"serve.max_tokens_per_rollout is {limit}; end the rollout.",
            )
        self.choices_in_flight += number
        self.most_choices = max(self.most_choices, self.choices_in_flight)
        try:
            yield
        finally:
            self.choices_in_flight -= number

    def remember(self, call: AnsweredCall, answers: Sequence[Answer], prompt: Rendered) -> None:
        """Remember an answered call for rewards and for later prompts that continue it.

        `prompt` is the call's first prompt. The tokens of each distinct prompt count once.
        """
        self.answered[call.call_id] = call
        self.num_tokens += sum(map(len, {answer.prompt_ids for answer in answers}))
        for answer in answers:
            sampled = answer.completion.token_ids
            self.num_tokens += len(sampled)
            if prompt.history:  # of messages
                self.memory.add(answer.as_message(), Generated(prompt, sampled))

    def next_seed(self) -> int:
        """Return a seed for the next call, derived from the rollout's seed and the call's index."""
        seed = derive_seed(self.settings.seed, self.num_sampled)
        self.num_sampled += 1
        return seed

    async def expire(self) -> None:
        """End the responses that decode at the rollout's deadline, with their tokens so far.

        Return once their calls are recorded, or after EXPIRE_S. Later calls are refused.
        """
        self.has_expired = True
        self.late = self.waits.end_decoding()
        if self.late:
            await asyncio.wait(self.late, timeout=EXPIRE_S)

    def end(self) -> Traffic:
        """Cancel the calls in flight and return the rollout's traffic."""
        abandoned = list(self.in_flight)
        unanswered = list(self.unanswered.values())
        if not all(task.done() for task in self.late):
            unanswered.append("call_timeout")  # the deadline's cause is missing from the record
        lost = self.waits.lost
        self.in_flight.clear()
        for task in abandoned:
            task.cancel()
        self.calls.cancel()
        return Traffic(
            unanswered=tuple(unanswered),
            num_cancelled=self.num_cancelled + len(abandoned),
            num_forgotten=self.calls.num_forgotten + self.conversations.num_forgotten,
            lost=lost,
            num_refused=self.num_refused,
        )


def _too_many(code: str, limit: str, setting: str) -> ApiError:
    return ApiError(
        429,
        code,
        f"this rollout has {limit} in flight, the limit of serve.{setting}; wait for some to "
        "finish.",
        retry_after_s=1,
    )


class OpenRollouts:
    """Open rollouts by id."""

    def __init__(
        self,
        store: SpanSink | None,
        limits: ServeConfig,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._limits, self._now_s = store, limits, now_s
        self._by_id: dict[str, OpenRollout] = {}
        self.owners = Owners()

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, rollout_id: str) -> OpenRollout:
        return self._by_id[rollout_id]

    def open(self, settings: RolloutSettings) -> OpenRollout:
        """Open a rollout and return it. Raise ValueError if it is open already."""
        if settings.rollout_id in self._by_id:
            raise InvalidValue(
                f"rollout {settings.rollout_id!r} is already open; use another id.",
                reason="exists",
                key=settings.rollout_id,
            )
        sequence = self._store.next_sequence() if self._store else None
        root = OpenSpan(sequence=sequence)
        rollout = OpenRollout(settings, root, self._limits, now_s=self._now_s)
        self.owners.add(rollout.owner)
        self._by_id[settings.rollout_id] = rollout
        return rollout

    def close(self, rollout_id: str) -> Traffic:
        """Close a rollout and return its traffic. Raise ValueError if it is not open."""
        rollout = self._by_id.pop(rollout_id, None)
        if rollout is None:
            raise InvalidValue.not_found(
                rollout_id, f"rollout {rollout_id!r} is not open; call open_rollout first."
            )
        self.owners.end(rollout.owner)
        return rollout.end()

    def is_over(self, rollout_id: str) -> bool:
        """Return True if the rollout is open, and no more calls of its agent are answered."""
        rollout = self._by_id.get(rollout_id)
        return rollout is not None and rollout.is_over

    def over(self) -> frozenset[str]:
        """Return the ids of the root spans of all rollouts that are over. See `is_over`."""
        return frozenset(r.root.span_id for r in self._by_id.values() if r.is_over)

    def activity(self) -> tuple[RolloutActivity, ...]:
        """Return the open rollouts, longest-running first."""
        activities = [
            RolloutActivity(name, rollout.root.start_ns, len(rollout.in_flight), rollout.num_tokens)
            for name, rollout in self._by_id.items()
        ]
        return tuple(sorted(activities, key=lambda rollout: rollout.start_ns))

    def close_all(self) -> None:
        for rollout_id in list(self._by_id):
            self.close(rollout_id)

    def find(self, segment: str) -> OpenRollout:
        """Return the open rollout that a URL names. Raise ApiError if there is none."""
        rollout_id, _, token = segment.rpartition("~")
        rollout = self._by_id.get(rollout_id)
        if rollout and rollout.is_over:
            rollout = None
        if rollout and rollout.owner.has_token(token):
            rollout.touched = time.monotonic()
            return rollout
        owner = self.owners.of_id(rollout_id)
        # Only the rollout's own agent may learn that there was one.
        has_ended = rollout is None and owner is not None and owner.has_token(token)
        state = "has ended" if has_ended else "is unknown"
        raise ApiError(
            404,
            "rollout_not_found",
            f"rollout {rollout_id or segment!r} {state}; use the base_url that the agent was "
            "started with, or /v1 for calls outside rollouts.",
        )


def derive_seed(*parts: object) -> int:
    """Return 31 bits that depend on all parts and their order, the same in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
