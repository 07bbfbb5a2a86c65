"""Responses that are kept: to be read again, and for later requests to go on from."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_jax.types import Message

MAX_SAVED = 1000  # per rollout, and outside of any
MAX_BYTES = 2**26  # outside of any rollout; of one see serve.max_kept_mib_per_rollout


@dataclass(frozen=True)
class SavedResponse:
    """A response as it was answered, and the whole conversation that it ended."""

    body: Mapping[str, Any]
    messages: tuple[Message, ...]


class SavedConversations:
    """Saved responses by their ids: at most MAX_SAVED, which take at most `max_bytes`. The oldest
    are forgotten first. Any thread may call the methods: large replies are written in one.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._saved: OrderedDict[str, SavedResponse] = OrderedDict()
        self._own_bytes: dict[str, int] = {}  # of a response without its messages
        # Responses of one conversation share its messages: how many hold each, and its size.
        self._messages: dict[int, tuple[int, int]] = {}
        self.num_bytes = 0
        self.num_forgotten = 0

    def save(self, response_id: str, response: SavedResponse) -> None:
        with self._lock:
            self._saved[response_id] = response
            self._own_bytes[response_id] = _size(response.body)
            self.num_bytes += self._own_bytes[response_id]
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
            self.num_bytes -= self._own_bytes.pop(response_id)
            for message in response.messages:
                holders, size = self._messages.pop(id(message))
                if holders > 1:
                    self._messages[id(message)] = (holders - 1, size)
                else:
                    self.num_bytes -= size


def _size(value: Any) -> int:
    """Return about how many bytes a JSON value takes in memory."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        total += 56
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            total += 100 * len(item)
            left += item.keys()
            left += item.values()
        elif isinstance(item, list | tuple):
            total += 8 * len(item)
            left += item
    return total
