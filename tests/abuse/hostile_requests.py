"""The corpus of hostile requests: what one agent may send to the server that answers all of them.

A case is a function of an `Attacker` that returns the status or statuses it got. Its name says what
it tries. Mutations of whole requests are in malformed.py, and schemas in schema_fuzz.py.
"""

import gzip
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

from attacker import Attacker
from malformed import VALID, mutated, odd_headers, packed
from schema_fuzz import SchemaFuzzer

CHAT = "/v1/chat/completions"
Case = Callable[[Attacker], Any]
CASES: dict[str, Case] = {}
STATUSES: dict[str, int] = {}  # which the server must answer with


def case(function: Case) -> Case:
    """Add a function to the corpus under its own name."""
    CASES[function.__name__] = function
    return function


def refused(status: int) -> Callable[[Case], Case]:
    """Add a function whose requests the server must refuse with this status."""

    def add(function: Case) -> Case:
        STATUSES[function.__name__] = status
        return case(function)

    return add


def chat(**fields: Any) -> dict[str, Any]:
    """A chat request with these fields."""
    message = {"role": "user", "content": "hi"}
    return {"model": "policy", "messages": [message], "max_tokens": 4} | fields


def required_tool(schema: Any) -> dict[str, Any]:
    """A chat request that demands a call of a tool with this schema."""
    function = {"name": "f", "parameters": schema}
    return chat(tools=[{"type": "function", "function": function}], tool_choice="required")


# Grammars


@refused(400)
def schema_with_least_integer(attacker: Attacker) -> int:
    schema = {"type": "object", "properties": {"n": {"const": -9223372036854775808}}}
    return attacker.post(CHAT, required_tool(schema))[0]


@refused(400)
def schema_of_many_patterns(attacker: Attacker) -> int:
    patterns = [{"pattern": f"^(a|b|c){{{n},}}.*{n}.*x{{1,{n}}}"} for n in range(1, 41)]
    schema = {"type": "object", "properties": {"s": {"type": "string", "allOf": patterns}}}
    return attacker.post(CHAT, required_tool(schema))[0]


@case
def schema_nested_deeply(attacker: Attacker) -> int:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return attacker.post(CHAT, required_tool(schema))[0]


@case
def schema_that_refers_to_itself(attacker: Attacker) -> int:
    node = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": node}}
    return attacker.post(CHAT, required_tool(schema))[0]


@case
def schema_of_a_huge_enum(attacker: Attacker) -> int:
    values = [f"value {n} of many" for n in range(20_000)]
    schema = {"type": "object", "properties": {"e": {"enum": values}}}
    return attacker.post(CHAT, required_tool(schema))[0]


@case
def schemas_that_are_slow_one_after_another(attacker: Attacker) -> list[int]:
    def schema(number: int) -> Any:
        patterns = [{"type": "string", "pattern": f"a{{{i}}}.*{number}"} for i in range(12)]
        return {"type": "object", "properties": {"s": {"allOf": patterns}}}

    return attacker.flood(CHAT, [required_tool(schema(n)) for n in range(4)], threads=4)


# Bodies


@refused(413)
def body_of_a_million_keys(attacker: Attacker) -> int:
    fields = ",".join(f'"k{n}":0' for n in range(1_000_000))
    return attacker.post(CHAT, f"{{{fields}}}".encode())[0]


@case
def body_of_unknown_fields(attacker: Attacker) -> int:
    return attacker.post(CHAT, chat(**{f"unknown_{n}": n for n in range(100_000)}))[0]


@refused(413)
def body_of_wide_arrays(attacker: Attacker) -> int:
    wide = b"[" + b",".join([b"[]"] * 2_000_000) + b"]"
    return attacker.post(CHAT, b'{"model": "policy", "messages": ' + wide + b"}")[0]


@refused(413)
def body_of_brackets(attacker: Attacker) -> int:
    return attacker.post(CHAT, b"[" * 4_000_000)[0]


@refused(400)
def arguments_of_two_million_lists(attacker: Attacker) -> int:
    function = {"name": "f", "arguments": "[" + "[]," * 2 * 2**20 + "1]"}
    call = {"id": "c", "type": "function", "function": function}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "hi"}]
    return attacker.post(CHAT, chat(messages=turns))[0]


@case
def body_that_unpacks_to_gigabytes(attacker: Attacker) -> int:
    bomb = gzip.compress(b" " * 200_000_000)
    return attacker.post(CHAT, bomb, **{"Content-Encoding": "gzip"})[0]


