"""OpenAI's responses API.

A stored conversation is all messages up to an answer, under that answer's id. Instructions apply to
one request only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion
from lightning_jax.errors import brief
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, CallDelta, Delta
from lightning_jax.gateway.dialects.base import (
    NAMED_SSE,
    Dialect,
    Event,
    Listing,
    Reply,
    Sender,
    to_request,
)
from lightning_jax.gateway.dialects.openai_fields import (
    IGNORED,
    Format,
    OpenAIFields,
    ToolChoiceField,
    template_kwargs,
)
from lightning_jax.gateway.dialects.openai_responses.input import read_input
from lightning_jax.gateway.dialects.openai_responses.output import Output
from lightning_jax.gateway.dialects.openai_responses.tools import (
    Offer,
    Tools,
    hosted_types,
    offers_of,
)
from lightning_jax.gateway.dialects.saved_responses import SavedResponse
from lightning_jax.gateway.dialects.unknown_fields import check_unknown
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.request import PolicyRequest
from lightning_jax.types import Message

LOGPROBS: Final = "message.output_text.logprobs"
_IGNORED = {"max_tool_calls", "stream_options", "prompt_cache_options", *IGNORED}


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(item, str) for item in value.values()):
        raise PydanticCustomError("wrong_type", "expected an object of strings")
    return value


class TextOptions(fields.Fields):
    format: Format | None = None


class Reasoning(fields.Fields):
    effort: Any = None


class ResponsesBody(OpenAIFields, extra="allow"):
    input: Any = None
    instructions: str | None = None
    metadata: Annotated[dict[str, Any], AfterValidator(_metadata)] | None = None
    include: fields.Strings | None = None
    max_tokens: Annotated[fields.Integer, Field(ge=1)] | None = Field(
        None, alias="max_output_tokens"
    )
    previous_response_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    background: Annotated[Any, fields.harmless(False)] = None
    context_management: Annotated[Any, fields.harmless([])] = None
    conversation: Annotated[Any, fields.harmless()] = None
    prompt: Annotated[Any, fields.harmless()] = None


def parse(body: fields.Body, sender: Sender) -> Reply:
    """Return the reply to a responses body. Raise ApiError that names the first invalid field."""
    payload = ResponsesBody.read(body)
    check_unknown("responses", payload.model_extra, _IGNORED)
    previous = _previous(payload.previous_response_id, sender)
    read = read_input(payload.input)
    conversation = (*previous, *read.messages)
    offers = offers_of(payload.tools or (), read.tools)
    instructions = payload.instructions
    system = () if instructions is None else ({"role": "system", "content": instructions},)
    form = payload.text and payload.text.format
    effort = payload.reasoning and payload.reasoning.effort
    request = to_request(
        "responses",
        payload,
        sender,
        id_prefix="resp_",
        messages=(*system, *conversation),
        functions=tuple(offer.function for offer in offers),
        left_out=(*hosted_types((*(payload.tools or ()), *read.tools)), *read.media),
        output_schema=form and form.output_schema("text.format"),
        logprobs=LOGPROBS in (payload.include or ()) or bool(payload.top_logprobs),
        chat_template_kwargs=template_kwargs(payload.chat_template_kwargs, effort),
    )
    settings = _settings(payload, request, body.get("tool_choice"))

    def save(response: Mapping[str, Any], answer: Message) -> None:
        if payload.store is False:
            return
        # Log-probabilities and token ids take the most memory.
        kept = {key: value for key, value in response.items() if not key.endswith("token_ids")}
        kept["output"] = [
            {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
            if "content" in item
            else item
            for item in response["output"]
        ]
        saved = SavedResponse(kept, (*conversation, answer))
        sender.conversations.save(response["id"], saved)

    return ResponsesReply(request, settings, save, {o.function.name: o for o in offers})


def _settings(payload: ResponsesBody, request: PolicyRequest, tool_choice: Any) -> dict[str, Any]:
    """Return the fields that the response repeats."""
    return {
        "model": request.model,
        "instructions": payload.instructions,
        "max_output_tokens": request.max_tokens,
        "metadata": payload.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": payload.previous_response_id,
        "temperature": request.temperature,
        "text": {"format": _format_shown(payload.text and payload.text.format)},
        "tool_choice": "auto" if tool_choice is None else tool_choice,
        "tools": [copy for tool in payload.tools or () if (copy := tool.shown()) is not None],
        "top_logprobs": request.top_logprobs,
        "top_p": request.top_p,
        "truncation": payload.truncation or "disabled",
        "user": payload.user,
    }


def _format_shown(form: Format | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": (form and form.type) or "text"}
    return {
        "type": "json_schema",
        "name": form.name or "answer",
        "schema": form.schema_,
        "strict": bool(form.strict),
    }


def _previous(response_id: str | None, sender: Sender) -> tuple[Message, ...]:
    if response_id is None:
        return ()
    previous = sender.conversations.get(response_id)
    if previous is None:
        raise invalid(
            f"previous_response_id is {brief(response_id)}, which is not stored; pass the "
            "id of a response from this rollout made with store on.",
            "previous_response_id",
            "previous_response_not_found",
        )
    return previous.messages


@dataclass
class ResponsesReply(Reply):
    """Response as a whole or in events. It saves the conversation once its answer is done."""

    repeats_request: ClassVar[bool] = True

    settings: Mapping[str, Any]
    save: Callable[[Mapping[str, Any], Message], None]
    offers: Mapping[str, Offer]  # by the name that the policy calls

    @cached_property
    def _output(self) -> Output:
        return Output(self.context.token, self.offers)

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        for _ in self._whole(answers[0]):
            pass
        return self._finished(answers)

    def opening(self) -> Iterable[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._response("in_progress")}

    def keep_alive(self) -> Iterable[Event]:
        yield {"type": "response.in_progress", "response": self._response("in_progress")}

    def delta(self, delta: Delta) -> Iterable[Event]:
        yield from self._output.add_text(delta.text, self._logprobs(delta.chunk))
        for call in delta.calls:
            yield from self._output.add_call(call)

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        yield from self._output.finish(_status(answers[0]))
        response = self._finished(answers)
        yield {"type": f"response.{response['status']}", "response": response}

    def _whole(self, answer: Answer) -> Iterable[Event]:
        """Yield the events of an answer that arrives as a whole."""
        yield from self._output.add_text(answer.text, self._logprobs(answer.completion))
        for index, call in enumerate(answer.tool_calls):
            delta = CallDelta(index, call.call_id, call.name, call.arguments)
            yield from self._output.add_call(delta)
        yield from self._output.finish(_status(answer))

    def _finished(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        response = self._response(_status(answer)) | {
            "output": list(self._output.items),
            "usage": self._usage(answers),
        }
        if self.request.return_token_ids:
            response["prompt_token_ids"] = list(answer.prompt_ids)
            response["token_ids"] = list(answer.completion.token_ids)
        self.save(response, answer.as_message())
        return response

    def _response(self, status: str) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.context.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": cut,
            **self.settings,
            "output": [],
            "usage": None,
        }

    def _logprobs(self, tokens: Completion | Chunk | None) -> list[dict[str, Any]]:
        return self.entries(0, tokens) if self.request.logprobs and tokens else []

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        prompt, sampled = self.num_tokens(answers)
        cached = {"cached_tokens": self.num_cached(answers), "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _retrieve(body: fields.Body, sender: Sender) -> Any:
    response = _find(sender)
    if sender.query.get("stream", "false") != "false":
        raise invalid(
            "stream is not supported for a saved response; leave it out.",
            "stream",
            reason="unsupported",
        )
    includes = [value for name, value in sender.query.items() if name in ("include", "include[]")]
    if LOGPROBS in includes:
        raise invalid(
            f"include has {LOGPROBS}, which are not saved; read them from the original response.",
            "include",
            reason="unsupported",
        )
    return response.body


def _delete(body: fields.Body, sender: Sender) -> Any:
    _find(sender)
    sender.conversations.forget(sender.path["response_id"])
    return {"id": sender.path["response_id"], "object": "response", "deleted": True}


def _find(sender: Sender) -> SavedResponse:
    response_id = sender.path["response_id"]
    response = sender.conversations.get(response_id)
    if response is None:
        raise ApiError(
            404,
            "response_not_found",
            f"response_id is {brief(response_id)}, which is not stored; pass the id of a response "
            "from this rollout made with store on.",
            param="response_id",
        )
    return response


def _error_event(error: ApiError) -> Event:
    """Return an event with an `error` object, for OpenAI's clients, and the same fields on top."""
    inner = error.body["error"]
    flat = {key: inner[key] for key in ("code", "message", "param")}
    return {"type": "error", **flat, "error": inner}


RESPONSES = Dialect(
    name="responses",
    paths=("/v1/responses",),
    parse=parse,
    framing=replace(NAMED_SSE, numbered=True),
    listings=(
        Listing("GET", "/v1/responses/{response_id}", _retrieve),
        Listing("DELETE", "/v1/responses/{response_id}", _delete),
    ),
    error_event=_error_event,
    names={
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
    },
)
