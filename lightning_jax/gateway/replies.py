"""Whole answers as JSON responses, without holding the event loop for large ones."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from lightning_jax.gateway.answer import Answer
from lightning_jax.gateway.dialects.base import Reply

SMALL = 2000  # tokens and alternatives to them; writing so many takes the event loop 20 ms
BATCH = 64  # pieces that are written at a time
DEPTH = 5  # levels of a body that are written one by one


async def json_reply(reply: Reply, answers: tuple[Answer, ...]) -> web.Response:
    """Return the response with the reply's body.

    A large one is written in a thread, and in pieces: Python's JSON encoder lets no other thread
    run until it is done.
    """
    if _size(answers) <= SMALL:
        return web.json_response(reply.body(answers))

    def write() -> bytes:
        pieces: list[str] = []
        for piece in _pieces(reply.body(answers), DEPTH):
            pieces.append(piece)
            if len(pieces) % BATCH == 0:
                time.sleep(0)  # lets other threads run now, where they would wait for 5 ms
        return "".join(pieces).encode()

    body = await asyncio.to_thread(write)
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _size(answers: tuple[Answer, ...]) -> int:
    """Return how many tokens and alternatives the answers have; those of scored prompts too."""
    size = 0
    for answer in answers:
        completion, scores = answer.completion, answer.completion.prompt_scores
        size += len(completion.token_ids) + sum(map(len, completion.top_logprobs))
        size += sum(map(len, scores.top_logprobs)) + len(scores.logprobs) if scores else 0
    return size


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Write JSON as `json.dumps` does."""
    if depth and value and isinstance(value, dict):
        before = "{"
        for name, item in value.items():
            yield f"{before}{json.dumps(name)}: "
            yield from _pieces(item, depth - 1)
            before = ", "
        yield "}"
    elif depth and value and isinstance(value, list | tuple):
        before = "["
        for item in value:
            yield before
            yield from _pieces(item, depth - 1)
            before = ", "
        yield "]"
    else:
        yield json.dumps(value)
