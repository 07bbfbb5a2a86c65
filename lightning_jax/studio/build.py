"""Conversion of rollouts and spans to view records. Pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from lightning_jax.gateway.prompt.tool_formats import open_thought
from lightning_jax.gateway.prompt.turns import read_response
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer
from lightning_jax.rl.batches.packing import common_prefix
from lightning_jax.rollouts.results.failures import failures
from lightning_jax.studio.exchange import is_remote, last_longest, remote_call
from lightning_jax.studio.records import (
    MAX_NAME_CHARS,
    CallView,
    Kind,
    RolloutRow,
    RolloutView,
    RunView,
    SpanView,
    StepCredit,
    TokenView,
    as_text,
    common_length,
    cut,
)
from lightning_jax.system.text import printable
from lightning_jax.traces import attributes
from lightning_jax.traces.tree import (
    call_order,
    has_choice_spans,
    in_tree_order,
    is_gateway_call,
    is_tool,
)
from lightning_jax.types import Rollout, Span, Transition

INPUTS = (attributes.TOOL_ARGUMENTS, attributes.INPUT, "tool.parameters", "gen_ai.input.messages")
OUTPUTS = (attributes.TOOL_RESULT, attributes.OUTPUT, "gen_ai.output.messages")
TOOL_NAMES = (attributes.TOOL_NAME, "tool.name")
# Attributes with one item per token, and attributes that a view shows separately.
SHOWN_OTHERWISE = frozenset(
    {attributes.PROMPT_TOKEN_IDS, attributes.RESPONSE_TOKEN_IDS, attributes.BEHAVIOR_LOGPROBS}
    | {attributes.SAMPLING_LOGPROBS, attributes.TEMPERED_LOGPROBS, attributes.POLICY_VERSIONS}
    | {attributes.FORCED, attributes.ROLLOUT_ID, *INPUTS, *OUTPUTS}
)
MAIN_FIELDS = ("question", "prompt")  # of a task; else its first text is shown
TASK_CHARS = 40  # of a task's text in a table
NO_SPANS = "no spans: the agent made no calls, or none has finished yet"


def view_rollout(
    rollout: Rollout,
    spans: Sequence[Span],
    transitions: Sequence[Transition],
    tokenizer: Tokenizer | None,
    credit: StepCredit,
    task: Mapping[str, str] = MappingProxyType({}),
) -> RolloutView:
    """Return the rollout as a tree in time. `transitions` are from its spans.

    Without a tokenizer, texts are empty. `task` has the fields of its task.
    """
    ordered = in_tree_order(spans)
    calls = _calls(spans, {call.call_id: call for call in transitions}, tokenizer, credit)
    # An agent's instrumentation may send spans without times.
    origin = min((span.start_ns for span in spans if span.start_ns > 0), default=0)
    end = max((span.end_ns for span in spans), default=origin)
    return RolloutView(
        rollout=_printable(rollout),
        duration_s=max(end - origin, 0) / 1e9,
        spans=tuple(_span(span, depth, origin, calls) for span, depth in ordered),
        task=tuple(
            (printable(cut(name, MAX_NAME_CHARS)), printable(text)) for name, text in task.items()
        ),
        notes=(*credit.notes, *(() if spans else (NO_SPANS,))),
        task_name=task_name(rollout.task_id, task),
    )


def view_run(
    name: str,
    matching: Sequence[Rollout],
    in_table: Sequence[tuple[Rollout, Sequence[Span]]],
    tasks: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> RunView:
    """Return the table of the rollouts `in_table`. Counts and failures are of all `matching` ones.

    `matching` is sorted newest first. `tasks` has the fields of tasks by rollout id.
    """
    return RunView(
        name=name,
        rows=tuple(
            _row(rollout, spans, tasks.get(rollout.rollout_id, {})) for rollout, spans in in_table
        ),
        num_left_out=len(matching) - len(in_table),
        counts=dict(Counter(rollout.status for rollout in matching)),
        failures=tuple(
            replace(failure, reason=printable(failure.reason), detail=printable(failure.detail))
            for failure in failures(matching)
        ),
    )


def newest_first(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Sort by step, last one first. Within a step, training comes before the evaluation.

    An evaluation runs before the training of its step. Otherwise the order does not change.
    """
    return sorted(rollouts, key=lambda rollout: (-rollout.step, rollout.phase != "train"))


