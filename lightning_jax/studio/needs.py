"""Settings that an agent seems to need, from the sizes and times of its calls. Pure functions."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_jax.engine.config import ServeConfig
from lightning_jax.rl.config import ROW_LEN, BatchConfig
from lightning_jax.rl.credit import CUT_SHORT
from lightning_jax.rollouts.agents.outcome import DEADLINE
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.studio.exchange import is_remote, read_call
from lightning_jax.traces import attributes
from lightning_jax.traces.tree import has_choice_spans, is_gateway_call
from lightning_jax.types import Rollout, Span

# Room for other tasks and samples, which are longer, and for other agents at the same time.
PROMPT_ROOM, REPLY_ROOM, TIME_ROOM = 1.25, 1.5, 2.0
UNKNOWN_REPLY = 256  # tokens of a reply if none has been seen
PROMPT_STEP, REPLY_STEP, TIME_STEP_S = 256, 64, 10  # the settings are multiples


@dataclass(frozen=True)
class Usage:
    """Largest sizes and times of the calls of some rollouts."""

    num_calls: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    cut_tokens: int = 0  # of the longest reply that the settings' limits cut; 0: none
    asked_tokens: int = 0  # largest limit that the agent itself set; 0: a call had none
    call_s: float = 0.0  # 0: unknown, because another server answered
    rollout_s: float = 0.0
    has_call_timeout: bool = False
    has_deadline: bool = False


def usage_of(
    pairs: Iterable[tuple[Rollout, Sequence[Span]]],
    rollout: RolloutConfig,
    serve: ServeConfig,
    *,
    is_remote_policy: bool,
) -> Usage:
    """Return what the rollouts used, from their spans.

    Calls that another server answered count if it stands for the policy, but not their times.
    """
    calls: list[_Call] = []
    rollout_s, has_deadline = 0.0, False
    for done, spans in pairs:
        of_policy = [span for span in spans if is_remote(span) is is_remote_policy]
        calls += filter(None, (_call(span, rollout.max_tokens, serve) for span in of_policy))
        starts = [span.start_ns for span in spans if span.start_ns > 0]
        ends = max((span.end_ns for span in spans), default=0)
        rollout_s = max(rollout_s, (ends - min(starts, default=ends)) / 1e9)
        has_deadline |= done.reason == DEADLINE
    limits = [call.agent_limit for call in calls]
    return Usage(
        num_calls=sum(call.is_whole for call in calls),
        prompt_tokens=max((call.prompt for call in calls), default=0),
        reply_tokens=max((call.reply for call in calls), default=0),
        cut_tokens=max((call.reply for call in calls if call.is_cut), default=0),
        asked_tokens=max(limits, default=0) if all(limits) else 0,
        call_s=max((call.seconds for call in calls), default=0.0),
        rollout_s=0.0 if is_remote_policy else rollout_s,
        has_call_timeout=any(call.has_timed_out for call in calls),
        has_deadline=has_deadline,
    )


def needed_settings(
    usage: Usage, rollout: RolloutConfig, serve: ServeConfig, batch: BatchConfig
) -> dict[str, int]:
    """Return the settings to raise, with room for longer and slower calls than those seen."""
    if not usage.num_calls:
        return {}
    needed: dict[str, int] = {}
    reply = rollout.max_tokens or usage.asked_tokens or None
    if usage.reply_tokens:
        longest = max(REPLY_ROOM * usage.reply_tokens, TIME_ROOM * usage.cut_tokens)
        enough = _up(longest, REPLY_STEP)
        if reply is None or (usage.cut_tokens and reply < enough):
            reply = needed["rollout.max_tokens"] = enough
    length = _up(PROMPT_ROOM * usage.prompt_tokens + (reply or UNKNOWN_REPLY), PROMPT_STEP)
    if serve.max_len < length:
        needed["serve.max_len"] = length
        is_derived = batch.row_len == max(ROW_LEN, serve.max_len)
        if batch.row_len < length and not is_derived:
            needed["batch.row_len"] = length
    limits = {
        "rollout.call_timeout_s": (rollout.call_timeout_s, usage.call_s, usage.has_call_timeout),
        "rollout.timeout_s": (rollout.timeout_s, usage.rollout_s, usage.has_deadline),
    }
    for name, (limit, seen, was_met) in limits.items():
        enough = _up(TIME_ROOM * max(seen, limit if was_met else 0.0), TIME_STEP_S)
        if limit < enough:
            needed[name] = enough
    return needed


def need_lines(usage: Usage, needed: Mapping[str, int]) -> list[str]:
    """Return lines with what was used, and with the `needed_settings` as one can type them."""
    if not usage.num_calls:
        return []
    cut = " (cut)" if usage.cut_tokens and usage.cut_tokens == usage.reply_tokens else ""
    seen = [f"longest prompt {usage.prompt_tokens} tokens"] * bool(usage.prompt_tokens)
    seen += [f"longest reply {usage.reply_tokens} tokens{cut}"] * bool(usage.reply_tokens)
    seen += [f"slowest call {usage.call_s:.1f} s"] * bool(usage.call_s)
    words = " ".join(f"{name}={value}" for name, value in needed.items())
    lines = [", ".join(seen)] * bool(seen)
    if words:
        return [*lines, f"this agent seems to need: {words}"]
    return [*lines, "the settings leave room for such calls"] if seen else []


@dataclass(frozen=True)
class _Call:
    """One call, or one of its choices."""

    is_whole: bool
    prompt: int
    reply: int
    is_cut: bool  # by a limit of the settings
    agent_limit: int  # set by the agent itself, or 0
    seconds: float
    has_timed_out: bool


def _call(span: Span, max_tokens: int | None, serve: ServeConfig) -> _Call | None:
    values = span.attributes
    if is_remote(span):
        read = read_call(span)
        sizes = read.num_prompt_tokens or 0, read.num_response_tokens or 0
        return _Call(True, *sizes, is_cut=False, agent_limit=0, seconds=0.0, has_timed_out=False)
    if attributes.POLICY not in values:
        return None
    num_ids = len(values.get(attributes.PROMPT_TOKEN_IDS, ()))  # 0 of a prompt far too long
    prompt = num_ids or int(values.get(attributes.USAGE_INPUT_TOKENS, 0))
    reply = 0 if has_choice_spans(span) else len(values.get(attributes.RESPONSE_TOKEN_IDS, ()))
    limit = int(values.get(attributes.REQUEST_MAX_TOKENS, 0))
    is_ours = limit in (max_tokens, max(serve.max_len - num_ids, 1))
    is_late = bool(values.get(attributes.LATE))
    return _Call(
        is_whole=is_gateway_call(span),
        prompt=prompt,
        reply=reply,
        is_cut=CUT_SHORT in values.get(attributes.RESPONSE_FINISH_REASONS, ())
        and is_ours
        and not is_late,
        agent_limit=0 if is_ours else limit,
        seconds=max(span.end_ns - span.start_ns, 0) / 1e9,
        has_timed_out=is_late or values.get(attributes.ERROR_TYPE) == "call_timeout",
    )


def _up(value: float, step: int) -> int:
    """Return the next multiple of `step`."""
    return math.ceil(value / step) * step
