"""Output of OpenAI's responses API: items, and the events for them as they grow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.gateway.answer import CallDelta
from lightning_jax.gateway.dialects.base import Event
from lightning_jax.gateway.dialects.openai_responses.input import item_id
from lightning_jax.gateway.dialects.openai_responses.tools import Offer, custom_input

Entries = Sequence[dict[str, Any]]  # one per token, with its log-probability


@dataclass
class _Item:
    """Item that is growing now."""

    index: int
    item_id: str
    call: CallDelta | None  # start of its call; None for a message
    offer: Offer | None = None  # that it calls
    text: str = ""  # or the call's arguments
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_custom(self) -> bool:
        return self.offer is not None and self.offer.is_custom

    def shown(self, status: str) -> dict[str, Any]:
        if self.call:
            space = self.offer and self.offer.namespace
            call = {
                "id": self.item_id,
                "call_id": self.call.call_id,
                "name": self.offer.name if self.offer else self.call.name,
                **({"namespace": space} if space else {}),
            }
            if self.is_custom:
                text = "" if status == "in_progress" else custom_input(self.text)
                return {"type": "custom_tool_call", **call, "input": text}
            return {"type": "function_call", **call, "arguments": self.text, "status": status}
        content = [] if status == "in_progress" else [self.part()]
        return {
            "type": "message",
            "id": self.item_id,
            "role": "assistant",
            "content": content,
            "status": status,
        }

    def part(self) -> dict[str, Any]:
        entries = list(self.entries)
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": entries,
        }


class Output:
    """Items of one response, one after the other. Each method yields the events that it causes.

    There is a message if there is text, or if there is nothing else. Blanks alone do not count as
    text if there are calls. A token's log-probability goes with the message that is open or opens
    next. Log-probabilities of a call's tokens are left out. The text for a custom tool comes whole,
    because its call is JSON until its end.
    """

    def __init__(self, token: str, offers: Mapping[str, Offer]) -> None:
        self._token, self._offers = token, offers
        self._open: _Item | None = None
        self._held = ""  # blanks that may become the start of a message
        self._entries: list[dict[str, Any]] = []  # of tokens whose text has not arrived yet
        self.items: list[dict[str, Any]] = []  # finished items

    def add_text(self, text: str, entries: Entries = ()) -> Iterator[Event]:
        self._entries += entries
        if self._open is None or self._open.call:
            self._held += text
            if not self._held.strip():
                return
            text, self._held = self._held, ""
            yield from self._start(None)
        if text:
            yield from self._grow_text(text)

    def add_call(self, call: CallDelta) -> Iterator[Event]:
        """Add the start of a call, or more of the last call's arguments."""
        if call.name is not None:
            self._held = ""
            yield from self._start(call)
        item = self._open
        assert item and item.call, "arguments follow the beginning of their call"
        self._entries.clear()
        item.text += call.arguments
        if call.arguments and not item.is_custom:
            yield _of(item, "response.function_call_arguments.delta", delta=call.arguments)

    def finish(self, status: str) -> Iterator[Event]:
        """End the last item with this status."""
        if self._open is None:
            yield from self._start(None)
            if self._held:
                yield from self._grow_text(self._held)
        yield from self._close(status)

    def _start(self, call: CallDelta | None) -> Iterator[Event]:
        yield from self._close("completed")
        index, offer = len(self.items), self._offers.get((call and call.name) or "")
        kind = "msg" if call is None else "ctc" if offer and offer.is_custom else "fc"
        self._open = _Item(index, item_id(kind, self._token, index), call, offer)
        item = self._open.shown("in_progress")
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if not call:
            part = self._open.part()
            yield _of(self._open, "response.content_part.added", content_index=0, part=part)

    def _grow_text(self, text: str) -> Iterator[Event]:
        item = self._open
        assert item, "text grows a message"
        entries, self._entries = self._entries, []
        item.text += text
        item.entries += entries
        yield _of(
            item,
            "response.output_text.delta",
            content_index=0,
            delta=text,
            logprobs=_brief(entries),
        )

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        if item.is_custom:
            text = custom_input(item.text)
            yield _of(item, "response.custom_tool_call_input.delta", delta=text)
            yield _of(item, "response.custom_tool_call_input.done", input=text)
        elif item.call:
            yield _of(item, "response.function_call_arguments.done", arguments=item.text)
        else:
            if self._entries:  # tokens without text, such as the end of the turn
                yield from self._grow_text("")
            yield _of(
                item,
                "response.output_text.done",
                content_index=0,
                text=item.text,
                logprobs=_brief(item.entries),
            )
            yield _of(item, "response.content_part.done", content_index=0, part=item.part())
        whole, self._open = item.shown(status), None
        self.items.append(whole)
        yield {"type": "response.output_item.done", "output_index": item.index, "item": whole}


def _of(item: _Item, kind: str, **fields: Any) -> Event:
    return {"type": kind, "item_id": item.item_id, "output_index": item.index, **fields}


def _brief(entries: Entries) -> list[dict[str, Any]]:
    """Return the entries without bytes, as events show them."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": other["token"], "logprob": other["logprob"]}
                for other in entry["top_logprobs"]
            ],
        }
        for entry in entries
    ]