def task_name(task_id: str, fields: Mapping[str, str]) -> str:
    """Return the id and the start of the task's question or other text, on one line."""
    texts = [fields[name] for name in MAIN_FIELDS if fields.get(name, "").strip()]
    texts += [text for text in fields.values() if any(map(str.isalpha, text))]
    main = " ".join(texts[0].split()) if texts else ""
    if len(main) > TASK_CHARS:
        main = f"{main[:TASK_CHARS]}..."
    task_id = cut(task_id, MAX_NAME_CHARS)
    return printable(f"{task_id}: {main}" if main else task_id)


def _row(rollout: Rollout, spans: Sequence[Span], task: Mapping[str, str]) -> RolloutRow:
    starts = [span.start_ns for span in spans if span.start_ns > 0]
    took = max((span.end_ns for span in spans), default=0) - min(starts, default=0)
    return RolloutRow(
        rollout=_printable(rollout),
        task_name=task_name(rollout.task_id, task),
        seconds=max(took, 0) / 1e9 if starts else 0.0,
        num_calls=sum(is_gateway_call(span) for span in spans),
    )


def _printable(rollout: Rollout) -> Rollout:
    """Return the rollout with text from tasks and agents made safe to print."""
    return replace(
        rollout,
        task_id=printable(rollout.task_id),
        reason=None if rollout.reason is None else printable(rollout.reason),
        detail=None if rollout.detail is None else printable(rollout.detail),
        worker=None if rollout.worker is None else printable(rollout.worker),
        metrics={printable(name): value for name, value in rollout.metrics.items()},
    )


# Calls


def _holds_prompt(span: Span) -> bool:
    """Return True for a call that a policy answered, or for the span of one of its choices."""
    if not span.attributes.get(attributes.PROMPT_TOKEN_IDS):
        return False
    return not has_choice_spans(span) or span.error is not None


def _calls(
    spans: Sequence[Span],
    transitions: Mapping[str, Transition],
    tokenizer: Tokenizer | None,
    credit: StepCredit,
) -> dict[str, CallView]:
    """Return the calls by span id."""
    call_spans = [span for span in spans if _holds_prompt(span) or is_remote(span)]
    paths: dict[int, np.ndarray] = {}  # prompt and response by the number of the call
    messages: dict[int, tuple[str, ...]] = {}  # of calls that another server answered
    calls = {}
    for number, span in enumerate(sorted(call_spans, key=call_order), start=1):
        if is_remote(span):
            calls[span.span_id], messages[number] = remote_call(span, number, messages)
            continue
        prompt = np.asarray(span.attributes[attributes.PROMPT_TOKEN_IDS], np.int64)
        response = np.asarray(span.attributes.get(attributes.RESPONSE_TOKEN_IDS, ()), np.int64)
        sizes = {earlier: common_prefix(path, prompt) for earlier, path in paths.items()}
        longest, shares_with = last_longest(sizes)
        paths[number] = np.concatenate([prompt, response])
        calls[span.span_id] = replace(
            _call(span, number, longest, tokenizer, transitions.get(span.span_id)),
            shares_with=shares_with,
            num_shared_tokens=longest,
            credit=credit.by_call.get(span.span_id),
        )
    return calls


