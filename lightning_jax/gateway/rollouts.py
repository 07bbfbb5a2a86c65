"""The rollouts that are open at the gateway: how their calls sample, and what traffic they made."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_jax.config import ServeConfig
from lightning_jax.gateway.conversations import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.owners import Owner, Owners
from lightning_jax.gateway.render import ConversationMemory
from lightning_jax.gateway.running import RunningCall, RunningCalls
from lightning_jax.store import Store
from lightning_jax.store_file import StoreError
from lightning_jax.tracing.tracer import Root
from lightning_jax.types import InvalidValue


@dataclass(frozen=True)
class RolloutSettings:
    """How the calls of one rollout are answered. None leaves a choice to the agent."""

    rollout_id: str
    seed: int  # with a call's place in the rollout it makes that call's seed
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None  # a ceiling, not an override
    call_timeout_s: float | None = 60.0  # of one call, waiting included; None: no limit
    max_abs_reward: float = 1e6  # of a posted reward, and of those of one call together
    max_spans: int = 10_000  # that its agent posts, rewards of calls included
    max_spans_mib: float = 64.0  # of posted spans as they are stored


@dataclass(frozen=True)
class Traffic:
    """What one rollout sent: all its calls, and how many got no answer for what reason."""

    num_calls: int
    num_errors: dict[str, int]  # by infrastructure: engine_error, call_timeout, draining, ...
    num_refused: dict[str, int]  # by the agent's own request: context_length_exceeded, ...
    num_cancelled: int  # the agent hung up, or was over before the answer was
    prefix_breaks: int  # prompts that replayed a response but not its token path
    num_joined: int = 0  # calls that repeated an earlier one and shared its answer
    malformed_tool_calls: int = 0  # that came back as text
    # Codes of errors by infrastructure that no equal later call made good.
    unanswered: tuple[str, ...] = ()
    num_forgotten: int = 0  # answers that were not kept, for want of serve.max_kept_mib_per_rollout


@dataclass
class HandledCall:
    """One HTTP request for a call, while it is handled."""

    identity: str = ""  # what tries of one call have in common; "" until the body is read
    running: RunningCall | None = None  # None until the call has begun
    failure: str = ""  # code of an infrastructure failure that was passed on to the client

    @property
    def reached_engine(self) -> bool:
        """Return whether the engine took the call: until then only the request was looked at."""
        return self.running is not None and self.running.was_accepted


@dataclass(frozen=True)
class AnsweredCall:
    """Where the span of an answered call is, for rewards that are posted for the call."""

    call_id: str
    trace_id: str
    span_id: str
    num_choices: int


@dataclass
class OpenRollout:
    """One rollout while its agent runs."""

    settings: RolloutSettings
    root: Root = field(default_factory=Root)
    limits: ServeConfig = field(default_factory=ServeConfig)
    owner: Owner = field(init=False)
    memory: ConversationMemory = field(default_factory=ConversationMemory)
    # By response id, in the order of the answers.
    answered: dict[str, AnsweredCall] = field(default_factory=dict)
    num_sampled: int = 0  # calls that got a seed
    num_calls: int = 0
    num_joined: int = 0
    prefix_breaks: int = 0
    malformed_tool_calls: int = 0
    reward: float | None = None  # as it was posted
    # Sums of what was posted for calls, by response id and choice.
    call_rewards: dict[tuple[str, int], float] = field(default_factory=dict)
    num_cancelled: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    in_flight: set[asyncio.Task] = field(default_factory=set)
    choices_in_flight: int = 0
    most_choices: int = 0  # that were in flight at once
    num_tokens: int = 0  # of the prompts and responses of all calls
    unanswered: dict[str, str] = field(default_factory=dict)  # error code by a call's identity

    def __post_init__(self) -> None:
        max_bytes = int(self.limits.max_kept_mib_per_rollout * 2**20)
        self.conversations = SavedConversations(max_bytes)
        self.calls = RunningCalls(max_bytes)
        self.owner = Owner(
            self.settings.rollout_id,
            self.root,
            max_spans=self.settings.max_spans,
            max_bytes=self.settings.max_spans_mib * 2**20,
        )

    @property
    def place(self) -> str:
        """What names it in a URL."""
        return f"{self.settings.rollout_id}~{self.owner.token}"

    @contextmanager
    def counted(self, call: HandledCall) -> Iterator[None]:
        """Count one call and how it ends, and let the rollout's end cancel it.

        Raises ApiError if too many are in flight, before the call's body is read.
        """
        task = asyncio.current_task()
        assert task is not None, "a call is answered outside of a task"
        self.num_calls += 1
        limit = self.limits.max_calls_per_rollout
        if len(self.in_flight) >= limit:
            self.refused["too_many_calls"] += 1
            raise _too_many("too_many_calls", f"{limit} calls", "max_calls_per_rollout")
        self.in_flight.add(task)
        try:
            yield
            if call.failure:
                self._note_failure(call, call.failure)
            else:
                self.unanswered.pop(call.identity, None)
        except ApiError as error:
            if error.infrastructure:
                self._note_failure(call, error.code)
            else:
                self.refused[error.code] += 1
            raise
        except (asyncio.CancelledError, ConnectionError):
            if task in self.in_flight:  # else the rollout's end has counted it
                self.num_cancelled += 1
            raise
        finally:
            self.in_flight.discard(task)

    def _note_failure(self, call: HandledCall, code: str) -> None:
        self.errors[code] += 1
        self.unanswered[call.identity] = code

    def check_room(self, num_choices: int) -> None:
        """Raise ApiError if so many more responses would be over the rollout's limits."""
        limit = self.limits.max_choices_per_rollout
        if self.choices_in_flight + num_choices > limit:
            raise _too_many("too_many_choices", f"{limit} responses", "max_choices_per_rollout")
        limit = self.limits.max_tokens_per_rollout
        if self.num_tokens >= limit:
            raise ApiError(
                400,
                "too_many_tokens",
                f"the calls of this rollout have {self.num_tokens} tokens together; expected fewer "
                f"than {limit} (serve.max_tokens_per_rollout). End the rollout.",
            )

    def began(self, call: RunningCall, num_choices: int) -> None:
        """Count the call's responses as in flight until it ends, with or without a listener."""
        self.choices_in_flight += num_choices
        self.most_choices = max(self.most_choices, self.choices_in_flight)

        def on_done(task: asyncio.Task) -> None:
            self.choices_in_flight -= num_choices

        call.task.add_done_callback(on_done)

    def next_seed(self) -> int:
        """A seed for the next call, made from the rollout's and how many came before."""
        seed = derive_seed(self.settings.seed, self.num_sampled)
        self.num_sampled += 1
        return seed

    def end(self) -> Traffic:
        """The traffic of the whole; calls still in flight are cancelled."""
        abandoned = list(self.in_flight)
        self.in_flight.clear()
        for task in abandoned:
            task.cancel()
        self.calls.cancel()
        return Traffic(
            num_calls=self.num_calls,
            num_errors=dict(self.errors),
            num_refused=dict(self.refused),
            num_cancelled=self.num_cancelled + len(abandoned),
            prefix_breaks=self.prefix_breaks,
            num_joined=self.num_joined,
            malformed_tool_calls=self.malformed_tool_calls,
            unanswered=tuple(self.unanswered.values()),
            num_forgotten=self.calls.num_forgotten + self.conversations.num_forgotten,
        )


