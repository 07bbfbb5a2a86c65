"""Saved responses, to be read again and for later requests to continue."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_jax.gateway.fields import json_items
from lightning_jax.types import Message

MAX_SAVED = 1000  # per rollout, and outside of rollouts
MAX_BYTES = 2**26  # outside of rollouts; serve.max_kept_mib_per_rollout is for one rollout


@dataclass(frozen=True)
class SavedResponse:
    """Response body, and the whole conversation up to its end."""

    body: Mapping[str, Any]
    messages: tuple[Message, ...]


class SavedConversations:
    """Saved responses by id, at most MAX_SAVED with at most `max_bytes` in total.

    The oldest are forgotten first. All methods are thread-safe, because large replies are written
    in a thread.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._saved: OrderedDict[str, SavedResponse] = OrderedDict()
        self._response_bytes: dict[str, int] = {}  # of a response without its messages
        # Responses of one conversation share messages: (number of responses with it, size) of each.
        self._messages: dict[int, tuple[int, int]] = {}
        self.num_bytes = 0
        self.num_forgotten = 0

    def save(self, response_id: str, response: SavedResponse) -> None:
        with self._lock:
            self._saved[response_id] = response
            self._response_bytes[response_id] = _size(response.body)
            self.num_bytes += self._response_bytes[response_id]
            for message in response.messages:
                holders, size = self._messages.get(id(message)) or (0, _size(message))
                self.num_bytes += 0 if holders else size
                self._messages[id(message)] = (holders + 1, size)
            while len(self._saved) > MAX_SAVED or self.num_bytes > self._max_bytes:
                self.num_forgotten += 1
                self.forget(next(iter(self._saved)))

    def get(self, response_id: str) -> SavedResponse | None:
        return self._saved.get(response_id)

    def forget(self, response_id: str) -> None:
        with self._lock:
            response = self._saved.pop(response_id)
            self.num_bytes -= self._response_bytes.pop(response_id)
            for message in response.messages:
                holders, size = self._messages.pop(id(message))
                if holders > 1:
                    self._messages[id(message)] = (holders - 1, size)
                else:
                    self.num_bytes -= size


def _size(value: Any) -> int:
    """Return the approximate size of a JSON value in memory, in bytes."""
    total = 0
    for item in json_items(value):
        total += 56
        if isinstance(item, dict):
            total += 100 * len(item)
        elif isinstance(item, str | list | tuple):
            total += len(item) * (1 if isinstance(item, str) else 8)
    return total
