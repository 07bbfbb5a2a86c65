"""What an agent's return value or exception says about its rollout.

Everything here reads foreign objects, whose methods may fail in any way.
"""

import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lightning_jax.agent_child import address_of, faults_of, members
from lightning_jax.config import RolloutConfig
from lightning_jax.descriptors import is_exhausted
from lightning_jax.types import LLM, RolloutStatus

MAX_REASON = 100  # characters; a reason becomes part of a metric's name
MAX_DETAIL = 500  # characters
MAX_METRIC_NAME = 100  # characters
MAX_METRIC = 1e30  # magnitude; sums over a step stay finite in float32
DROPPED_METRICS = "dropped_metrics"  # the metric that counts what a rollout measured in excess


@dataclass(frozen=True)
class Outcome:
    """How one attempt ended."""

    status: RolloutStatus
    reward: float | None = None
    reason: str | None = None
    detail: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Return what the store keeps of it."""
        names = ("status", "reward", "reason", "detail", "metrics")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class LostGateway(Outcome):
    """The agent's connection to the gateway failed. Who is to blame, the gateway knows."""


def failure(reason: str, detail: str) -> Outcome:
    """Return the outcome of an agent that failed by itself."""
    return Outcome("agent_failure", None, reason, detail)


def outcome_of(
    result: Any, posted: float | None = None, config: RolloutConfig | None = None
) -> Outcome:
    """Return what an agent's return value says: its reward and metrics, or that it has none.

    Without a reward in it the `posted` one counts. Metrics beyond `rollout.max_metrics`, or with a
    name longer than MAX_METRIC_NAME, are left out and counted as `dropped_metrics`.
    """
    config = config or RolloutConfig()
    reward = result.get("reward") if isinstance(result, Mapping) else result
    reward = posted if reward is None else reward
    if reward is None:
        return failure(
            "no_reward",
            f"the agent returned {repr(result)[:200]} and posted no reward; expected a number",
        )
    value = _finite(reward)
    if value is None or abs(value) > config.max_abs_reward:
        limit = f" between -{config.max_abs_reward:g} and {config.max_abs_reward:g}"
        return _bad("reward", reward, f"number{limit} (rollout.max_abs_reward)")
    measured = dict(result) if isinstance(result, Mapping) else {}
    measured.pop("reward", None)
    metrics: dict[str, float] = {}
    for name in list(measured)[: config.max_metrics]:
        number = _finite(measured[name])
        if not isinstance(name, str) or number is None or abs(number) > MAX_METRIC:
            return _bad(name, measured[name], "finite number")
        if len(name) <= MAX_METRIC_NAME:
            metrics[_storable(name)] = number
    if len(metrics) < len(measured):
        metrics[DROPPED_METRICS] = float(len(measured) - len(metrics))
    return Outcome("scored", value, metrics=metrics)


def outcome_of_error(error: BaseException, llm: LLM) -> Outcome:
    """Return what an agent's exception says.

    Of a group, as a task group raises it, the first member counts that is no connection's error.
    """
    try:
        return _outcome_of_error(error, llm)
    except BaseException:  # noqa: BLE001  (a class of the agent's own, which fails at everything)
        return failure("unreadable_error", "the agent raised an error that cannot be read")


def _outcome_of_error(error: BaseException, llm: LLM) -> Outcome:
    errors = members(error)
    # Agents share this process's descriptors: it is not one agent's fault if none is left.
    faults = [fault for fault in faults_of(errors) if not is_exhausted(fault)]
    told = (faults or errors)[0]
    reason = _storable(type(told).__name__[:MAX_REASON]) or "unnamed_error"
    if type(told) is SystemExit:  # asyncio would end the whole run by it
        return failure(reason, _storable(f"the agent called sys.exit({told.code!r})"[:MAX_DETAIL]))
    detail = _detail(told, error)
    if faults:
        return failure(reason, detail)
    gateway = urlsplit(llm.base_url).netloc
    kind = LostGateway if any(address_of(each) == gateway for each in errors) else Outcome
    return kind("infrastructure_failure", None, reason, detail)


def _detail(error: BaseException, raised: BaseException) -> str:
    """Return the error's words; of one without, such as a time-out's, where it was raised.

    A member of a group need not have been raised itself: then its group was.
    """
    try:
        words = str.strip(str(error))
    except BaseException:  # noqa: BLE001  (foreign code, which may fail at that as well)
        words = ""
    if words:
        return _storable(words[:MAX_DETAIL])
    frames = traceback.extract_tb(error.__traceback__ or raised.__traceback__)
    if not frames:
        return "raised without a message"
    last = frames[-1]
    return _storable(
        f"raised without a message at {last.filename}:{last.lineno} in {last.name}"[:MAX_DETAIL]
    )


def _bad(name: Any, value: Any, expected: str) -> Outcome:
    return failure(
        "bad_reward",
        _storable(
            f"the agent returned {repr(value)[:200]} as {str(name)[:50]}; expected a {expected}"
        ),
    )


def _storable(text: str) -> str:
    """Return the text with half surrogate pairs, which no database takes, written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _finite(value: Any) -> float | None:
    """Return the finite number that the value is, or None.

    Takes an array without axes, as NumPy, JAX and PyTorch return them.
    """
    is_array = not isinstance(value, type) and getattr(value, "ndim", None) == 0
    number = value.item() if is_array and hasattr(value, "item") else value
    if not isinstance(number, int | float):
        return None
    try:
        number = float(number)
    except OverflowError:  # an integer that no float can hold
        return None
    return number if math.isfinite(number) else None


def is_bounded(rewards: Iterable[float], limit: float) -> bool:
    """Return whether the rewards and their sum are numbers of at most this magnitude."""
    values = list(rewards)
    return all(abs(value) <= limit for value in values) and abs(math.fsum(values)) <= limit
