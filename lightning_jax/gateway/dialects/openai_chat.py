"""OpenAI's chat completions API."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import AliasPath, Field

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, CallDelta, Delta, function_call
from lightning_jax.gateway.dialects.base import (
    Dialect,
    Event,
    Reply,
    Sender,
    model_listings,
    to_request,
)
from lightning_jax.gateway.dialects.left_out import without_media
from lightning_jax.gateway.dialects.openai_fields import (
    IGNORED,
    ChoiceFields,
    ChoicesReply,
    Format,
    NestedToolChoice,
    Tools,
    choice_of,
    functions_of,
    template_kwargs,
)
from lightning_jax.gateway.dialects.unknown_fields import check_unknown
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.request import JsonSchema


class ResponseFormat(Format):
    """Format whose schema is in an object of its own."""

    schema_: JsonSchema | None = Field(None, validation_alias=AliasPath("json_schema", "schema"))


class ChatBody(ChoiceFields, extra="allow"):
    messages: list[Any]
    max_completion_tokens: fields.Integer | None = None
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: NestedToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    add_generation_prompt: Annotated[Any, fields.harmless(True)] = None
    continue_final_message: Annotated[Any, fields.harmless(False)] = None
    chat_template: Annotated[Any, fields.harmless()] = None
    audio: Annotated[Any, fields.harmless()] = None
    function_call: Annotated[Any, fields.harmless("none", "auto")] = None
    functions: Annotated[Any, fields.harmless([])] = None
    modalities: Annotated[Any, fields.harmless(["text"])] = None
    web_search_options: Any = None  # of a hosted tool


def parse(body: fields.Body, sender: Sender) -> Reply:
    """Return the reply to a chat body. Raise ApiError that names the first invalid field."""
    chat = ChatBody.read(body)
    check_unknown("chat", chat.model_extra, IGNORED)
    if chat.top_logprobs and not chat.logprobs:
        raise invalid(
            f"top_logprobs is {chat.top_logprobs} but logprobs is not set; set logprobs to true.",
            "top_logprobs",
            reason="needs_logprobs",
        )
    form, limit = chat.response_format, chat.max_completion_tokens
    messages, media = without_media(chat.messages)
    hosted = () if chat.web_search_options is None else ("web_search",)
    include_usage = chat.include_usage()
    request = to_request(
        "chat",
        chat,
        sender,
        id_prefix="chatcmpl-",
        messages=tuple(messages),
        functions=functions_of(chat.tools),
        left_out=(*hosted, *media),
        output_schema=form and form.output_schema("response_format"),
        max_tokens=chat.max_tokens if limit is None else limit,
        chat_template_kwargs=template_kwargs(chat.chat_template_kwargs, chat.reasoning_effort),
    )
    return ChatReply(request, include_usage)


@dataclass
class ChatReply(ChoicesReply):
    """Chat completion bodies and chunks."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    nothing: ClassVar = {"delta": {}}

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **_message(answer)},
                **self._token_fields(index, answer.completion),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return {**self.whole(choices, answers), **self._prompt_fields()}

    def opening(self) -> Iterable[Event]:
        for index in range(len(self.context.prompt_ids)):
            choice = choice_of(index, delta={"role": "assistant", "content": ""})
            yield self.chunk([choice], **self._prompt_fields())

    def delta(self, delta: Delta) -> Iterable[Event]:
        tokens = {}
        if delta.chunk and self.shows_tokens:
            tokens = self._token_fields(delta.choice, delta.chunk)
        if delta.text or (tokens and not delta.calls):
            yield self.chunk([choice_of(delta.choice, delta={"content": delta.text}) | tokens])
            tokens = {}
        if delta.calls:
            calls = [_call_delta(call) for call in delta.calls]
            yield self.chunk([choice_of(delta.choice, delta={"tool_calls": calls}) | tokens])

    def _prompt_fields(self) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self.context.prompt_ids[0])}

    def _token_fields(self, choice: int, tokens: Completion | Chunk) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs:
            logprobs = {"content": self.entries(choice, tokens), "refusal": None}
        ids = {"token_ids": list(tokens.token_ids)} if self.request.return_token_ids else {}
        return {"logprobs": logprobs, **ids}


def _message(answer: Answer) -> dict[str, Any]:
    message = answer.as_message()
    if answer.tool_calls:
        message["content"] = message["content"] or None
    return message


def _call_delta(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **function_call(call.call_id, call.name, call.arguments)}


CHAT = Dialect(
    name="chat",
    paths=("/v1/chat/completions",),
    parse=parse,
    listings=model_listings(
        "/v1/models",
        lambda name, sender: {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "lightning_jax",
        },
        lambda entries: {"object": "list", "data": entries},
    ),
)
