"""Sampling parameters and seeds for the choices of a request."""

import secrets
from collections.abc import Mapping
from typing import Any

from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue, brief
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.fields import Fields, Number
from lightning_jax.gateway.request import PolicyRequest
from lightning_jax.gateway.sessions.open_rollouts import OpenRollout, derive_seed


class LogitBias(Fields):
    logit_bias: dict[str, Number | None]


def sampling_params(
    request: PolicyRequest,
    rollout: OpenRollout | None,
    rooms: tuple[int, ...],
    grammar: str | None,
    *,
    shown_ids: tuple[int, ...] = (),
    max_logit_biases: int,
    max_stop_chars: int,
) -> tuple[SamplingParams, ...]:
    """Return the sampling parameters of each choice.

    The rollout's settings override the request, and cap its `max_tokens`. `rooms` is the number of
    tokens left in the context for each choice. Raise ApiError if a value is out of range.
    """
    settings = rollout.settings if rollout else None
    ceilings = [request.max_tokens, settings.max_tokens if settings else None]
    if rollout:
        seed = rollout.next_seed()
    else:
        seed = secrets.randbits(31) if request.seed is None else request.seed % 2**31
    biases = _logit_biases(request.logit_bias, max_logit_biases)
    num_stop_chars = sum(map(len, request.stop))
    if num_stop_chars > max_stop_chars:
        raise invalid(
            f"stop has {num_stop_chars} characters; shorten it or raise serve.max_stop_chars "
            f"({max_stop_chars}).",
            "stop",
        )
    try:
        return tuple(
            SamplingParams(
                max_tokens=min(n for n in (*ceilings, max(1, room)) if n is not None),
                temperature=_first(settings and settings.temperature, request.temperature),
                top_p=_first(settings and settings.top_p, request.top_p),
                top_k=_first(settings and settings.top_k, request.top_k),
                # A filter like top_p. Rollouts that train use only the filters in their settings.
                min_p=request.min_p if settings is None or settings.top_p is None else 0.0,
                seed=derive_seed(seed, index) if index else seed,
                stop=() if grammar else request.stop,  # only its grammar ends such an answer
                logit_bias=biases,
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                top_logprobs=request.top_logprobs,
                grammar=grammar,
                ignore_eos=request.ignore_eos,
                score_prompt=request.score_prompt,
                shown_ids=shown_ids,
                continues_text=request.prompts is not None,
            )
            for index, room in enumerate(rooms)
        )
    except InvalidValue as error:
        raise invalid(str(error), error.key, reason=error.reason) from error


def _logit_biases(bias: Mapping[str, Any], most: int) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs. The ids are strings in the request, because they are JSON
    keys.
    """
    if len(bias) > most:
        raise invalid(
            f"logit_bias has {len(bias)} entries; send fewer or raise serve.max_logit_biases "
            f"({most}).",
            "logit_bias",
            reason="too_many",
            key="serve.max_logit_biases",
        )
    for key in bias:
        if not key.isdecimal() or len(key) > 9:
            raise invalid(
                f"logit_bias has the key {brief(key)}; expected a token id.",
                "logit_bias",
                reason="unknown",
            )
    numbers = LogitBias.read({"logit_bias": bias}).logit_bias
    return tuple((int(key), number or 0.0) for key, number in numbers.items())


def _first(override: Any, value: Any) -> Any:
    return value if override is None else override
