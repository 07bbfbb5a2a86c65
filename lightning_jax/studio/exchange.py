"""Request and answer of a call that another server answered, read from their JSON. Pure functions.

The gateway's dialects read requests. What they refuse is shown as it is, and so are answers in
other formats than OpenAI's chat and responses and Anthropic's messages.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_jax.gateway.request import PolicyRequest
from lightning_jax.studio.records import CallView, as_text, common_length
from lightning_jax.system.text import printable
from lightning_jax.traces import attributes
from lightning_jax.types import Span

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Exchange:
    """Messages that another server read, and its response. All text is safe to print."""

    messages: tuple[str, ...]  # each with its role
    response: str
    tool_calls: tuple[tuple[str, str], ...] = ()  # (name, arguments as JSON)
    finish_reason: str = ""
    num_prompt_tokens: int | None = None  # as the server counts them; None: it did not say
    num_response_tokens: int | None = None


def is_remote(span: Span) -> bool:
    """Return whether the span is a call that another server answered or failed to answer."""
    return attributes.SERVED_BY in span.attributes and attributes.INPUT in span.attributes


def read_call(span: Span) -> Exchange:
    """Return the request and the answer of such a call."""
    values = span.attributes
    answer = str(values.get(attributes.OUTPUT, ""))
    return read_exchange(str(values[attributes.INPUT]), answer, values.get(attributes.DIALECT, ""))


def remote_call(
    span: Span, number: int, earlier: Mapping[int, tuple[str, ...]]
) -> tuple[CallView, tuple[str, ...]]:
    """Return the call, and its messages including the response.

    `earlier` has such messages of calls before this one, by their number.
    """
    values = span.attributes
    read = read_call(span)
    if span.error is not None:  # the view shows the error itself
        read = replace(read, response="", tool_calls=())
    sizes = {n: common_length(messages, read.messages) for n, messages in earlier.items()}
    longest, shares_with = last_longest(sizes)
    call = CallView(
        number=number,
        num_prompt_tokens=read.num_prompt_tokens,
        shared_text="\n".join(read.messages[:longest]),
        new_text="\n".join(read.messages[longest:]),
        tool_calls=read.tool_calls,
        finish_reason=read.finish_reason,
        agent=printable(str(values.get(attributes.AGENT, ""))),
        role=printable(str(values.get(attributes.ROLE, ""))),
        trains=False,
        shares_with=shares_with,
        num_shared_messages=longest,
        served_by=printable(str(values[attributes.SERVED_BY])),
        text=read.response,
        num_counted_tokens=read.num_response_tokens,
    )
    calls = [f"calls {name}({arguments})" for name, arguments in read.tool_calls]
    response = "\n".join([*filter(None, [read.response]), *calls])
    return call, (*read.messages, f"assistant: {response}")


def last_longest(sizes: Mapping[int, int]) -> tuple[int, int | None]:
    """Return the largest size and the last call that has it, or (0, None) if no size is above 0."""
    longest = max(sizes.values(), default=0)
    return longest, max(n for n, size in sizes.items() if size == longest) if longest else None


def read_exchange(sent: str, answer: str, dialect: str = "") -> Exchange:
    """Read a request and its answer, which may be cut or in an unknown format."""
    from lightning_jax.gateway.dialects.all import read_request  # few views need it

    messages: tuple[str, ...] = ()
    with suppress(Exception):  # another format, also below
        if request := read_request(_as_object(sent) or {}, dialect):
            messages = tuple(map(printable, _messages(request)))
    messages = messages or (printable(sent),)
    with suppress(Exception):
        return _with_reply(messages, _as_object(answer) or _joined(answer))
    return Exchange(messages, printable(answer))


def _as_object(text: str) -> Json | None:
    from lightning_jax.gateway.fields import is_deep

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and not is_deep(value) else None


# The request


def _messages(request: PolicyRequest) -> Iterator[str]:
    """Yield the messages, after the names of the tools."""
    if request.functions:
        yield f"tools: {', '.join(function.name for function in request.functions)}"
    for prompt in request.prompts or ():
        yield f"user: {_text(prompt) if isinstance(prompt, str) else as_text(prompt)}"
    for message in request.messages or ():
        if isinstance(message, Mapping):
            texts = [_text(message["content"])] if message.get("content") else []
            texts += [f"calls {name}({as_text(words)})" for name, words in _chat_calls(message)]
            text = "\n".join(texts) or as_text(dict(message))  # any other message stays JSON
            yield f"{message.get('role')}: {text}"
        else:
            yield f"user: {_text(message)}"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(map(_text, content))
    if isinstance(content, Mapping) and isinstance(content.get("text"), str):
        return content["text"]
    return as_text(content)


# The answer. These functions may raise anything, as the other server may answer anything.


def _with_reply(messages: tuple[str, ...], reply: Json) -> Exchange:
    """Return the exchange with a whole answer."""
    if choices := reply.get("choices"):
        parts = [choice.get("message") or choice for choice in choices]
        calls = [call for message in parts for call in _chat_calls(message)]
        reasons = [choice.get("finish_reason") for choice in choices]
    else:
        parts = reply.get("output") or reply["content"]
        calls = [
            (part["name"], part.get("arguments", part.get("input", "")))
            for part in parts
            if part["type"] in ("function_call", "tool_use")
        ]
        reasons = [reply.get("stop_reason") or reply.get("status")]
    texts = [_text(text) for part in parts if (text := part.get("content") or part.get("text"))]
    usage = reply.get("usage") or {}
    counts = (
        usage.get("prompt_tokens", usage.get("input_tokens")),
        usage.get("completion_tokens", usage.get("output_tokens")),
    )
    return Exchange(
        messages,
        printable("\n\n".join(texts)),
        tuple((printable(str(name)), as_text(arguments)) for name, arguments in calls),
        printable(", ".join(map(str, filter(None, reasons)))),
        *(count if isinstance(count, int) else None for count in counts),
    )


def _chat_calls(message: Json) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function.get("name"), function.get("arguments", "")) for function in functions]


def _joined(answer: str) -> Json:
    """Return a streamed chat completion as one answer."""
    lines = [line.removeprefix("data:").strip() for line in answer.splitlines()]
    events = [event for event in map(_as_object, lines) if event and "choices" in event]
    text, reason, usage = "", "", {}
    calls: dict[int, dict[str, str]] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"][:1]:
            delta = choice.get("delta") or {}
            text += delta.get("content") or choice.get("text") or ""
            reason = choice.get("finish_reason") or reason
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part.get("index", 0), {"name": "", "arguments": ""})
                for name in call:
                    call[name] += part["function"].get(name) or ""
    message = {"content": text, "tool_calls": [{"function": call} for call in calls.values()]}
    choices = [{"message": message, "finish_reason": reason}] if events else []
    return {"choices": choices, "usage": usage}
