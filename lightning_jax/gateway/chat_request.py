"""The chat-completions dialect, inbound: a request body checked and in our terms."""

import functools
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.rollouts import OpenRollout, derive_seed
from lightning_jax.types import SamplingParams

log = logging.getLogger(__name__)

POLICY = "policy"
AGENT_HEADER = "x-agent-name"
MAX_CHOICES = 64
MAX_INT32 = 2**31 - 1

# Fields that ask for what the engine cannot do, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "top_logprobs": (None, 0),
}
_KNOWN = {
    *("messages", "model", "tools", "n", "stop", "seed", "temperature", "top_p", "top_k", "min_p"),
    *("max_tokens", "max_completion_tokens", "stream", "stream_options", "logprobs"),
    *("return_token_ids", "metadata"),
}
# Fields that change nothing here, and that clients send on their own.
_HARMLESS = {
    *("user", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction"),
    *("web_search_options", "moderation"),
}


@dataclass(frozen=True)
class ChatRequest:
    """One request as its sender means it; None where it leaves the choice to the server."""

    messages: list[Any]  # unchecked: rendering checks them
    model: str
    agent: str
    tools: list[dict[str, Any]] | None
    num_choices: int
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool


def parse_chat(body: object, headers: Mapping[str, str], model_name: str) -> ChatRequest:
    """The request in a decoded JSON body. Raises ApiError that names the first wrong field."""
    if not isinstance(body, dict):
        raise invalid(f"the body is {type(body).__name__}; expected a JSON object.")
    _refuse_unsupported(body)
    tokens = _integer(body, "max_tokens")
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid("messages is missing or no list; expected a list of messages.", "messages")
    model = _field(body, "model", str, "", "a model name")
    stream_options = _field(body, "stream_options", dict, {}, "an object")
    return ChatRequest(
        messages=messages,
        model=model,
        agent=_agent(body, headers, check_model(model, model_name)),
        tools=_tools(body),
        num_choices=_choices(body),
        max_tokens=_integer(body, "max_completion_tokens", tokens),
        temperature=_number(body, "temperature", 1.0),
        top_p=_number(body, "top_p", 1.0),
        top_k=min(max(0, _integer(body, "top_k") or 0), MAX_INT32),  # others write -1 for off
        min_p=_number(body, "min_p", 0.0),
        seed=_integer(body, "seed"),
        stop=_stop(body),
        stream=_flag(body, "stream"),
        include_usage=_flag(stream_options, "include_usage"),
        logprobs=_flag(body, "logprobs"),
        return_token_ids=_flag(body, "return_token_ids"),
    )


def check_model(model: str, model_name: str) -> str:
    """The agent that the model's name holds, "" if none. Raises ApiError for a model not served."""
    name, colon, agent = model.partition(":")
    if name == POLICY and bool(colon) == bool(agent):
        return agent
    if model == model_name:
        return ""
    message = f"model is {model!r}; expected {POLICY!r}, '{POLICY}:AGENT' or {model_name!r}."
    raise ApiError(404, "model_not_found", message, param="model")


def sampling_params(
    chat: ChatRequest, rollout: OpenRollout | None, room: int
) -> tuple[SamplingParams, ...]:
    """How each choice is sampled: what the agent asks for, under what its rollout's settings say.

    `room` is how many tokens the context has left. Raises ApiError for values out of range.
    """
    settings = rollout.settings if rollout else None
    ceilings = [chat.max_tokens, settings.max_tokens if settings else None, max(1, room)]
    if rollout:
        seed = rollout.next_seed()
    else:
        seed = secrets.randbits(31) if chat.seed is None else chat.seed % 2**31
    try:
        return tuple(
            SamplingParams(
                max_tokens=min(limit for limit in ceilings if limit is not None),
                temperature=_first(settings and settings.temperature, chat.temperature),
                top_p=_first(settings and settings.top_p, chat.top_p),
                top_k=_first(settings and settings.top_k, chat.top_k),
                min_p=chat.min_p,
                seed=derive_seed(seed, choice) if choice else seed,
                stop=chat.stop,
            )
            for choice in range(chat.num_choices)
        )
    except ValueError as error:
        raise invalid(str(error), str(error).split(" ", 1)[0]) from error


def _first(override: Any, asked: Any) -> Any:
    return asked if override is None else override


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, harmless in _UNSUPPORTED.items():
        if body.get(name) not in harmless:
            raise invalid(
                f"{name} is {body[name]!r}, which this server cannot do; expected it left out.",
                name,
                "unsupported_parameter",
            )
    for name in body.keys() - _KNOWN - _HARMLESS - _UNSUPPORTED.keys():
        _warn_once(name)


@functools.lru_cache(maxsize=256)
def _warn_once(name: str) -> None:
    log.warning("requests have the field %r, which is unknown here and ignored", name)


def _agent(body: dict[str, Any], headers: Mapping[str, str], from_model: str) -> str:
    """The sub-agent's name: from the header, else from metadata, else from the model's name."""
    metadata = _field(body, "metadata", dict, {}, "an object")
    return str(headers.get(AGENT_HEADER) or metadata.get("agent") or from_model)


def _field(body: dict[str, Any], name: str, kind: type, default: Any, expected: str) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise invalid(f"{name} is {value!r}; expected {expected}.", name, "invalid_type")
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    return _field(body, name, bool, False, "true or false")


def _integer(body: dict[str, Any], name: str, default: int | None = None) -> int | None:
    value = _field(body, name, int, default, "an integer")
    if isinstance(value, bool):
        raise invalid(f"{name} is {value!r}; expected an integer.", name, "invalid_type")
    return value


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(f"{name} is {value!r}; expected a number.", name, "invalid_type")
    return float(min(value, MAX_INT32))  # an integer may be too long for a float


def _choices(body: dict[str, Any]) -> int:
    number = _integer(body, "n", 1) or 0
    if not 1 <= number <= MAX_CHOICES:
        raise invalid(f"n is {number}; expected 1 to {MAX_CHOICES}.", "n")
    return number


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid(f"stop is {value!r}; expected a string or a list of strings.", "stop")
    return tuple(stops)


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = _field(body, "tools", list, [], "a list of tools")
    if not all(isinstance(tool, dict) for tool in tools):
        raise invalid(f"tools is {tools!r}; expected a list of objects.", "tools")
    return None if body.get("tool_choice") == "none" else tools or None