@refused(400)
def prompt_of_four_mebibytes(attacker: Attacker) -> int:
    return attacker.post(CHAT, chat(messages=[{"role": "user", "content": "ab " * 1_400_000}]))[0]


@refused(400)
def prompt_of_fifteen_mebibytes(attacker: Attacker) -> int:
    return attacker.post("/v1/completions", {"model": "policy", "prompt": "ab " * 5_000_000})[0]


@case
def history_of_four_thousand_turns(attacker: Attacker) -> int:
    turns = [{"role": ("user", "assistant")[n % 2], "content": "x"} for n in range(4_001)]
    return attacker.post(CHAT, chat(messages=turns))[0]


@case
def history_of_one_answer_repeated(attacker: Attacker) -> int:
    _, raw = attacker.post(CHAT, chat())
    answer = json.loads(raw)["choices"][0]["message"]["content"] or "x"
    turns: list[dict[str, str]] = []
    for n in range(1_000):
        turns += [{"role": "user", "content": str(n)}, {"role": "assistant", "content": answer}]
    return attacker.post(CHAT, chat(messages=[*turns, {"role": "user", "content": "?"}]))[0]


@case
def logit_biases_by_the_hundred_thousand(attacker: Attacker) -> int:
    return attacker.post(CHAT, chat(logit_bias={str(n): 1 for n in range(450_000)}))[0]


@case
def agents_names_by_the_hundred(attacker: Attacker) -> list[int]:
    names = [f"agent-{n}-" + "x" * 4_000 for n in range(100)]
    return [attacker.post(CHAT, chat(max_tokens=1), **{"x-agent-name": n})[0] for n in names]


# Floods


@case
def flood_of_concurrent_calls(attacker: Attacker) -> list[int]:
    bodies = [chat(max_tokens=50, seed=n) for n in range(300)]
    return attacker.flood(CHAT, bodies, threads=150)


@case
def many_long_choices_with_alternatives(attacker: Attacker) -> int:
    return attacker.post(CHAT, chat(n=64, max_tokens=200, logprobs=True, top_logprobs=20))[0]


@case
def stream_of_many_choices_that_is_asked_for_again(attacker: Attacker) -> list[int]:
    """Join the ended call, so that all of its events are due at once."""
    body = chat(n=64, max_tokens=50, logprobs=True, top_logprobs=20, stream=True)
    key = {"Idempotency-Key": "1"}
    return [attacker.post(CHAT, body, **key)[0] for _ in range(2)]


@case
def stream_that_ends_with_all_alternatives(attacker: Attacker) -> int:
    body = {"model": "policy", "input": "hi", "max_output_tokens": 400, "stream": True}
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "ignore_eos": True}
    return attacker.post("/v1/responses", body | more)[0]


@case
def long_prompts_echoed_with_alternatives(attacker: Attacker) -> int:
    body = {"model": "policy", "prompt": ["ab " * 160] * 20, "max_tokens": 1}
    return attacker.post("/v1/completions", body | {"echo": True, "logprobs": 20})[0]


@case
def choices_beyond_every_queue(attacker: Attacker) -> int:
    return attacker.post(CHAT, chat(n=100_000))[0]


@case
def saved_responses_of_long_input(attacker: Attacker) -> list[int]:
    text = "ab " * 100
    bodies = [
        {"model": "policy", "input": text + str(n), "max_output_tokens": 1} for n in range(60)
    ]
    return attacker.flood("/v1/responses", bodies, threads=8)


@case
def saved_responses_with_megabytes_of_metadata(attacker: Attacker) -> list[int]:
    metadata = {f"k{n}": "x" * 500_000 for n in range(16)}
    ask = {"model": "policy", "max_output_tokens": 1, "metadata": metadata}
    bodies = [ask | {"input": str(n)} for n in range(10)]
    return attacker.flood("/v1/responses", bodies, threads=2)


