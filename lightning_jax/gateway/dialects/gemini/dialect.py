"""Google's Gemini API: generateContent, and streamGenerateContent as events or as a JSON array."""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_jax.gateway.answer import Answer, Delta
from lightning_jax.gateway.dialects.base import (
    JSON_ARRAY,
    MIN_LOGPROB,
    SSE,
    Dialect,
    Event,
    Listing,
    Reply,
    Sender,
    model_listings,
    to_request,
    whole_calls,
)
from lightning_jax.gateway.dialects.gemini.input import Config, CountBody, GeminiBody
from lightning_jax.gateway.dialects.unknown_fields import check_unknown
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.fields import Body
from lightning_jax.gateway.request import NO_THINKING, PolicyRequest
from lightning_jax.models.tokenizer import Tokenizer

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


def parse(body: Body, sender: Sender) -> Reply:
    """Return the reply to a generateContent body. Raise ApiError that names the first invalid
    field.
    """
    request = _request(body, sender)
    return GeminiReply(request)


def _request(body: Body, sender: Sender) -> PolicyRequest:
    payload = GeminiBody.read(body)
    check_unknown("gemini", payload.model_extra)
    config = Config.read(payload.generation_config or {})
    check_unknown("gemini generationConfig", config.model_extra)
    return to_request(
        "gemini",
        config,
        sender,
        model=sender.path["model"],
        messages=payload.messages(),
        functions=payload.functions(),
        left_out=payload.left_out(),
        tool_choice=payload.tool_choice(),
        output_schema=config.output_schema(),
        num_choices=config.candidate_count,
        max_tokens=config.max_output_tokens,
        stop=config.stop_sequences,
        logprobs=bool(config.response_logprobs),
        top_logprobs=config.logprobs,
        chat_template_kwargs=None if config.thinks else NO_THINKING,
        stream=sender.path.get("method") == "streamGenerateContent",
    )


class GeminiReply(Reply):
    """Bodies of generateContent, whole or in pieces. Calls are sent whole, at the end."""

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._finished(answers, shows_text=True)

    def keep_alive(self) -> Iterable[Event]:
        # Without a part, Google's own clients would drop the whole answer from a chat's history.
        yield self._response([self._candidate(0, [], None)])

    def delta(self, delta: Delta) -> Iterable[Event]:
        tokens = delta.chunk if self.request.logprobs else None
        if delta.text or tokens:
            candidate = self._candidate(delta.choice, [{"text": delta.text}], tokens)
            yield self._response([candidate])

    def ending(self, answers: Sequence[Answer]) -> Iterable[Event]:
        yield self._finished(answers, shows_text=False)

    def _finished(self, answers: Sequence[Answer], *, shows_text: bool) -> dict[str, Any]:
        """Return the answers, without their texts and tokens if these were streamed."""
        candidates = []
        for index, answer in enumerate(answers):
            texts = [{"text": answer.text}] if shows_text and answer.text else []
            calls = [
                {"functionCall": {"id": call.call_id, "name": call.name, "args": arguments}}
                for call, arguments in whole_calls(answer)
            ]
            tokens = answer.completion if shows_text else None
            reason = "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"
            candidate = self._candidate(index, [*texts, *calls], tokens)
            candidates.append(candidate | {"finishReason": reason})
        prompt, sampled = self.num_tokens(answers)
        usage = {"promptTokenCount": prompt, "candidatesTokenCount": sampled}
        usage["totalTokenCount"] = prompt + sampled
        if cached := self.num_cached(answers):
            usage["cachedContentTokenCount"] = cached
        return self._response(candidates) | {"usageMetadata": usage}

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


def _logprobs(tokens: Any, tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name = tokenizer.pieces.name(token_id)
        return {"token": name, "tokenId": token_id, "logProbability": max(logprob, MIN_LOGPROB)}

    sampled = zip(tokens.token_ids, tokens.behavior_logprobs, strict=True)
    result = {"chosenCandidates": [entry(*pair) for pair in sampled]}
    if top:
        others = [[entry(*pair) for pair in best[:top]] for best in tokens.top_logprobs]
        result["topCandidates"] = [{"candidates": best} for best in others]
    scores = [chosen["logProbability"] for chosen in result["chosenCandidates"]]
    return {"avgLogprobs": sum(scores) / max(len(scores), 1), "logprobsResult": result}


def _count_tokens(body: Body, sender: Sender) -> Any:
    inner = CountBody.read(body).generate_content_request
    return {"totalTokens": sender.count_tokens(_request(inner or body, sender))}


def _model_entry(name: str, sender: Sender) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "displayName": name,
        "inputTokenLimit": sender.max_len,  # for the prompt and the response together
        "outputTokenLimit": sender.max_len,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }


def _models(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"models": entries}


def _error(error: ApiError) -> dict[str, Any]:
    status = _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": error.status, "message": error.message, "status": status}}


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
        *model_listings("/v1beta/models", _model_entry, _models),
        *model_listings("/v1/models", _model_entry, _models, "x-goog-api-key"),
    ),
    error=_error,
    names={
        "max_tokens": "maxOutputTokens",
        "top_p": "topP",
        "top_k": "topK",
        "stop": "stopSequences",
        "presence_penalty": "presencePenalty",
        "frequency_penalty": "frequencyPenalty",
    },
)
