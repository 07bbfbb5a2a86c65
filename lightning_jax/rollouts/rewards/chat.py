"""Chat model over HTTP: answers bounded in time and size, and requests repeated if they fail."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from lightning_jax.gateway.app import Gateway
from lightning_jax.models.policies import INITIAL
from lightning_jax.rollouts.config import ChatModel, RolloutConfig

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 4 * 2**20
PREFIX = "judge-"  # of the model name and the role of a model that the run serves itself
TRANSIENT = (408, 425, 429)  # statuses below 500 after which a second call may succeed


class ChatFailed(Exception):
    """Chat model without a usable answer after all attempts."""


@dataclass(frozen=True)
class Endpoint:
    """Address of a chat model. `version` is of the weights that answer; 0 if they never change.

    A call has a limit of `timeout_s`. None: it waits, as the run serves the model itself and may
    pause its engine.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    version: Callable[[], int] = lambda: 0
    timeout_s: float | None = None


def endpoint_of(config: ChatModel, limits: RolloutConfig, gateway: Gateway | None) -> Endpoint:
    """Return the address of the model that the settings name.

    `gateway` has started and answers models that are no URL; without such it may be None. Raises
    ConfigError if the variable of a key is not set.
    """
    if config.url is not None:
        model = config.served_model or ""
        return Endpoint(config.url, model, config.key, timeout_s=limits.call_timeout_s)
    assert gateway is not None, "the run serves this model"
    model, key = PREFIX + config.served_by, gateway.api_key
    if config.served_by == INITIAL:
        return Endpoint(f"{gateway.url}/v1", model, key)
    engine = gateway.engine
    return Endpoint(f"{gateway.url}/v1", model, key, lambda: engine.version)


@dataclass
class ChatCounts:
    """Costs of a chat model since the counts were last read."""

    calls: int = 0
    failed_calls: int = 0
    tokens: int = 0
    seconds: float = 0.0


async def ask(
    endpoint: Endpoint,
    body: dict[str, object],
    limits: RolloutConfig,
    counts: ChatCounts,
    check: Callable[[str], object],
) -> str:
    """Return the text of an answer, and add its costs to `counts`.

    An answer for which `check` raises ValueError is a failure. Failures are repeated as
    `limits.max_attempts` and its backoff say. Raises ChatFailed after the last attempt.
    """
    started, fact = time.monotonic(), ""
    for attempt in range(1, limits.max_attempts + 1):
        counts.calls += 1
        may_recover = True
        try:
            text = await _call(endpoint, body, counts)
            check(text)
            counts.seconds += time.monotonic() - started
            return text
        except _Refused as error:
            fact, may_recover = str(error), error.status >= 500 or error.status in TRANSIENT
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            fact = f"it did not respond ({type(error).__name__}: {error})"
        except ValueError as error:
            fact = f"its answer cannot be used ({error})"
        counts.failed_calls += 1
        if attempt == limits.max_attempts or not may_recover:
            break
        log.info("%s at %s: %s; asking again", endpoint.model, endpoint.url, fact)
        await asyncio.sleep(limits.backoff_s(attempt))
    counts.seconds += time.monotonic() - started
    raise ChatFailed(f"{endpoint.model} at {endpoint.url}: {fact}"[:500])


async def _call(endpoint: Endpoint, body: dict[str, object], counts: ChatCounts) -> str:
    """Return the text of one answer, and count its tokens.

    Redirects are not followed, because they could send the key anywhere.
    """
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    limit = aiohttp.ClientTimeout(total=endpoint.timeout_s)
    url = f"{endpoint.url.rstrip('/')}/chat/completions"
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(url, json=body, headers=headers, allow_redirects=False) as answer,
    ):
        raw = bytearray()
        async for piece in answer.content.iter_any():
            raw += piece
            if len(raw) > MAX_ANSWER_BYTES:
                raise ValueError(f"it is longer than {MAX_ANSWER_BYTES} bytes")
        text = raw.decode(errors="replace")
        if answer.status != 200:
            hint = missing_v1(endpoint.url) if answer.status == 404 else ""
            raise _Refused(answer.status, text, hint)
    return _content(text, counts)


def _content(text: str, counts: ChatCounts) -> str:
    """Return the message of an answer. Raises ValueError if there is none."""
    try:
        reply = json.loads(text)
        counts.tokens += int((reply.get("usage") or {}).get("total_tokens") or 0)
        content = reply["choices"][0]["message"]["content"]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError("it is no chat completion") from error
    if not isinstance(content, str):
        raise ValueError("it has no text")
    return content


def missing_v1(url: str) -> str:
    """Return a hint at the end of a server's URL that has no such path, or ""."""
    path = urlsplit(url).path.rstrip("/")
    return "" if path.endswith("/v1") else f"does its URL end in {path}/v1? "


class _Refused(Exception):
    """Error status of a model's server."""

    def __init__(self, status: int, text: str, hint: str = "") -> None:
        super().__init__(f"status {status}: {hint}{' '.join(text[:300].split())}")
        self.status = status
