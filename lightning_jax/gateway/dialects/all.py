"""All dialects that the gateway serves, and readers of requests in any of them."""

from collections.abc import Mapping
from typing import Any

from lightning_jax.gateway.dialects.anthropic import ANTHROPIC
from lightning_jax.gateway.dialects.base import Dialect, Sender
from lightning_jax.gateway.dialects.gemini.dialect import GEMINI
from lightning_jax.gateway.dialects.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from lightning_jax.gateway.dialects.openai_chat import CHAT
from lightning_jax.gateway.dialects.openai_completions import COMPLETIONS
from lightning_jax.gateway.dialects.openai_responses.dialect import RESPONSES
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.dialects.unknown_fields import allow_unknown
from lightning_jax.gateway.fields import Body, as_object
from lightning_jax.gateway.request import PolicyRequest, named_agent

DIALECTS = (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ANTHROPIC,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    GEMINI,
)
# Dialects by a field of their requests, for calls that were recorded without one.
MARKS = {"system": "anthropic", "messages": "chat", "input": "responses", "prompt": "completions"}
TEXTS = {*MARKS, "contents", "instructions", "systemInstruction", "system_instruction"}
SYSTEM = ("system", "developer")
PATH = {"model": "", "method": ""}  # of Gemini's requests, which does not matter here


def read_request(body: Mapping[str, Any], dialect_name: str = "") -> PolicyRequest | None:
    """Return the request in a body that another server accepted.

    Fields that the dialect refuses are left out. Return None if one of them holds part of the
    prompt. Without a dialect name, the fields suggest a dialect.
    """
    name = dialect_name or next((MARKS[mark] for mark in MARKS if mark in body), "")
    body = {"max_tokens": 1, **body}
    requests = (_read(dialect, body) for dialect in DIALECTS if dialect.name == name)
    return next((r for r in requests if r and (r.messages or r.prompts)), None)


def _read(dialect: Dialect, body: dict[str, Any]) -> PolicyRequest | None:
    sender = Sender({}, PATH, {}, "", SavedConversations(), accepts_any_model=True)
    while True:
        try:
            with allow_unknown():
                return dialect.parse(as_object(body), sender).request
        except Exception as error:  # noqa: BLE001  (of a body that the other server took)
            refused = (getattr(error, "param", None) or "").partition(".")[0]
            if refused not in body or refused in TEXTS:
                return None
            body = {name: value for name, value in body.items() if name != refused}


def read_traits(body: Body, path: Mapping[str, str], headers: Mapping[str, str]) -> dict[str, str]:
    """Return the `agent`, `model`, `system` prompt and the user's last `message` of a call."""
    model = body.get("model") or path.get("model") or ""
    metadata = body.get("metadata")
    agent = named_agent(str(model), headers, metadata if isinstance(metadata, Mapping) else None)
    texts = {"system": _system(body), "message": _last_message(body)}
    return {"agent": agent, "model": str(model), **texts}


def _system(body: Body) -> str:
    """Return the text of the system prompt, wherever the dialect puts it."""
    names = ("system", "instructions", "systemInstruction", "system_instruction")
    parts = [body.get(name) for name in names]
    for name in ("messages", "input"):
        messages = body.get(name)
        if isinstance(messages, list):
            parts += [
                message.get("content")
                for message in messages
                if isinstance(message, Mapping) and message.get("role") in SYSTEM
            ]
    return "\n".join(text for part in parts if (text := _text(part)))


def _last_message(body: Body) -> str:
    """Return the text of the last message if it is the user's, without the results of tools.

    System messages do not count, because some clients append them.
    """
    name = next((n for n in ("messages", "input", "contents", "prompt") if body.get(n)), "")
    messages = body.get(name)
    if isinstance(messages, str):
        return messages
    others = (
        message
        for message in reversed(messages if isinstance(messages, list) else ())
        if isinstance(message, Mapping) and message.get("role") not in SYSTEM
    )
    last = next(others, {})
    # A tool's output in OpenAI's Responses has a type and no role.
    if last.get("role", "user") != "user" or last.get("type", "message") != "message":
        return ""
    content = last.get("content") or last.get("parts")
    if isinstance(content, list):
        return "\n".join(text for part in content if (text := _part_text(part)))
    return _text(content)


def _part_text(part: Any) -> str:
    """Return the text of one part of a message, or "" if it is a tool's result or a picture."""
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "\n".join(map(_text, part))
    if isinstance(part, Mapping):
        return _text(part.get("text") or part.get("parts") or part.get("content"))
    return ""