def _too_many(code: str, limit: str, setting: str) -> ApiError:
    return ApiError(
        429,
        code,
        f"this rollout has {limit} in flight; expected fewer at once (serve.{setting}). Wait for "
        "some to end.",
        retry_after_s=1,
    )


class OpenRollouts:
    """Those that are open, by id. The store, if there is one, tells what became of others."""

    def __init__(self, store: Store | None, limits: ServeConfig) -> None:
        self._store, self._limits = store, limits
        self._by_id: dict[str, OpenRollout] = {}
        self.owners = Owners()

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, rollout_id: str) -> OpenRollout:
        return self._by_id[rollout_id]

    def open(self, settings: RolloutSettings) -> OpenRollout:
        """A new one. Raises ValueError if it is open."""
        if settings.rollout_id in self._by_id:
            raise InvalidValue(
                f"rollout {settings.rollout_id!r} is open already; expected a new id.",
                reason="exists",
                key=settings.rollout_id,
            )
        sequence = self._store.next_sequence() if self._store else None
        rollout = OpenRollout(settings, Root(sequence=sequence), self._limits)
        self.owners.add(rollout.owner)
        self._by_id[settings.rollout_id] = rollout
        return rollout

    def close(self, rollout_id: str) -> Traffic:
        """Ends it; its traffic. Raises ValueError if it is not open."""
        rollout = self._by_id.pop(rollout_id, None)
        if rollout is None:
            raise InvalidValue(
                f"rollout {rollout_id!r} is not open; expected one that open_rollout began.",
                reason="not_found",
                key=rollout_id,
            )
        self.owners.end(rollout.owner)
        return rollout.end()

    def close_all(self) -> None:
        """Ends every one."""
        for rollout_id in list(self._by_id):
            self.close(rollout_id)

    def find(self, place: str) -> OpenRollout:
        """The one that is named so in a URL. Raises ApiError if none is."""
        rollout_id, _, token = place.rpartition("~")
        rollout = self._by_id.get(rollout_id)
        if rollout and rollout.owner.has_token(token):
            return rollout
        ended, owner = None, self.owners.of_id(rollout_id)
        with contextlib.suppress(StoreError):
            # How a rollout ended is told to its own agent only.
            if self._store and rollout is None and owner and owner.has_token(token):
                ended = self._store.status_at_once(rollout_id)
        state = f"has ended ({ended})" if ended else "is unknown"
        raise ApiError(
            404,
            "rollout_not_found",
            f"rollout {rollout_id or place!r} {state}; expected a running one. Use the base_url "
            "that the agent was started with, or /v1 for calls outside of rollouts.",
        )


def derive_seed(*parts: object) -> int:
    """31 bits that depend on every part and on their order, the same in every process."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
