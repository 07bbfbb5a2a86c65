"""An honest agent: a conversation of three short calls, and how long it waited for each."""

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lightning_jax.types import LLM

TURNS = ("What is it?", "And then?", "Why?")


@dataclass(frozen=True)
class Conversation:
    """The token ids of each answer, and the longest wait for one in seconds."""

    token_ids: tuple[tuple[int, ...], ...]
    longest_wait_s: float


def converse(llm: LLM, max_tokens: int = 8) -> Conversation:
    """Hold the conversation; raise AssertionError for any answer but 200."""
    url = urlsplit(llm.base_url)
    headers = {"Authorization": f"Bearer {llm.api_key}", "Content-Type": "application/json"}
    messages: list[dict[str, Any]] = []
    sampled, waits = [], []
    for words in TURNS:
        messages.append({"role": "user", "content": words})
        body = {
            "model": llm.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "return_token_ids": True,
        }
        started = time.monotonic()
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        reply = json.loads(answer.read())
        connection.close()
        waits.append(time.monotonic() - started)
        assert answer.status == 200, reply
        choice = reply["choices"][0]
        sampled.append(tuple(choice["token_ids"]))
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return Conversation(tuple(sampled), max(waits))
