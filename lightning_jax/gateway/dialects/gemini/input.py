"""Fields of Gemini's requests, and their conversion to messages, functions and schemas."""

import json
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from lightning_jax.gateway import fields
from lightning_jax.gateway.dialects.base import add_assistant, tool_call
from lightning_jax.gateway.request import MAX_CHOICES, Function, JsonSchema, ToolChoice
from lightning_jax.types import Message

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


class FunctionCall(CamelFields):
    id: Any = None
    name: fields.Name
    args: fields.Arguments = Field({})

    def message(self) -> Message:
        return tool_call(self.name, self.args, self.id if isinstance(self.id, str) else None)


class FunctionResponse(CamelFields):
    id: Any = None
    name: Any = None
    response: Any = None

    def message(self) -> Message:
        ids = {"name": self.name, "tool_call_id": self.id}
        ids = {name: text for name, text in ids.items() if isinstance(text, str)}
        return {"role": "tool", "content": self._result(), **ids}

    def _result(self) -> str:
        """Return the response as text, unwrapped if it has only a result or an output."""
        match self.response:
            case {"result": value, **rest} | {"output": value, **rest} if not rest:
                return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return json.dumps(self.response, ensure_ascii=False)


class Part(CamelFields, extra="allow"):
    """Text, a call or a response."""

    text: str | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    thought: Any = None
    thought_signature: Any = None
    part_metadata: Any = None
    media_resolution: Any = None
    video_metadata: Any = None

    @model_validator(mode="after")
    def _check(self) -> "Part":
        others = [value for value in (self.model_extra or {}).values() if value is not None]
        contents = (self.text, self.function_call, self.function_response)
        num_known = sum(value is not None for value in contents)
        if others or (num_known != 1 and self.thought is not True):
            raise PydanticCustomError(
                "not_text", "expected one of text, functionCall or functionResponse"
            )
        return self


class Content(CamelFields):
    role: Literal["model", "user", "function", "tool", ""] | None = None
    parts: fields.Listed[Part] | None = None

    @model_validator(mode="after")
    def _check(self) -> "Content":
        for part in self.parts or ():
            other = part.function_response if self.role == "model" else part.function_call
            if other:
                raise PydanticCustomError(
                    "wrong_role", "move its functionCall or functionResponse to the other role"
                )
        return self

    def add_to(self, messages: list[Message]) -> None:
        """Append the content, with function responses as separate messages."""
        # Thoughts are of another model: the policy returns its own as text.
        thoughts = [part.text or "" for part in self.parts or () if part.thought is True]
        parts = [part for part in self.parts or () if part.thought is not True]
        if self.role == "model":
            calls = [part.function_call.message() for part in parts if part.function_call]
            text = "".join(part.text or "" for part in parts)
            add_assistant(messages, text, calls, "".join(thoughts))
            return
        for _, group in groupby(parts, lambda part: part.text is None):
            items = [part.function_response or part.text or "" for part in group]
            texts = [item for item in items if isinstance(item, str)]
            messages += [item.message() for item in items if not isinstance(item, str)]
            if texts:
                messages.append({"role": "user", "content": "\n".join(texts)})


class TextPart(CamelFields):
    text: str


class Instruction(CamelFields):
    parts: fields.Listed[TextPart] | None = None


class Declaration(CamelFields):
    name: fields.Name
    description: str | None = None
    parameters: Schema | None = None
    parameters_json_schema: JsonSchema | None = None

    def function(self) -> Function:
        schema = self.parameters_json_schema
        if schema is None and self.parameters:
            schema = self.parameters.json_schema()
        return Function(self.name, self.description or "", schema)


class Tool(CamelFields, extra="allow"):
    function_declarations: fields.Listed[Declaration] | None = None

    @model_validator(mode="after")
    def _check(self) -> "Tool":
        if any(value is not None for value in (self.model_extra or {}).values()):
            raise PydanticCustomError(
                "unsupported", "pass functionDeclarations, because hosted tools are not supported"
            )
        return self


class FunctionCalling(CamelFields):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "VALIDATED", "ANY", "NONE"] | None = None
    allowed_function_names: fields.Strings = ()

    def tool_choice(self) -> ToolChoice:
        if self.mode == "NONE":
            return ToolChoice("none")
        return ToolChoice("required" if self.mode == "ANY" else "auto", self.allowed_function_names)


class ToolConfig(CamelFields):
    function_calling_config: FunctionCalling | None = None


class ThinkingConfig(CamelFields):
    thinking_budget: Any = None  # in tokens; 0: none


class Config(CamelFields, fields.SamplingFields, extra="allow"):
    """Fields of generationConfig."""

    candidate_count: Annotated[fields.Integer, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_output_tokens: fields.Integer | None = None
    stop_sequences: fields.Strings | None = None
    response_logprobs: bool | None = None
    logprobs: fields.TopLogprobs | None = None
    response_mime_type: Literal["", "text/plain", "application/json"] | None = None
    response_json_schema: JsonSchema | None = None
    response_schema: Schema | None = None
    response_modalities: Annotated[Any, fields.harmless([], ["TEXT"], ["text"])] = None
    speech_config: Annotated[Any, fields.harmless()] = None
    image_config: Annotated[Any, fields.harmless()] = None
    audio_transcription_config: Annotated[Any, fields.harmless()] = None
    thinking_config: ThinkingConfig | None = None
    # Fields that change nothing here.
    media_resolution: Any = None
    enable_enhanced_civic_answers: Any = None

    @property
    def thinks(self) -> bool:
        return self.thinking_config is None or self.thinking_config.thinking_budget != 0

    def output_schema(self) -> JsonSchema | None:
        if self.response_json_schema is not None:
            return self.response_json_schema
        if self.response_schema:
            return self.response_schema.json_schema()
        return {} if self.response_mime_type == "application/json" else None


class GeminiBody(CamelFields, extra="allow"):
    contents: fields.Listed[Content] | None = None
    system_instruction: Instruction | None = None
    tools: fields.Listed[Tool] | None = None
    tool_config: ToolConfig | None = None
    generation_config: dict[str, Any] | None = None
    cached_content: Annotated[Any, fields.harmless("")] = None
    # Fields that change nothing here.
    model: Any = None
    safety_settings: Any = None
    labels: Any = None
    service_tier: Any = None
    store: Any = None

    def messages(self) -> tuple[Message, ...]:
        messages: list[Message] = []
        if self.system_instruction and (parts := self.system_instruction.parts):
            text = "\n".join(part.text for part in parts)
            messages.append({"role": "system", "content": text})
        for content in self.contents or ():
            content.add_to(messages)
        return tuple(messages)

    def functions(self) -> tuple[Function, ...]:
        declared = [d for tool in self.tools or () for d in tool.function_declarations or ()]
        return tuple(declaration.function() for declaration in declared)

    def tool_choice(self) -> ToolChoice | None:
        calling = self.tool_config and self.tool_config.function_calling_config
        return calling.tool_choice() if calling else None


class CountBody(CamelFields):
    generate_content_request: dict[str, Any] | None = None
