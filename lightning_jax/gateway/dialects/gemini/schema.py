"""Gemini's field names and schemas, converted to camel case and JSON schemas."""

import re
from collections.abc import Mapping
from typing import Any

from lightning_jax.gateway import fields
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.request import JsonSchema

_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_SAME = ("title", "description", "enum", "pattern", "minimum", "maximum", "default")
# 64-bit integers, which this API sends as strings.
_SIZES = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def camel(message: Mapping[str, Any]) -> fields.Body:
    """Return the fields under their camel case names. The API accepts snake case too."""
    return {
        re.sub("_([a-z])", lambda match: match[1].upper(), name): value
        for name, value in message.items()
    }


def json_schema(schema: Any, where: str, param: str) -> JsonSchema:
    """Convert a schema in OpenAPI's subset (types in capitals, nullable) to a JSON schema.

    Properties are in the order that it asks for. Raise ApiError if it is not a schema.
    """
    if not isinstance(schema, dict):
        raise invalid(
            f"{where} is {fields.brief(schema)}; expected a schema object.",
            param,
            reason="wrong_type",
            key=where,
        )
    schema = camel(schema)
    if schema.get("ref") or schema.get("$ref"):
        raise invalid(
            f"{where} has a reference, which is not supported; inline the schema.",
            param,
            reason="unsupported",
            key=where,
        )
    plain: JsonSchema = {name: schema[name] for name in _SAME if schema.get(name) is not None}
    for name in _SIZES:
        if (size := schema.get(name)) is not None:
            plain[name] = int(size) if isinstance(size, str) and size.isdecimal() else size
    plain |= _type(schema.get("type"), where, param)
    if plain.get("type") == "string" and schema.get("format") not in (None, "enum"):
        plain["format"] = schema["format"]  # formats of numbers only set a number of bits
    plain |= _inner(schema, where, param)
    if schema.get("nullable") is True:
        return {"anyOf": [plain, {"type": "null"}]}
    return plain


def _type(kind: Any, where: str, param: str) -> JsonSchema:
    if kind is None or kind == "TYPE_UNSPECIFIED":
        return {}
    if isinstance(kind, str) and kind.lower() in _TYPES:
        return {"type": kind.lower()}
    raise invalid(
        f"{where}.type is {fields.brief(kind)}; expected one of {', '.join(_TYPES).upper()}.",
        param,
        reason="unknown",
        key=f"{where}.type",
    )


def _inner(schema: fields.Body, where: str, param: str) -> JsonSchema:
    """Return the nested schemas of a schema."""
    found: JsonSchema = {}
    properties = fields.field(schema, "properties", dict, {}, "an object of schemas")
    if properties:
        order = fields.strings(schema, "propertyOrdering")
        names = [*(n for n in order if n in properties), *(n for n in properties if n not in order)]
        found["properties"] = {
            name: json_schema(properties[name], f"{where}.properties.{name[:50]}", param)
            for name in names
        }
    if schema.get("required"):
        found["required"] = list(fields.strings(schema, "required"))
    if schema.get("items") is not None:
        found["items"] = json_schema(schema["items"], f"{where}.items", param)
    if schema.get("anyOf"):
        options = fields.objects(schema, "anyOf")
        found["anyOf"] = [json_schema(option, f"{where}.anyOf", param) for option in options]
    more = schema.get("additionalProperties")
    if isinstance(more, bool):
        found["additionalProperties"] = more
    elif more is not None:
        found["additionalProperties"] = json_schema(more, f"{where}.additionalProperties", param)
    return found
