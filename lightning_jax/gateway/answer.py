"""Dialect-neutral answers of the policy: whole answers, and the deltas in which they stream."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion
from lightning_jax.gateway.prompt.tool_calls import CallArguments, CallStart, Piece, TextPiece
from lightning_jax.types import Message

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class ToolCall:
    """One function call. `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str


def function_call(call_id: str | None, name: str, arguments: str) -> Message:
    """Return a call as OpenAI's chat format has it in an assistant's message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class Clock:
    """Start, first token and end of a choice, in nanoseconds of a monotonic clock."""

    started_ns: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0


@dataclass(frozen=True)
class Answer:
    """One finished choice."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str  # without the parts that were parsed as tool calls
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    clock: Clock = Clock()

    def as_message(self) -> Message:
        """Return the chat message that a client will send back."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                function_call(call.call_id, call.name, call.arguments) for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class CallDelta:
    """Start of a tool call (`name` is set), or more of its arguments."""

    index: int
    call_id: str
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Delta:
    """New output of one choice. `chunk` holds its tokens; text may lag behind them."""

    choice: int
    text: str
    calls: tuple[CallDelta, ...]
    chunk: Chunk | None


class AnswerBuilder:
    """Builder that turns the parsed pieces of one choice into deltas and finally an Answer."""

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self._text: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []  # id, name, pieces of the arguments
        self._started_ns = time.monotonic_ns()
        self._first_token_ns = 0

    def begin(self) -> None:
        """Note the time of the first token."""
        self._first_token_ns = self._first_token_ns or time.monotonic_ns()

    def add(self, pieces: Sequence[Piece], chunk: Chunk | None) -> Delta:
        """Add pieces and tokens, and return them as a delta."""
        self.begin()
        text, calls = "", []
        for piece in pieces:
            match piece:
                case TextPiece():
                    text += piece.text
                case CallStart():
                    self._calls.append((f"call_{secrets.token_hex(12)}", piece.name, []))
                    calls.append(CallDelta(piece.index, self._calls[-1][0], piece.name, ""))
                case CallArguments():
                    call_id, _, arguments = self._calls[piece.index]
                    arguments.append(piece.text)
                    calls.append(CallDelta(piece.index, call_id, None, piece.text))
        self._text.append(text)
        return Delta(self._choice, text, tuple(calls), chunk)

    def answer(self, prompt_ids: tuple[int, ...], completion: Completion) -> Answer:
        """Return the whole answer, once all pieces are added."""
        calls = tuple(ToolCall(i, name, "".join(parts)) for i, name, parts in self._calls)
        assert completion.finish_reason in ("stop", "length"), "a failed call has no answer"
        called = bool(calls) and completion.finish_reason == "stop"
        reason: FinishReason = "tool_calls" if called else completion.finish_reason
        ended_ns = time.monotonic_ns()
        clock = Clock(self._started_ns, self._first_token_ns or ended_ns, ended_ns)
        return Answer(prompt_ids, completion, "".join(self._text), calls, reason, clock)
