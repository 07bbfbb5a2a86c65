"""The rollouts that are open at the gateway: how their calls sample, and what traffic they made."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_jax.gateway.conversations import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.owners import Owner, Owners
from lightning_jax.gateway.render import ConversationMemory
from lightning_jax.gateway.running import RunningCalls
from lightning_jax.store import Store
from lightning_jax.store_file import StoreError
from lightning_jax.tracing.tracer import Root


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
    max_spans: int = 10_000  # that its agent posts, rewards of calls included
    max_spans_mib: float = 64.0  # of posted spans as they are stored


@dataclass(frozen=True)
class Traffic:
    """What one rollout sent: all its calls, and how many got no answer for what reason."""

    num_calls: int
    num_errors: dict[str, int]  # by infrastructure: engine_error, call_timeout, queue_full, ...
    num_refused: dict[str, int]  # by the agent's own request: context_length_exceeded, ...
    num_cancelled: int  # the agent hung up, or was over before the answer was
    prefix_breaks: int  # prompts that replayed a response but not its token path
    num_joined: int = 0  # calls that repeated an earlier one and shared its answer
    malformed_tool_calls: int = 0  # that came back as text


@dataclass(frozen=True)
class AnsweredCall:
    """A recorded call, for rewards to go to."""

    response_id: str
    trace_id: str
    span_id: str
    num_choices: int


@dataclass
class OpenRollout:
    """One rollout while its agent runs."""

    settings: RolloutSettings
    root: Root = field(default_factory=Root)
    owner: Owner = field(init=False)
    memory: ConversationMemory = field(default_factory=ConversationMemory)
    conversations: SavedConversations = field(default_factory=SavedConversations)
    calls: RunningCalls = field(default_factory=RunningCalls)
    # By response id, in the order of the answers.
    answered: dict[str, AnsweredCall] = field(default_factory=dict)
    num_sampled: int = 0  # calls that got a seed
    num_calls: int = 0
    num_joined: int = 0
    prefix_breaks: int = 0
    malformed_tool_calls: int = 0
    reward: float | None = None  # as it was posted
    num_cancelled: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    in_flight: set[asyncio.Task] = field(default_factory=set)

    def __post_init__(self) -> None:
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
    def counted(self) -> Iterator[None]:
        """Around one call: counts it and how it ends, and lets the rollout's end cancel it."""
        task = asyncio.current_task()
        assert task is not None, "a call is answered outside of a task"
        self.num_calls += 1
        self.in_flight.add(task)
        try:
            yield
        except ApiError as error:
            (self.errors if error.infrastructure else self.refused)[error.code] += 1
            raise
        except (asyncio.CancelledError, ConnectionError):
            if task in self.in_flight:  # else the rollout's end has counted it
                self.num_cancelled += 1
            raise
        finally:
            self.in_flight.discard(task)

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
        )


class OpenRollouts:
    """Those that are open, by id. The store, if there is one, tells what became of others."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._by_id: dict[str, OpenRollout] = {}
        self.owners = Owners()

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, rollout_id: str) -> OpenRollout:
        return self._by_id[rollout_id]

    def open(self, settings: RolloutSettings) -> OpenRollout:
        """A new one. Raises ValueError if it is open."""
        if settings.rollout_id in self._by_id:
            raise ValueError(f"rollout {settings.rollout_id!r} is open already; expected a new id.")
        sequence = self._store.next_sequence() if self._store else None
        rollout = OpenRollout(settings, Root(sequence=sequence))
        self.owners.add(rollout.owner)
        self._by_id[settings.rollout_id] = rollout
        return rollout

    def close(self, rollout_id: str) -> Traffic:
        """Ends it; its traffic. Raises ValueError if it is not open."""
        rollout = self._by_id.pop(rollout_id, None)
        if rollout is None:
            raise ValueError(
                f"rollout {rollout_id!r} is not open; expected one that open_rollout began."
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
                ended = self._store.rollout(rollout_id).status
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
