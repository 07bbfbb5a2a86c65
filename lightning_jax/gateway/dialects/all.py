"""All dialects that the gateway serves, and requests that another server took, read by them."""

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
from lightning_jax.gateway.fields import as_object
from lightning_jax.gateway.request import PolicyRequest

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
PATH = {"model": "", "method": ""}  # of Gemini's requests, which does not matter here


def read_request(body: Mapping[str, Any], dialect: str = "") -> PolicyRequest | None:
    """Return the request in a body, without the fields that its dialect refuses.

    None if one of them holds a part of the prompt. Without a dialect, the fields suggest one.
    """
    name = dialect or next((MARKS[mark] for mark in MARKS if mark in body), "")
    found = (_read(reader, {"max_tokens": 1, **body}) for reader in DIALECTS if reader.name == name)
    return next((asked for asked in found if asked and (asked.messages or asked.prompts)), None)


def _read(dialect: Dialect, body: dict[str, Any]) -> PolicyRequest | None:
    sender = Sender({}, PATH, {}, "", SavedConversations(), accepts_any_model=True)
    while True:
        try:
            with allow_unknown():
                return dialect.parse(as_object(body), sender)[0]
        except Exception as error:  # noqa: BLE001  (of a body that the other server took)
            refused = (getattr(error, "param", None) or "").partition(".")[0]
            if refused not in body or refused in TEXTS:
                return None
            body = {name: value for name, value in body.items() if name != refused}
