"""Google's Gemini API: generateContent, and streamGenerateContent as events or as a JSON array."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.engine.types import MAX_TOP_LOGPROBS
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    JSON_ARRAY,
    SSE,
    Dialect,
    Event,
    Listing,
    MakeReply,
    ReplyContext,
    Sender,
)
from lightning_jax.gateway.dialects.gemini.input import (
    functions_of,
    messages_of,
    output_schema_of,
    tool_choice_of,
)
from lightning_jax.gateway.dialects.gemini.schema import camel
from lightning_jax.gateway.dialects.messages import arguments_of
from lightning_jax.gateway.dialects.openai_fields import MIN_LOGPROB, completion_tokens
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.request import MAX_CHOICES, PolicyRequest, agent_of, check_model
from lightning_jax.models.tokenizer import Tokenizer

# Fields that no text policy can support, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"cachedContent": ("",)}
_KNOWN = {
    *("model", "contents", "systemInstruction", "tools", "toolConfig", "generationConfig"),
    *("safetySettings", "labels", "serviceTier", "store"),  # without effect here
    *_UNSUPPORTED,
}
_UNSUPPORTED_CONFIG: dict[str, tuple[Any, ...]] = {
    "responseModalities": ([], ["TEXT"], ["text"]),
    "speechConfig": (),
    "imageConfig": (),
    "audioTranscriptionConfig": (),
}
_KNOWN_CONFIG = {
    *("temperature", "topP", "topK", "candidateCount", "maxOutputTokens", "stopSequences", "seed"),
    *("presencePenalty", "frequencyPenalty", "responseMimeType", "responseSchema"),
    *("responseJsonSchema", "responseLogprobs", "logprobs"),
    *("thinkingConfig", "mediaResolution", "enableEnhancedCivicAnswers"),  # without effect here
    *_UNSUPPORTED_CONFIG,
}
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def parse(body: fields.Body, sender: Sender) -> tuple[PolicyRequest, MakeReply]:
    """Return the request in a generateContent body. Raise ApiError that names the first invalid
    field.
    """
    request = _request(body, sender)
    return request, lambda context: GeminiReply(request, context)


def _request(body: fields.Body, sender: Sender) -> PolicyRequest:
    body = camel(body)
    fields.refuse_unsupported(body, _UNSUPPORTED)
    fields.warn_unknown("gemini", body, _KNOWN)
    config = camel(fields.field(body, "generationConfig", dict, {}, "an object"))
    fields.refuse_unsupported(config, _UNSUPPORTED_CONFIG)
    fields.warn_unknown("gemini generationConfig", config, _KNOWN_CONFIG)
    model = sender.path["model"]
    return PolicyRequest(
        dialect="gemini",
        model=model,
        agent=agent_of(model, sender.accepted, sender.headers),
        messages=messages_of(body),
        functions=functions_of(body),
        tool_choice=tool_choice_of(body),
        output_schema=output_schema_of(config),
        num_choices=fields.bounded(config, "candidateCount", 1, 1, MAX_CHOICES),
        max_tokens=fields.integer(config, "maxOutputTokens"),
        temperature=fields.number(config, "temperature", 1.0),
        top_p=fields.number(config, "topP", 1.0),
        top_k=fields.top_k(config, "topK"),
        seed=fields.integer(config, "seed"),
        stop=fields.strings(config, "stopSequences"),
        presence_penalty=fields.number(config, "presencePenalty", 0.0),
        frequency_penalty=fields.number(config, "frequencyPenalty", 0.0),
        logprobs=fields.flag(config, "responseLogprobs"),
        top_logprobs=fields.bounded(config, "logprobs", 0, 0, MAX_TOP_LOGPROBS),
        stream=sender.path.get("method") == "streamGenerateContent",
    )


@dataclass(frozen=True)
class GeminiReply:
    """Bodies of generateContent, whole or in pieces. Calls are sent whole, at the end."""

    request: PolicyRequest
    context: ReplyContext

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        candidates = [
            self._candidate(index, [*_text_parts(answer), *_call_parts(answer)], answer.completion)
            | {"finishReason": _finish_reason(answer)}
            for index, answer in enumerate(answers)
        ]
        return self._response(candidates) | {"usageMetadata": self._usage(answers)}

    def opening(self) -> Iterable[Event]:
        return ()

    def delta(self, delta: Delta) -> Iterable[Event]:
        tokens = delta.chunk if self.request.logprobs else None
        if delta.text or tokens:
            candidate = self._candidate(delta.choice, [{"text": delta.text}], tokens)
            yield Event(self._response([candidate]))

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        candidates = [
            self._candidate(index, _call_parts(answer) or [{"text": ""}], None)
            | {"finishReason": _finish_reason(answer)}
            for index, answer in enumerate(answers)
        ]
        yield Event(self._response(candidates) | {"usageMetadata": self._usage(answers)})

    def _candidate(self, index: int, parts: list[dict[str, Any]], tokens: Any) -> dict[str, Any]:
        content = {"parts": parts or [{"text": ""}], "role": "model"}
        candidate = {"content": content, "index": index}
        if tokens is None or not self.request.logprobs:
            return candidate
        return candidate | _logprobs(tokens, self.context.tokenizer, self.request.top_logprobs)

    def _response(self, candidates: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "candidates": candidates,
            "modelVersion": self.request.model,
            "responseId": self.context.token,
        }

    def _usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        prompt, sampled = self.context.prompt_tokens(), completion_tokens(answers)
        return {
            "promptTokenCount": prompt,
            "candidatesTokenCount": sampled,
            "totalTokenCount": prompt + sampled,
        }


def _finish_reason(answer: Answer) -> str:
    return "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"


def _text_parts(answer: Answer) -> list[dict[str, Any]]:
    return [{"text": answer.text}] if answer.text else []


def _call_parts(answer: Answer) -> list[dict[str, Any]]:
    """Return the calls, without one that the token limit cut off: clients would run it
    incompletely.
    """
    calls = [(call, arguments_of(call)) for call in answer.tool_calls]
    return [
        {"functionCall": {"id": call.call_id, "name": call.name, "args": arguments}}
        for call, arguments in calls
        if arguments is not None
    ]


def _logprobs(tokens: Any, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"token": text, "tokenId": token_id, "logProbability": max(logprob, MIN_LOGPROB)}

    sampled = zip(tokens.token_ids, tokens.behavior_logprobs, strict=True)
    result = {"chosenCandidates": [entry(*pair) for pair in sampled]}
    if top:
        others = [[entry(*pair) for pair in best[:top]] for best in tokens.top_logprobs]
        result["topCandidates"] = [{"candidates": best} for best in others]
    scores = [chosen["logProbability"] for chosen in result["chosenCandidates"]]
    return {"avgLogprobs": sum(scores) / max(len(scores), 1), "logprobsResult": result}


def _count_tokens(body: fields.Body, sender: Sender) -> Any:
    inner = fields.field(camel(body), "generateContentRequest", dict, body, "an object")
    return {"totalTokens": sender.count_tokens(_request(inner, sender))}


def _models(body: fields.Body, sender: Sender) -> Any:
    return {"models": [_model_entry(name, sender) for name in sender.model_names]}


def _model(body: fields.Body, sender: Sender) -> Any:
    check_model(sender.path["model"], sender.accepted)
    return _model_entry(sender.path["model"], sender)


def _model_entry(name: str, sender: Sender) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "displayName": name,
        "inputTokenLimit": sender.max_len,  # for the prompt and the response together
        "outputTokenLimit": sender.max_len,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _error(error: ApiError) -> dict[str, Any]:
    status = _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": error.status, "message": error.message, "status": status}}


_HEADER = "x-goog-api-key"
_METHODS = "{model:.+}:{method:generateContent|streamGenerateContent}"

GEMINI = Dialect(
    name="gemini",
    paths=(f"/v1beta/models/{_METHODS}", f"/v1/models/{_METHODS}"),
    parse=parse,
    framing=JSON_ARRAY,
    framings={"sse": SSE},
    listings=(
        Listing("POST", "/v1beta/models/{model:.+}:countTokens", _count_tokens),
        Listing("POST", "/v1/models/{model:.+}:countTokens", _count_tokens),
        Listing("GET", "/v1beta/models", _models),
        Listing("GET", "/v1beta/models/{model:.+}", _model),
        Listing("GET", "/v1/models", _models, _HEADER),
        Listing("GET", "/v1/models/{model:.+}", _model, _HEADER),
    ),
    error=_error,
    error_event=lambda error: Event(_error(error)),
    names={
        "max_tokens": "maxOutputTokens",
        "top_p": "topP",
        "top_k": "topK",
        "stop": "stopSequences",
        "presence_penalty": "presencePenalty",
        "frequency_penalty": "frequencyPenalty",
    },
)
