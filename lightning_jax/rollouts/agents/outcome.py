"""Outcomes of rollouts, read from an agent's return value or exception.

Everything here handles foreign objects, whose methods may fail in any way.
"""

import math
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning_jax.rollouts.agents.child import address_of, faults_of, members
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.system.descriptors import lacks_resources
from lightning_jax.types import LLM, RolloutStatus

if TYPE_CHECKING:  # workers lack the gateway
    from lightning_jax.gateway.sessions.open_rollouts import Traffic

# Folders whose frames say little about an agent's error.
LIBRARIES = (Path(__file__).parents[2], *map(sysconfig.get_path, ("stdlib", "purelib")))
MAX_REASON = 100  # characters; a reason becomes part of a metric's name
MAX_DETAIL = 500  # characters of a message
MAX_METRIC_NAME = 100  # characters
STANDSTILL_S = 1.0  # clients may give up on a server that stalled for this long
MAX_METRIC = 1e30  # magnitude; sums over a step stay finite in float32
# Reasons of rollouts that took too long. In the second, calls waited for most of the time.
DEADLINE, DEADLINE_IN_QUEUE = "deadline", "deadline_in_queue"
CONTEXT_LENGTH = "context_length"  # the server refused too many prompts as too long
BAD_REWARD = "bad_reward"
SILENCES = "silences_workers"  # the agent holds the interpreter of its worker
SERVER_LOST = "server_lost"  # the rollout's sampler died or stopped answering
# Counts the metrics beyond the limit. One without a usable value is `dropped_metrics/REASON/NAME`.
DROPPED_METRICS = "dropped_metrics"
DROPPED_VALUE = f"{DROPPED_METRICS}/"
MAX_STORED_NAME = MAX_METRIC_NAME + 30  # with that prefix and a reason


