"""Requests that another server took, read for the record. Nothing is refused. Pure functions."""

from collections.abc import Mapping
from typing import Any

from lightning_jax.gateway.dialects.all import DIALECTS
from lightning_jax.gateway.dialects.base import Dialect, Sender
from lightning_jax.gateway.fields import as_object
from lightning_jax.gateway.request import PolicyRequest
from lightning_jax.gateway.saved_responses import SavedConversations
from lightning_jax.gateway.unknown_fields import allow_unknown

# Dialects by a field of their requests, for calls that were recorded without one.
MARKS = {"system": "anthropic", "messages": "chat", "input": "responses", "prompt": "completions"}
PATH = {"model": "", "method": ""}  # of Gemini's requests, which does not matter here


def read_request(body: Mapping[str, Any], dialect: str = "") -> PolicyRequest | None:
    """Return the request in a body, without the fields that its dialect refuses.

    None if what is left has no prompt. Without a dialect, the body's fields suggest one.
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
        except Exception as error:  # noqa: BLE001 the other server may have taken it
            refused = (getattr(error, "param", None) or "").partition(".")[0]
            if refused not in body:
                return None
            body = {name: value for name, value in body.items() if name != refused}
