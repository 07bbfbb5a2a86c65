"""Requests that are nearly right, made from a seed: bodies with wrong parts, odd headers, codings.

The standard library is enough for them, so that the process of an attacker can make them.
"""

import copy
import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

# A body for each API, with most of its fields.
VALID: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("valid_bodies.json").read_text()
)
GARBAGE: list[Any] = [
    *(None, True, 0, -1, 1.5, 1e308, 10**30, "", "x", "ü\ud800", "a" * 3000, [], {}, [[]]),
    *([None], {"": None}, {"type": "x"}, [{"type": 5}], [1, "a", {}], {"type": ["text"]}),
    *("policy", "gpt-4", float("nan"), float("inf"), -(10**400), {"role": "user"}, "null"),
]
HEADERS: dict[str, list[str]] = {
    "x-stainless-retry-count": ["9" * 20, "9" * 5000, "²", "٣", "-1", "x", ""],
    "x-stainless-read-timeout": ["nan", "inf", "-1", "1e-9", "1e999", "9" * 5000, "x"],
    "Idempotency-Key": ["", "x" * 4000, "ü\udcff"],
    "x-agent-name": ["", "x" * 4000, "ü\udcff", "a\tb"],
    "traceparent": [f"00-{'0' * 32}-{'0' * 16}-01", f"00-{'f' * 32}-{'e' * 16}-01", "x", "00-"],
    "tracestate": ["x", "a=" + "b" * 3000, ",,=,"],
    "Content-Type": ["", "x", "application/json; charset=utf-32", "multipart/form-data", "a/b;=;"],
    "Content-Encoding": ["gzip", "deflate", "br", "zstd", "identity", "gzip, gzip", "x", "GZIP"],
    "Accept": ["", "x"],
    "Authorization": ["Bearer right-key", "Bearer", "Basic ü\udcff", "Bearer " + "x" * 4000],
    "x-api-key": ["ü\udcff", ""],
    "Expect": ["100-continue"],
}


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    """Return the path of every nested value, including containers."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [p for key, child in items for p in [(*path, key), *_paths(child, (*path, key))]]


def mutated(valid: dict[str, Any], rng: random.Random) -> bytes:
    """Return the body with 1 to 3 values replaced, removed, repeated or renamed, or garbage."""
    if rng.random() < 0.05:
        raw = json.dumps(valid).encode()
        return rng.choice([raw[: rng.randrange(len(raw))], rng.randbytes(40), b"", b"[" * 2000])
    body: Any = copy.deepcopy(valid)
    for _ in range(rng.choice([1, 1, 2, 3])):
        paths = _paths(body)
        if not paths:
            break
        *parents, key = rng.choice(paths)
        target = body
        for parent in parents:
            target = target[parent]
        match rng.randrange(4):
            case 0 if isinstance(target, dict):
                del target[key]
            case 1 if isinstance(target, list):
                target += [copy.deepcopy(target[key])] * rng.choice([1, 30])
            case 2 if isinstance(target, dict):
                target[rng.choice(["type", "x", "content", ""])] = target.pop(key)
            case _:
                target[key] = copy.deepcopy(rng.choice(GARBAGE))
    return json.dumps(body).encode()


def odd_headers(rng: random.Random) -> dict[str, str]:
    """Return headers that the server reads, with values that it may not expect."""
    return {
        name: rng.choice(HEADERS[name])
        for name in rng.sample(sorted(HEADERS), rng.choice([1, 2, 4]))
    }


def packed(body: bytes, rng: random.Random) -> bytes:
    """Return the body, plain or compressed, and possibly cut or with extra bytes."""
    whole = rng.choice([gzip.compress, zlib.compress, lambda raw: zlib.compress(raw)[2:-4]])(body)
    return rng.choice([body, whole, whole, whole[:-3], whole + b"x", whole * 2, b""])