@dataclass(frozen=True)
class Outcome:
    """Result of one attempt."""

    status: RolloutStatus
    reward: float | None = None
    reason: str | None = None
    detail: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields that the store keeps."""
        names = ("status", "reward", "reason", "detail", "metrics")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class LostGateway(Outcome):
    """Failed connection from the agent to the gateway. The gateway decides who is to blame."""


@dataclass(frozen=True)
class NoReward(Outcome):
    """End of an agent that returned no reward. It is scored if a reward was posted."""


def failure(reason: str, detail: str) -> Outcome:
    """Return the outcome of an agent that failed by itself."""
    return Outcome("agent_failure", None, reason, detail)


def outcome_of(result: Any, config: RolloutConfig | None = None) -> Outcome:
    """Return the outcome for an agent's return value: its reward and metrics, or a failure.

    Only the reward decides between the two. See `kept_metrics`.
    """
    config = config or RolloutConfig()
    reward = result.get("reward") if isinstance(result, Mapping) else result
    value = None if reward is None else finite(reward)
    if reward is not None and (value is None or abs(value) > config.max_abs_reward):
        limit = f" between -{config.max_abs_reward:g} and {config.max_abs_reward:g}"
        expected = f"expected a number{limit} (rollout.max_abs_reward)"
        detail = f"the agent returned {repr(reward)[:200]} as reward; {expected}"
        return failure(BAD_REWARD, storable(detail))
    measured = dict(result) if isinstance(result, Mapping) else {}
    measured.pop("reward", None)
    metrics = kept_metrics(measured, config.max_metrics)
    if value is None:
        text = storable(repr(result)[:200])
        detail = f"the agent returned {text} and posted no reward; expected a number"
        return NoReward("agent_failure", None, "no_reward", detail, metrics)
    return Outcome("scored", value, metrics=metrics)


def kept_metrics(measured: Mapping[Any, Any], limit: int) -> dict[str, float]:
    """Return the finite numbers among an agent's metrics, and counts of the others.

    Metrics beyond the first `limit`, or with a name longer than MAX_METRIC_NAME, are counted
    together as `dropped_metrics`. One that is None (null), NaN or infinite (not_finite), above
    MAX_METRIC (too_large) or no number (wrong_type) counts as `dropped_metrics/REASON/NAME`.
    Metrics that this function returned stay as they are.
    """
    metrics: dict[str, float] = {}
    num_dropped = _number_in(measured.get(DROPPED_METRICS, 0.0))[0] or 0.0
    names = [name for name in measured if name != DROPPED_METRICS]
    for index, name in enumerate(names):
        is_text = isinstance(name, str)
        max_chars = MAX_STORED_NAME if is_text and split_dropped(name) else MAX_METRIC_NAME
        if index >= limit or not is_text or len(name) > max_chars:
            num_dropped += 1.0
            continue
        number, reason = _number_in(measured[name])
        if number is None:
            metrics[f"{DROPPED_VALUE}{reason}/{storable(name)}"] = 1.0
        else:
            metrics[storable(name)] = number
    return metrics | ({DROPPED_METRICS: num_dropped} if num_dropped else {})


def split_dropped(name: str) -> tuple[str, str] | None:
    """Return (reason, metric) of a count of dropped values, or None for another metric."""
    reason, _, metric = name.removeprefix(DROPPED_VALUE).partition("/")
    return (reason, metric) if name.startswith(DROPPED_VALUE) and metric else None


def _number_in(value: Any) -> tuple[float | None, str]:
    """Return (a metric's value, ""), or (None, the reason why it cannot be kept)."""
    if value is None:
        return None, "null"
    try:
        number = as_number(value)
    except Exception:  # noqa: BLE001  (foreign code, such as an array without a value)
        number = None
    if number is None:
        return None, "wrong_type"
    if not math.isfinite(number):
        return None, "too_large" if isinstance(value, int) else "not_finite"
    return (number, "") if abs(number) <= MAX_METRIC else (None, "too_large")


def with_posted(outcome: Outcome, posted: float | None, *, needs_reward: bool = True) -> Outcome:
    """Return the outcome with the reward that was posted, if the agent returned none.

    If none was posted either, the agent has failed, or without `needs_reward` the reward is 0.
    """
    if not isinstance(outcome, NoReward):
        return outcome
    if posted is None and not needs_reward:
        posted = 0.0
    if posted is None:
        return replace(outcome, metrics={})
    return Outcome("scored", posted, metrics=outcome.metrics)


def final_outcome(
    outcome: Outcome, traffic: "Traffic", stalled_s: float, config: RolloutConfig
) -> Outcome:
    """Return the outcome, corrected by what the gateway knows about the calls.

    A deadline is the server's fault if it starved the rollout. A failed agent earns
    `rollout.agent_failure_reward`.
    """
    if traffic.loss:  # the reward may rest on calls and posts that nobody knows of
        return Outcome("infrastructure_failure", reason=SERVER_LOST, detail=traffic.loss)
    if traffic.has_outgrown:  # whatever the agent returned once its calls were refused
        detail = f"{traffic.num_refused} of its prompts were too long for serve.max_len"
        return replace(failure(CONTEXT_LENGTH, detail), reward=config.agent_failure_reward)
    if outcome.status == "agent_failure" and traffic.unanswered:
        # The agent stopped after a call that the server could not answer.
        return replace(outcome, status="infrastructure_failure", reason=traffic.unanswered[0])
    if outcome.reason == DEADLINE and traffic.lost.starve(config.timeout_s):
        detail = f"its calls waited for {traffic.lost.total_s:.1f} s"
        return Outcome("infrastructure_failure", reason=DEADLINE_IN_QUEUE, detail=detail)
    gave_up = traffic.num_cancelled > 0 and stalled_s < STANDSTILL_S
    if isinstance(outcome, LostGateway) and gave_up and not traffic.unanswered:
        outcome = replace(outcome, status="agent_failure")
    if outcome.status == "agent_failure":
        return replace(outcome, reward=config.agent_failure_reward)
    return outcome


def outcome_of_error(error: BaseException, llm: LLM) -> Outcome:
    """Return the outcome for an agent's exception.

    For a group, such as a task group raises, use the first member that is not a connection error.
    """
    try:
        return _outcome_of_error(error, llm)
    except MemoryError:
        detail = "memory ran out while its error was read"
        return Outcome("infrastructure_failure", None, "MemoryError", detail)
    except BaseException:  # noqa: BLE001  (the agent's own class may fail anywhere)
        return failure("unreadable_error", "the agent raised an error whose message cannot be read")


def _outcome_of_error(error: BaseException, llm: LLM) -> Outcome:
    errors = members(error)
    # Agents share memory, threads and descriptors, so running out is not one agent's fault.
    faults = [fault for fault in faults_of(errors) if not lacks_resources(fault)]
    first = (faults or errors)[0]
    reason = storable(type(first).__name__[:MAX_REASON]) or "unnamed_error"
    if type(first) is SystemExit:  # raised again, it would end the whole run
        return failure(reason, storable(f"the agent called sys.exit({first.code!r})"[:MAX_DETAIL]))
    detail = _detail(first, error)
    if faults:
        return failure(reason, detail)
    gateway = urlsplit(llm.base_url).netloc
    kind = LostGateway if gateway in map(address_of, errors) else Outcome
    return kind("infrastructure_failure", None, reason, detail)


def _detail(error: BaseException, raised: BaseException) -> str:
    """Return the error's message and where the agent raised it.

    A member of a group may never have been raised itself. Then use the group's traceback.
    """
    try:
        words = str.strip(str(error))
    except BaseException:  # noqa: BLE001  (foreign code may fail here too)
        words = ""
    frames = traceback.extract_tb(error.__traceback__ or raised.__traceback__)
    ours = [f for f in frames if not any(map(Path(f.filename).is_relative_to, LIBRARIES))]
    if not words:
        words, ours = "raised without a message", ours or list(frames)
    where = [f" (at {last.filename}:{last.lineno} in {last.name})" for last in ours[-1:]]
    return storable("".join([words[:MAX_DETAIL], *where]))


def storable(text: str) -> str:
    """Return the text with lone surrogates escaped, because no database accepts them."""
    return text.encode("utf-8", "backslashreplace").decode()


def finite(value: Any) -> float | None:
    """Return the value as a finite float, or None. See `as_number`."""
    number = as_number(value)
    return None if number is None or not math.isfinite(number) else number


def as_number(value: Any) -> float | None:
    """Return the value as a float, or None if it is no number.

    Accepts 0-d arrays of NumPy, JAX and PyTorch. An integer too large for a float is infinite.
    """
    is_array = not isinstance(value, type) and getattr(value, "ndim", None) == 0
    number = value.item() if is_array and hasattr(value, "item") else value
    if not isinstance(number, int | float):
        return None
    try:
        return float(number)
    except OverflowError:
        return math.inf
