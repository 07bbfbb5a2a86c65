"""Secrets that identify the rollout a request may write to, whether open or recently ended."""

import asyncio
import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_jax.gateway.errors import ApiError
from lightning_jax.traces.context import OpenSpan

MAX_TRACES = 1_000  # that one rollout's calls may bring, in addition to its own trace
MAX_EXPORTS = 8  # requests with spans that one rollout may have in flight
MAX_ENDED_TRACES = 20_000  # of ended rollouts; exporters send in batches, so spans arrive late


@dataclass(eq=False)
class Owner:
    """Rollout as the owner of a record, with the amount of the record that its posts have used.

    The token is part of the rollout's URL. The rollout's agent sends the key as its API key. A
    second pair is for programs that the policy steers: with it, calls are answered, and posted
    rewards and spans do not count.
    """

    rollout_id: str
    root: OpenSpan
    max_spans: int
    max_bytes: float
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    calls_token: str = field(default_factory=lambda: secrets.token_hex(8))
    calls_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    num_spans: int = 0
    num_bytes: int = 0
    traces: set[str] = field(default_factory=set)
    num_exports: int = 0  # requests with spans that are waiting or being read
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the one that is being read

    def has_token(self, token: str) -> bool:
        """Return whether the token is one of the rollout's, in constant time."""
        return self.may_report(token) | _is_equal(token, self.calls_token)

    def has_key(self, key: str) -> bool:
        """Return whether the key is one of the rollout's, in constant time."""
        return _is_equal(key, self.key) | _is_equal(key, self.calls_key)

    def may_report(self, secret: str) -> bool:
        """Return whether rewards and spans count that come with this token or key."""
        return _is_equal(secret, self.token) | _is_equal(secret, self.key)

    def reserve(self, num_bytes: int) -> bool:
        """Count a posted span if the record has room for it. Return whether it has."""
        if self.num_spans >= self.max_spans or self.num_bytes + num_bytes > self.max_bytes:
            return False
        self.num_spans, self.num_bytes = self.num_spans + 1, self.num_bytes + num_bytes
        return True

    @contextmanager
    def export(self) -> Iterator[None]:
        """Count a request with spans while it is in flight.

        Raise ApiError if there are too many, so that one rollout cannot take all threads.
        """
        if self.num_exports >= MAX_EXPORTS:
            raise ApiError(
                429,
                "too_many_exports",
                f"the rollout already has {MAX_EXPORTS} span exports in progress; send one at a "
                "time.",
                retry_after_s=1,
            )
        self.num_exports += 1
        try:
            yield
        finally:
            self.num_exports -= 1


class Owners:
    """Lookup of owners by rollout id, key or trace."""

    def __init__(self) -> None:
        self._by_id: dict[str, Owner] = {}
        self._by_key: dict[bytes, Owner] = {}  # by digest, so that lookup times reveal no key
        self._by_trace: dict[str, Owner] = {}
        self._ended: deque[Owner] = deque()  # oldest first
        self._num_ended_traces = 0

    def add(self, owner: Owner) -> None:
        """Add the owner of a rollout that opens."""
        self._by_id[owner.rollout_id] = owner
        for key in (owner.key, owner.calls_key):
            self._by_key[_digest(key)] = owner
        self._claim(owner, owner.root.trace_id)

    def end(self, owner: Owner) -> None:
        """Mark an owner as ended. Forget the first to end if ended owners have too many traces."""
        self._ended.append(owner)
        self._num_ended_traces += len(owner.traces)
        while self._num_ended_traces > MAX_ENDED_TRACES:
            self._forget(self._ended.popleft())

    def of_id(self, rollout_id: str) -> Owner | None:
        """Return the owner of a rollout, or None if it is unknown."""
        return self._by_id.get(rollout_id)

    def of_key(self, key: str) -> Owner | None:
        """Return the owner of a key, or None if it is unknown."""
        return self._by_key.get(_digest(key))

    def of_trace(self, trace_id: str) -> Owner | None:
        """Return the owner of a trace, either a rollout's own or one that its calls brought."""
        return self._by_trace.get(trace_id)

    def claim(self, owner: Owner, trace_id: str) -> bool:
        """Assign the trace of a call to its rollout.

        Return False if it is another rollout's, or if this rollout has MAX_TRACES already.
        """
        holder = self._by_trace.get(trace_id)
        if holder is None and len(owner.traces) <= MAX_TRACES:
            self._claim(owner, trace_id)
            return True
        return holder is owner

    def _claim(self, owner: Owner, trace_id: str) -> None:
        self._by_trace[trace_id] = owner
        owner.traces.add(trace_id)

    def _forget(self, owner: Owner) -> None:
        self._num_ended_traces -= len(owner.traces)
        for key in (owner.key, owner.calls_key):
            del self._by_key[_digest(key)]
        for trace_id in owner.traces:
            del self._by_trace[trace_id]
        if self._by_id.get(owner.rollout_id) is owner:
            del self._by_id[owner.rollout_id]


def _is_equal(candidate: str, secret: str) -> bool:
    return hmac.compare_digest(candidate.encode(errors="replace"), secret.encode())


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=32).digest()
