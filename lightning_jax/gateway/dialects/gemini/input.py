"""Fields of Gemini's requests, and their conversion to messages, functions and schemas."""

import json
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic.alias_generators import to_snake
from pydantic_core import PydanticCustomError

from lightning_jax.gateway import fields
from lightning_jax.gateway.dialects.base import add_assistant, tool_call
from lightning_jax.gateway.dialects.gemini.schema import CamelFields, Schema, lower_types
from lightning_jax.gateway.dialects.left_out import GEMINI_HOSTED, kind_of_file, sentence
from lightning_jax.gateway.request import MAX_CHOICES, Function, JsonSchema, ToolChoice
from lightning_jax.types import Message


class FunctionCall(CamelFields):
    id: Any = None
    name: fields.Name
    args: fields.Arguments = Field({})

    def message(self) -> Message:
        return tool_call(self.name, self.args, self.id if isinstance(self.id, str) else None)


class File(CamelFields):
    mime_type: str = ""


class FileFields(CamelFields):
    """Picture or other file, in the message or by its address."""

    inline_data: File | None = None
    file_data: File | None = None

    @property
    def file(self) -> File | None:
        return self.inline_data or self.file_data

    @property
    def kind(self) -> str:
        return kind_of_file(self.file.mime_type if self.file else "")


class Media(FileFields):
    """File in a function's response."""

    @model_validator(mode="after")
    def _check(self) -> "Media":
        if self.file is None:
            raise PydanticCustomError("missing", "expected inlineData or fileData")
        return self


class FunctionResponse(CamelFields):
    id: Any = None
    name: Any = None
    response: Any = None
    parts: "fields.Listed[Media] | None" = None

    def message(self) -> Message:
        ids = {"name": self.name, "tool_call_id": self.id}
        ids = {name: text for name, text in ids.items() if isinstance(text, str)}
        texts = [self._result(), *(sentence(part.kind) for part in self.parts or ())]
        return {"role": "tool", "content": "\n".join(texts), **ids}

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
        num_known = sum(value is not None for value in self._contents())
        if others or (num_known != 1 and self.thought is not True):
            raise PydanticCustomError(
                "not_text", "expected one of text, functionCall or functionResponse"
            )
        return self

    @property
    def shown_text(self) -> str:
        return self.text or ""

    def _contents(self) -> tuple[Any, ...]:
        return (self.text, self.function_call, self.function_response)


class Content(CamelFields):
    role: Literal["model", "user", "function", "tool", ""] | None = None
    parts: fields.Listed[Part] | None = None

    @property
    def media(self) -> list[str]:
        """Kinds of media that the policy does not see."""
        responses = (part.function_response for part in self.parts or ())
        return [media.kind for r in responses if r for media in r.parts or ()]

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
        for _, group in groupby(parts, lambda part: part.function_response is not None):
            items = [part.function_response or part.shown_text for part in group]
            texts = [item for item in items if isinstance(item, str)]
            messages += [item.message() for item in items if not isinstance(item, str)]
            if texts:
                messages.append({"role": "user", "content": "\n".join(texts)})


class ResultPart(Part, FileFields):
    """Part of a content with function responses. Media beside them are results, too."""

    @property
    def shown_text(self) -> str:
        return sentence(self.kind) if self.file else self.text or ""

    def _contents(self) -> tuple[Any, ...]:
        return (*super()._contents(), self.file)


class ResultsContent(Content):
    parts: fields.Listed[ResultPart] | None = None  # type: ignore[assignment]

    @property
    def media(self) -> list[str]:
        return [*super().media, *(part.kind for part in self.parts or () if part.file)]


def _content_kind(content: Any) -> str:
    match content:
        case {"parts": [*parts]} if any(
            isinstance(part, dict) and part.keys() & {"functionResponse", "function_response"}
            for part in parts
        ):
            return "results content"
    return "plain content"


AnyContent = Annotated[
    Annotated[Content, Tag("plain content")] | Annotated[ResultsContent, Tag("results content")],
    Discriminator(_content_kind),
]


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
        schema = lower_types(self.parameters_json_schema)
        if schema is None and self.parameters:
            schema = self.parameters.json_schema()
        return Function(self.name, self.description or "", schema)


class Tool(CamelFields, extra="allow"):
    function_declarations: fields.Listed[Declaration] | None = None

    @property
    def hosted(self) -> list[str]:
        extra = (self.model_extra or {}).items()
        return [to_snake(name[:100]) for name, value in extra if value is not None]

    @model_validator(mode="after")
    def _check(self) -> "Tool":
        if not GEMINI_HOSTED.issuperset(self.hosted):
            raise PydanticCustomError(
                "unsupported", "pass functionDeclarations, because this tool is not supported"
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
            return lower_types(self.response_json_schema)
        if self.response_schema:
            return self.response_schema.json_schema()
        return {} if self.response_mime_type == "application/json" else None


class GeminiBody(CamelFields, extra="allow"):
    contents: fields.Listed[AnyContent] | None = None
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

    def left_out(self) -> tuple[str, ...]:
        """Return the names of hosted tools, and the kinds of media that the policy does not see."""
        hosted = (name for tool in self.tools or () for name in tool.hosted)
        return (*hosted, *(kind for content in self.contents or () for kind in content.media))

    def functions(self) -> tuple[Function, ...]:
        declared = [d for tool in self.tools or () for d in tool.function_declarations or ()]
        return tuple(declaration.function() for declaration in declared)

    def tool_choice(self) -> ToolChoice | None:
        calling = self.tool_config and self.tool_config.function_calling_config
        return calling.tool_choice() if calling else None


class CountBody(CamelFields):
    generate_content_request: dict[str, Any] | None = None
