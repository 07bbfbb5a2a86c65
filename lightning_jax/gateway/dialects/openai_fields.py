"""Shared parts of OpenAI's dialects: sampling fields, functions, usage, log-prob entries."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_jax.engine.response import Chunk
from lightning_jax.engine.types import Completion
from lightning_jax.gateway import fields
from lightning_jax.gateway.answer import Answer
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.request import Function, JsonSchema
from lightning_jax.models.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no minus infinity

# Fields that clients send by default and that change nothing here.
HARMLESS = frozenset(
    (
        *("user", "store", "service_tier", "reasoning_effort", "verbosity", "prompt_cache_key"),
        *("prompt_cache_retention", "safety_identifier", "prediction", "moderation"),
    )
)


def sampling_fields(body: fields.Body) -> dict[str, Any]:
    """Return the arguments of a PolicyRequest that all of these dialects name alike."""
    return {
        "temperature": fields.number(body, "temperature", 1.0),
        "top_p": fields.number(body, "top_p", 1.0),
        "top_k": fields.top_k(body),
        "min_p": fields.number(body, "min_p", 0.0),
        "seed": fields.integer(body, "seed"),
        "presence_penalty": fields.number(body, "presence_penalty", 0.0),
        "frequency_penalty": fields.number(body, "frequency_penalty", 0.0),
        "logit_bias": fields.field(
            body, "logit_bias", dict, {}, "an object of token ids and numbers"
        ),
        "stream": fields.flag(body, "stream"),
        "return_token_ids": fields.flag(body, "return_token_ids"),
        "ignore_eos": fields.flag(body, "ignore_eos"),
    }


def functions_of(body: fields.Body) -> tuple[Function, ...]:
    """Return the functions in `tools`, each an object inside an object of type function."""
    found = []
    for index, tool in enumerate(fields.objects(body, "tools")):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function" or not isinstance(tool.get("function"), dict):
            raise invalid(
                f"{where} is {fields.brief(tool)}; expected an object of type function.",
                "tools",
                reason="wrong_type",
                key=where,
            )
        found.append(function_of(tool["function"], f"{where}.function"))
    return tuple(found)


def function_of(tool: Mapping[str, Any], where: str, param: str = "tools") -> Function:
    """Return a function's name, description and parameters. Raise ApiError if one is invalid."""
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(
            f"{where}.name is {fields.brief(name)}; expected a function name.",
            param,
            reason="wrong_type",
            key=f"{where}.name",
        )
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(
            f"{where}.parameters is not an object; expected a JSON schema.",
            param,
            reason="wrong_type",
            key=f"{where}.parameters",
        )
    description = tool.get("description")
    return Function(name, description if isinstance(description, str) else "", parameters)


def output_schema(spec: Mapping[str, Any], where: str) -> JsonSchema | None:
    """Return the schema that a `json_schema` or `json_object` format asks for, or None for text."""
    kind = spec.get("type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema":
        raise invalid(
            f"{where}.type is {fields.brief(kind)}; expected text, json_object or json_schema.",
            where,
            reason="unknown",
            key=f"{where}.type",
        )
    schema = spec.get("schema")
    if not isinstance(schema, dict):
        raise invalid(
            f"{where} has no schema; pass a JSON schema object.",
            where,
            reason="missing",
            key=f"{where}.schema",
        )
    return schema


def completion_tokens(answers: Sequence[Answer]) -> int:
    return sum(len(answer.completion.token_ids) for answer in answers)


def fingerprint(answers: Sequence[Answer]) -> str | None:
    """Return the weights version that sampled the last token."""
    versions = answers[-1].completion.policy_versions
    return f"policy-{versions[-1]}" if versions else None


def logprob_entries(
    tokens: Completion | Chunk, tokenizer: Tokenizer, top: int
) -> list[dict[str, Any]]:
    """Return one entry per token, with log-probabilities of the policy at temperature 1."""
    entries = []
    alternatives = tokens.top_logprobs or ((),) * len(tokens.token_ids)
    for token_id, logprob, others in zip(
        tokens.token_ids, tokens.behavior_logprobs, alternatives, strict=True
    ):
        best = [token_entry(i, value, tokenizer) for i, value in others[:top]]
        entries.append({**token_entry(token_id, logprob, tokenizer), "top_logprobs": best})
    return entries


def token_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one token's text, log-probability and bytes."""
    text = tokenizer.token_text(token_id)
    # If a token is only part of a character, its bytes are not those of the text.
    whole = "\ufffd" not in text
    return {
        "token": text,
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(text.encode()) if whole else None,
    }
