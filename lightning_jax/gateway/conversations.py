"""Responses that are kept: to be read again, and for later requests to go on from."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_jax.types import Message

MAX_SAVED = 1000  # per rollout, and outside of any


@dataclass(frozen=True)
class SavedResponse:
    """A response as it was answered, and the whole conversation that it ended."""

    body: Mapping[str, Any]
    messages: tuple[Message, ...]


class SavedConversations:
    """Saved responses by their ids; the oldest are forgotten."""

    def __init__(self) -> None:
        self._saved: OrderedDict[str, SavedResponse] = OrderedDict()

    def save(self, response_id: str, response: SavedResponse) -> None:
        self._saved[response_id] = response
        if len(self._saved) > MAX_SAVED:
            self._saved.popitem(last=False)

    def get(self, response_id: str) -> SavedResponse | None:
        return self._saved.get(response_id)

    def forget(self, response_id: str) -> None:
        del self._saved[response_id]