@case
def calls_that_are_given_up_and_made_again(attacker: Attacker) -> int:
    body = json.dumps(chat(max_tokens=300)).encode()
    path = attacker.base_url.split("/", 3)[3]
    head = (
        f"POST /{path}/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {attacker.api_key}\r\nx-stainless-read-timeout: 0.001\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return attacker.hold_connections(100, head.encode() + body, 0.2)


@case
def idle_connections(attacker: Attacker) -> int:
    return attacker.hold_connections(400, b"", 1.0)


@case
def connections_that_send_half_a_request(attacker: Attacker) -> int:
    return attacker.hold_connections(400, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", 1.0)


@case
def call_that_outlives_its_client(attacker: Attacker) -> int:
    return attacker.hold_connections(
        40,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{",
        0.5,
    )


# Records of others


def _span(trace_id: str, span_id: str, **attributes: Any) -> dict[str, Any]:
    values = [{"key": key, "value": {"stringValue": str(v)}} for key, v in attributes.items()]
    return {
        "traceId": trace_id,
        "spanId": span_id,
        "name": "forged",
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": values,
    }


def _spans(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def _guesses(rollout_id: str) -> list[tuple[str, str]]:
    """Trace and span ids that follow from a rollout's id by the usual digests."""
    found = []
    for digest in (hashlib.md5, hashlib.sha1, hashlib.sha256, hashlib.blake2b):
        name = digest(rollout_id.encode()).hexdigest()
        found += [(name[:32], name[:16]), (name[:32], name[32:48] or name[16:32])]
    short = hashlib.blake2b(rollout_id.encode(), digest_size=16).hexdigest()
    root = hashlib.blake2b(rollout_id.encode(), digest_size=8).hexdigest()
    return [*found, (short, short[:16]), (short, root)]


@case
def spans_of_a_neighbour_by_guessed_ids(attacker: Attacker) -> list[int]:
    spans = [_span(*ids, **{"gen_ai.tool.name": "x"}) for ids in _guesses(attacker.neighbour_id)]
    body = _spans(*spans)
    places = (attacker.rollout_url, attacker.server)
    return [attacker.post("/v1/traces", body, base=base)[0] for base in places]


@case
def spans_with_huge_attributes(attacker: Attacker) -> int:
    span = _span("a" * 32, "b" * 16, **{"k" * 10_000_000: "v"})
    return attacker.post("/v1/traces", _spans(span))[0]


@case
def spans_by_the_thousand(attacker: Attacker) -> int:
    spans = [_span("a" * 32, f"{n + 1:016x}") for n in range(20_000)]
    return attacker.post("/v1/traces", _spans(*spans))[0]


@refused(400)
def spans_by_the_million_without_a_field(attacker: Attacker) -> int:
    def field(number: int, payload: bytes) -> bytes:
        size, length = len(payload), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + payload

    body = field(1, field(2, b"\x12\x00" * 7 * 2**20))
    return attacker.post("/v1/traces", body, **{"Content-Type": "application/x-protobuf"})[0]


@case
def key_used_outside_of_its_rollout(attacker: Attacker) -> int:
    return attacker.post(CHAT, chat(max_tokens=400), base=attacker.server)[0]


@case
def rewards_beyond_all_bounds(attacker: Attacker) -> list[int]:
    values = [1e308, -1e308, float("inf"), float("nan"), "1", None, 10**400]
    return [attacker.post("/reward", {"reward": value})[0] for value in values]


@case
def rewards_of_one_call_that_add_up_to_infinity(attacker: Attacker) -> list[int]:
    _, raw = attacker.post(CHAT, chat())
    body = {"reward": 1.7e308, "response_id": json.loads(raw)["id"]}
    return [attacker.post("/reward", body)[0] for _ in range(3)]


@case
def paths_that_climb(attacker: Attacker) -> list[int]:
    names = ["gpt-x/../../../admin/delete", "gpt-x%2f..%2fadmin", "gpt-x%3fkey=1", "..", "%2e%2e"]
    body = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    return [attacker.post(f"/v1beta/models/{name}:generateContent", body)[0] for name in names]


# Requests by chance


def random_request(seed: str, attacker: Attacker) -> list[int]:
    """Send one request that is nearly right, or a schema that nearly is one."""
    rng = random.Random(seed)
    if rng.random() < 0.3:
        schema = {"type": "object", "properties": {"a": SchemaFuzzer(seed).schema()}}
        return [attacker.post(CHAT, required_tool(schema))[0]]
    path = rng.choice(list(VALID))
    headers = odd_headers(rng) if rng.random() < 0.3 else {}
    body = mutated(VALID[path], rng)
    if "Content-Encoding" in headers:
        body = packed(body, rng)
    latin = {k: v.encode("utf-8", "surrogateescape").decode("latin-1") for k, v in headers.items()}
    return [attacker.post(path, body, **latin)[0]]
