"""Conversations that a later request may go on from by the id of a response."""

from collections import OrderedDict

from lightning_jax.types import Message

MAX_SAVED = 1000  # per rollout, and outside of any


class SavedConversations:
    """Whole conversations by the id of the response that ended them; the oldest are forgotten."""

    def __init__(self) -> None:
        self._messages: OrderedDict[str, tuple[Message, ...]] = OrderedDict()

    def save(self, response_id: str, messages: tuple[Message, ...]) -> None:
        self._messages[response_id] = messages
        if len(self._messages) > MAX_SAVED:
            self._messages.popitem(last=False)

    def get(self, response_id: str) -> tuple[Message, ...] | None:
        return self._messages.get(response_id)
