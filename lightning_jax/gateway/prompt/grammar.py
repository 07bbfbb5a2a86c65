"""Grammars for required outputs: a tool call, or an answer that follows a JSON schema."""

import json
from collections.abc import Iterator
from typing import Any

from lightning_jax.engine.grammar.compiler import (
    grammar,
    json_schema,
    literal,
    one_of,
    repeat,
    sequence,
)
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.fields import json_items
from lightning_jax.gateway.prompt.tool_formats import ToolFormat
from lightning_jax.gateway.request import Function, PolicyRequest
from lightning_jax.models.tokenizer import Tokenizer

MAX_PARALLEL_CALLS = 16


def may_call(request: PolicyRequest) -> bool:
    """Return whether calls in the answer are parsed.

    The prompt shows the tools even if calls are not allowed. Without them it would not extend the
    previous prompt.
    """
    return bool(request.functions) and request.tool_choice.mode != "none"


def guarantees_call(request: PolicyRequest) -> bool:
    """Return whether the answer must consist of calls."""
    return bool(request.functions) and request.tool_choice.mode == "required"


def check_size(request: PolicyRequest, max_kib: int) -> None:
    """Raise ApiError if the schemas that the answer must follow are larger than `max_kib`.

    Stop counting there, because the schemas of one request can have a million parts.
    """
    if guarantees_call(request):
        field, schemas = "tools", [function.parameters for function in request.functions]
    elif request.output_schema is not None:
        field, schemas = "response_format", [request.output_schema]
        if may_call(request):
            schemas += [function.parameters for function in request.functions]
    else:
        return
    if _is_longer(schemas, max_kib * 1024):
        raise invalid(
            f"{field} has schemas larger than {max_kib} KiB; shorten them or raise "
            "serve.max_grammar_kib.",
            field,
            "invalid_schema",
            reason="too_large",
        )


def _is_longer(value: Any, most: int) -> bool:
    """Return whether the value has more than about `most` characters or parts as JSON."""
    for item in json_items(value):
        most -= 2
        if isinstance(item, dict | list | tuple | str):
            most -= len(item)
        elif isinstance(item, int):
            most -= item.bit_length() // 4
        if most < 0:
            return True
    return False


def grammar_of(request: PolicyRequest, form: ToolFormat, tokenizer: Tokenizer) -> str | None:
    """Return the grammar that the answer must follow, or None if it is free.

    If the answer must be JSON, the policy may still call the tools that it was offered.
    """
    if guarantees_call(request):
        return grammar(_calls(request, form, tokenizer))
    if request.output_schema is None:
        return None
    answer = json_schema(closed_schema(request.output_schema) if request.output_schema else None)
    if may_call(request):
        return grammar(one_of(answer, _calls(request, form, tokenizer)))
    return grammar(answer)


def _calls(request: PolicyRequest, form: ToolFormat, tokenizer: Tokenizer) -> str:
    names = request.tool_choice.names
    chosen = [f for f in request.functions if not names or f.name in names]
    call = one_of(*(_call(function, form) for function in chosen))
    most = MAX_PARALLEL_CALLS if request.parallel_tool_calls else 1
    begin, end = (literal(mark, tokenizer) for mark in (form.begin, form.end))
    if form.body == "list":
        calls = repeat(call, literal(", "), at_most=most)
        return sequence(begin, literal("["), calls, literal("]"), end)
    marked = sequence(begin, call, end) if form.begin else call
    return repeat(marked, literal(form.between), at_most=most)


def _call(function: Function, form: ToolFormat) -> str:
    head = f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '
    schema = {**(function.parameters or {}), "type": "object"}  # as arguments always are
    return sequence(literal(head), json_schema(closed_schema(schema)), literal("}"))


_COMBINED = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties")


def closed_schema(schema: Any) -> Any:
    """Return the schema with undeclared properties forbidden wherever it declares some.

    Everything that fits the result fits the schema. JSON Schema lets objects have properties of any
    name, and a policy that may invent them has no reason to stop. Objects made of several schemas
    are left as they are, because each schema would forbid the others' properties. Definitions that
    such objects use are left as they are, too.
    """
    return _closed(schema, frozenset(_combined_definitions(schema)))


def _closed(schema: Any, open_definitions: frozenset[str]) -> Any:
    if isinstance(schema, list):
        return [_closed(item, open_definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    alone = not any(key in schema for key in ("properties", "allOf", "$ref"))
    parts = ("items", "prefixItems", *(("anyOf", "oneOf") if alone else ()))
    inner = {
        key: {
            name: part if f"#/{key}/{name}" in open_definitions else _closed(part, open_definitions)
            for name, part in value.items()
        }
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict)
        else _closed(value, open_definitions)
        if key in parts
        else value
        for key, value in schema.items()
    }
    if "properties" in inner and not any(key in inner for key in _COMBINED):
        inner.setdefault("additionalProperties", False)
    return inner


def _combined_definitions(schema: Any) -> Iterator[str]:
    """Yield each `$ref` that an object combines with other parts."""
    if isinstance(schema, list):
        for item in schema:
            yield from _combined_definitions(item)
    if not isinstance(schema, dict):
        return
    all_of = schema.get("allOf", [])
    parts = all_of if isinstance(all_of, list) else []
    if any(key in schema for key in ("properties", "allOf", "anyOf", "oneOf")):
        parts = [*parts, schema]
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            yield part["$ref"]
    for value in schema.values():
        yield from _combined_definitions(value)
