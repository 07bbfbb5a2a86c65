"""Request and answer of a call that another server answered, read from their JSON. Pure functions.

OpenAI's chat and responses formats and Anthropic's messages are read. Others are shown as they are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_jax.studio.records import CallView
from lightning_jax.studio.text import as_text
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


def remote_call(
    span: Span, number: int, earlier: Mapping[int, Sequence[str]]
) -> tuple[CallView, tuple[str, ...]]:
    """Return the call, and its messages including the response.

    `earlier` has such messages of calls before this one, by their number.
    """
    values = span.attributes
    read = read_exchange(values[attributes.INPUT], values.get(attributes.OUTPUT, ""))
    if span.error is not None:  # the view shows the error itself
        read = replace(read, response="", tool_calls=())
    shared = {n: _num_shared(messages, read.messages) for n, messages in earlier.items()}
    longest = max(shared.values(), default=0)
    call = CallView(
        number=number,
        num_prompt_tokens=read.num_prompt_tokens,
        shared_text="\n".join(read.messages[:longest]),
        new_text="\n".join(read.messages[longest:]),
        tokens=(),
        tool_calls=read.tool_calls,
        finish_reason=read.finish_reason,
        mean_logprob=None,
        versions=(),
        reward=0.0,
        agent=printable(str(values.get(attributes.AGENT, ""))),
        role=printable(str(values.get(attributes.ROLE, ""))),
        trains=False,
        shares_with=max(n for n, size in shared.items() if size == longest) if longest else None,
        num_shared_messages=longest,
        served_by=printable(str(values[attributes.SERVED_BY])),
        text=read.response,
        num_counted_tokens=read.num_response_tokens,
    )
    calls = [f"calls {name}({arguments})" for name, arguments in read.tool_calls]
    response = "\n".join([*filter(None, [read.response]), *calls])
    return call, (*read.messages, f"assistant: {response}")


def _num_shared(messages: Sequence[str], others: Sequence[str]) -> int:
    pairs = enumerate(zip(messages, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(messages), len(others)))


def read_exchange(sent: str, answer: str) -> Exchange:
    """Read a request and its answer, which may be cut or in an unknown format."""
    request, reply = _as_object(sent), _as_object(answer) or _joined(answer)
    messages = tuple(_messages(request)) if request else ()
    found = None if reply is None else _reply(reply)
    response, calls, reason, usage = found or (answer, (), "", {})
    return Exchange(
        messages or (printable(sent),),
        printable(response),
        tuple((printable(name), as_text(arguments)) for name, arguments in calls),
        printable(reason),
        _count(usage, "prompt_tokens", "input_tokens"),
        _count(usage, "completion_tokens", "output_tokens"),
    )


def _as_object(text: str) -> Json | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# The request


def _messages(request: Json) -> Iterator[str]:
    """Yield the messages, after the names of the tools and a system prompt beside them."""
    tools = [tool for tool in _items(request, "tools") if isinstance(tool, Mapping)]
    names = [_mapping(tool, "function").get("name") or tool.get("name") for tool in tools]
    if any(names):
        yield printable(f"tools: {', '.join(str(name) for name in names if name)}")
    for name in ("system", "instructions"):
        if request.get(name):
            yield printable(f"system: {_text(request[name])}")
    asked = request.get("messages") or request.get("input") or request.get("prompt") or ()
    for message in [asked] if isinstance(asked, str) else asked:
        if isinstance(message, Mapping):
            yield printable(f"{message.get('role') or message.get('type')}: {_content(message)}")
        else:
            yield printable(f"user: {_text(message)}")


def _content(message: Json) -> str:
    """Return the text of a message and its tool calls. An item of another kind stays JSON."""
    calls = [f"calls {name}({as_text(given)})" for name, given in _chat_calls(message)]
    texts = [_text(message[name]) for name in ("content", "output") if message.get(name)]
    return "\n".join([*texts, *calls]) or as_text(dict(message))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(map(_text, content))
    if isinstance(content, Mapping) and isinstance(content.get("text"), str):
        return content["text"]
    return as_text(content)


# The answer

Reply = tuple[str, Sequence[tuple[str, Any]], str, Json]  # text, tool calls, finish reason, usage


def _reply(reply: Json) -> Reply | None:
    """Return the parts of an answer, or None if its format is unknown."""
    usage = _mapping(reply, "usage")
    if choices := [choice for choice in _items(reply, "choices") if isinstance(choice, Mapping)]:
        messages = [_mapping(choice, "message") or choice for choice in choices]
        texts = [_text(message.get("content") or message.get("text") or "") for message in messages]
        calls = [call for message in messages for call in _chat_calls(message)]
        reasons = [str(choice.get("finish_reason") or "") for choice in choices]
        return "\n\n".join(texts), calls, ", ".join(filter(None, reasons)), usage
    parts = _items(reply, "output") or _items(reply, "content")
    if not all(isinstance(part, Mapping) for part in parts) or not parts:
        return None
    texts = [_text(part.get("content") or part["text"]) for part in parts if _has_text(part)]
    calls = [
        (str(part.get("name")), part.get("arguments", part.get("input", "")))
        for part in parts
        if part.get("type") in ("function_call", "tool_use")
    ]
    return "\n\n".join(texts), calls, str(reply.get("stop_reason") or reply.get("status")), usage


def _has_text(part: Json) -> bool:
    return bool(part.get("content") or part.get("text"))


def _chat_calls(message: Json) -> list[tuple[str, Any]]:
    functions = [_mapping(call, "function") for call in _items(message, "tool_calls")]
    return [(str(f.get("name")), f.get("arguments", "")) for f in functions]


def _joined(answer: str) -> Json | None:
    """Return a streamed chat completion as one answer, or None if the text is something else."""
    lines = [line.removeprefix("data:").strip() for line in answer.splitlines()]
    events = [event for event in map(_as_object, lines) if event and "choices" in event]
    if not events:
        return None
    text, reason, usage = "", "", {}
    calls: dict[int, dict[str, str]] = {}
    for event in events:
        usage = _mapping(event, "usage") or usage
        for choice in _items(event, "choices")[:1]:
            delta = _mapping(choice, "delta")
            text += delta.get("content") or choice.get("text") or ""
            reason = choice.get("finish_reason") or reason
            for part in _items(delta, "tool_calls"):
                function = _mapping(part, "function")
                call = calls.setdefault(part.get("index", 0), {"name": "", "arguments": ""})
                for name in call:
                    call[name] += function.get(name) or ""
    message = {"content": text, "tool_calls": [{"function": call} for call in calls.values()]}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}


def _items(node: Any, name: str) -> Sequence[Any]:
    found = node.get(name) if isinstance(node, Mapping) else None
    return found if isinstance(found, list) else ()


def _mapping(node: Any, name: str) -> Json:
    found = node.get(name) if isinstance(node, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _count(usage: Json, *names: str) -> int | None:
    found = [usage[name] for name in names if isinstance(usage.get(name), int)]
    return found[0] if found else None
