"""Schemas of Gemini's API, and their conversion to JSON schemas."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from lightning_jax.gateway import fields
from lightning_jax.gateway.request import JsonSchema

MAX_PROPERTIES = 10_000  # of one object of a schema


class CamelFields(fields.Fields):
    """Fields with camel case names. The API accepts snake case too."""

    model_config = ConfigDict(
        alias_generator=to_camel, validate_by_alias=True, validate_by_name=True
    )


Type = Literal["string", "number", "integer", "boolean", "array", "object", "null"]
# 64-bit integers, which this API sends as strings.
Size = Annotated[
    Any, BeforeValidator(lambda v: int(v) if isinstance(v, str) and v.isdecimal() else v)
]
_SAME = {
    *("title", "description", "enum", "pattern", "minimum", "maximum", "default", "min_items"),
    *("max_items", "min_length", "max_length", "min_properties", "max_properties"),
}


def _bounded(properties: Any) -> Any:
    # Unlike a list, a dictionary is read to its end before its first error is raised.
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise PydanticCustomError("too_many", "expected at most {most}", {"most": MAX_PROPERTIES})
    return properties


def _lower(kind: Any) -> Any:
    if kind == "TYPE_UNSPECIFIED":
        return None
    return kind.lower() if isinstance(kind, str) else kind


class Schema(CamelFields):
    """Schema in OpenAPI's subset: types in capitals, nullable, no references."""

    type: Annotated[Type | None, BeforeValidator(_lower)] = None
    nullable: Any = None
    format: Any = None
    properties: Annotated[dict[str, "Schema"] | None, BeforeValidator(_bounded)] = None
    property_ordering: fields.Strings = ()
    required: fields.Strings = ()
    items: "Schema | None" = None
    any_of: "fields.Listed[Schema] | None" = None
    additional_properties: "bool | Schema | None" = None
    ref: Annotated[Any, fields.harmless("")] = None
    title: Any = None
    description: Any = None
    enum: Any = None
    pattern: Any = None
    minimum: Any = None
    maximum: Any = None
    default: Any = None
    min_items: Size = None
    max_items: Size = None
    min_length: Size = None
    max_length: Size = None
    min_properties: Size = None
    max_properties: Size = None

    def json_schema(self) -> JsonSchema:
        """Return a JSON schema with properties in the order that this one asks for."""
        plain = self.model_dump(include=_SAME, exclude_none=True, by_alias=True)
        if self.type:
            plain["type"] = self.type
        if self.type == "string" and self.format not in (None, "enum"):
            plain["format"] = self.format  # formats of numbers only set a number of bits
        if self.properties:
            names = dict.fromkeys((*self.property_ordering, *self.properties))
            plain["properties"] = {
                name: self.properties[name].json_schema()
                for name in names
                if name in self.properties
            }
        if self.required:
            plain["required"] = list(self.required)
        if self.items:
            plain["items"] = self.items.json_schema()
        if self.any_of:
            plain["anyOf"] = [option.json_schema() for option in self.any_of]
        if (more := self.additional_properties) is not None:
            plain["additionalProperties"] = more if isinstance(more, bool) else more.json_schema()
        return {"anyOf": [plain, {"type": "null"}]} if self.nullable is True else plain


_TYPES = frozenset(get_args(Type))
# Parts of a JSON schema that are schemas, or have schemas as values or items.
_SCHEMAS = frozenset(
    (
        *("items", "prefixItems", "contains", "additionalProperties", "propertyNames", "not"),
        *("anyOf", "oneOf", "allOf", "if", "then", "else", "unevaluatedProperties"),
    )
)
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions"))


def lower_types(schema: Any) -> Any:
    """Return a JSON schema with the names of types in small letters.

    This API takes its own names in capitals there, too.
    """
    if isinstance(schema, list):
        return [lower_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = dict(schema)
    for key, value in schema.items():
        if key == "type":
            plain[key] = (
                [*map(_lower_known, value)] if isinstance(value, list) else _lower_known(value)
            )
        elif key in _SCHEMAS:
            plain[key] = lower_types(value)
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            plain[key] = {name: lower_types(part) for name, part in value.items()}
    return plain


def _lower_known(kind: Any) -> Any:
    return lowered if isinstance(kind, str) and (lowered := kind.lower()) in _TYPES else kind