def _call(
    span: Span,
    number: int,
    num_shared: int,
    tokenizer: Tokenizer | None,
    transition: Transition | None,
) -> CallView:
    """Build a call whose first `num_shared` tokens an earlier one had, without its credit.

    `transition` is None if the call failed.
    """
    values = span.attributes
    prompt = tuple(values[attributes.PROMPT_TOKEN_IDS])
    response = tuple(values.get(attributes.RESPONSE_TOKEN_IDS, ()))
    shared_text = new_text = ""
    texts, tool_calls = ("",) * len(response), ()
    if tokenizer is not None:
        shared_text, new_text = split_text(prompt, num_shared, tokenizer)
        texts = token_texts(response, tokenizer)
        # A grammar leaves no room for thoughts.
        thought = "" if attributes.FORCED in values else open_thought(prompt, tokenizer)
        _, calls = read_response(response, tokenizer, thought)
        tool_calls = tuple((printable(name), printable(words)) for name, words in calls)
    logprobs = tuple(values.get(attributes.BEHAVIOR_LOGPROBS, ())) or (None,) * len(response)
    forced = tuple(values.get(attributes.FORCED, ())) or (False,) * len(response)
    versions = tuple(values.get(attributes.POLICY_VERSIONS, ())) or (None,) * len(response)
    recorded = [logprob for logprob in logprobs if logprob is not None]
    return CallView(
        number=number,
        num_prompt_tokens=len(prompt),
        shared_text=shared_text,
        new_text=new_text,
        tokens=tuple(map(TokenView, texts, logprobs, forced, versions)),
        tool_calls=tool_calls,
        finish_reason=", ".join(map(as_text, values.get(attributes.RESPONSE_FINISH_REASONS, ()))),
        mean_logprob=float(np.mean(recorded)) if recorded else None,
        versions=tuple(sorted(set(values.get(attributes.POLICY_VERSIONS, ())))),
        reward=transition.reward if transition else 0.0,
        agent=printable(transition.agent if transition else str(values.get(attributes.AGENT, ""))),
        role=printable(transition.role) if transition else "",
        answered_by=printable(str(values.get(attributes.ANSWERED_BY, ""))),
        trains=transition.trains if transition else False,
    )


def split_text(ids: Sequence[int], num_head: int, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text of the first `num_head` tokens and the rest of the text, with special tokens.

    A character with bytes on both sides goes to the rest.
    """
    whole = tokenizer.decode(ids, skip_special=False)
    head = tokenizer.decode(ids[:num_head], skip_special=False)
    size = common_length(head, whole)
    return printable(whole[:size]), printable(whole[size:])


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the text that each token adds. A character of several tokens goes to the last one."""
    decoder = StreamDecoder(tokenizer)
    texts = []
    for token_id in ids:
        if token_id in tokenizer.special_ids:
            texts.append(decoder.flush() + tokenizer.decode([token_id], skip_special=False))
            decoder = StreamDecoder(tokenizer)
        else:
            texts.append(decoder.push(token_id))
    if texts:
        texts[-1] += decoder.flush()
    return tuple(printable(text) for text in texts)


# Spans


def _span(span: Span, depth: int, origin: int, calls: Mapping[str, CallView]) -> SpanView:
    start = max(span.start_ns, origin)
    call = calls.get(span.span_id)
    kind, error = _kind(span), span.error
    if error is not None:
        reason = str(span.attributes.get(attributes.ERROR_TYPE, ""))
        error = printable(": ".join(filter(None, (reason, error))))
    return SpanView(
        kind=kind,
        label=_label(span, kind, call),
        depth=depth,
        start_s=(start - origin) / 1e9,
        duration_s=max(span.end_ns - start, 0) / 1e9,
        error=error,
        call=call,
        input=_first(span, INPUTS),
        output=_first(span, OUTPUTS),
        attributes=tuple(
            (printable(name), as_text(value))
            for name, value in sorted(span.attributes.items())
            if name not in SHOWN_OTHERWISE
        ),
    )


def _kind(span: Span) -> Kind:
    values = span.attributes
    operation, kind = values.get(attributes.OPERATION_NAME), values.get(attributes.SPAN_KIND)
    if attributes.REWARD_CALL in values:
        return "reward"
    if is_tool(span):
        return "tool"
    if operation in attributes.GENERATIONS or kind == "LLM":
        return "llm"
    if operation == attributes.INVOKE_AGENT or kind == "AGENT":
        return "agent"
    return "other"


def _label(span: Span, kind: Kind, call: CallView | None) -> str:
    values = span.attributes
    if call:
        return f"{call.number} {printable(span.name)}" + f" ({call.agent})" * bool(call.agent)
    if kind == "tool":
        return _first(span, TOOL_NAMES) or printable(span.name)
    if kind == "agent":
        return printable(str(values.get(attributes.AGENT_NAME) or span.name))
    if kind == "reward":
        return f"reward {float(values.get(attributes.REWARD, 0.0)):+g}"
    return printable(span.name)


def _first(span: Span, keys: Sequence[str]) -> str:
    values = (span.attributes[key] for key in keys if span.attributes.get(key) not in (None, ""))
    return next(map(as_text, values), "")
