"""Tests that a rollout's spans become one trace, with the names of the GenAI conventions."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.traces import attributes
from lightning_jax.traces.export import CONTENT, INTERNAL, FinishedRollout, to_trace
from lightning_jax.types import Rollout, Span

TRACE, ROOT = "a" * 32, "b" * 16
ROLLOUT = Rollout(
    "train-00003-000-01-1", "t7", "train-00003-000", "train", 3, 1, 1, "scored", 0.75,
    metrics={"f1": 0.5}, components={"agent": 0.5, "judge": 0.25},
)  # fmt: skip
CALL: dict[str, Any] = {
    attributes.OPERATION_NAME: "chat",
    attributes.POLICY: "policy",
    attributes.ROLLOUT_ID: ROLLOUT.rollout_id,
    attributes.REQUEST_MODEL: "policy",
    attributes.RESPONSE_ID: "chatcmpl-1",
    attributes.PROMPT_TOKEN_IDS: (1, 2),
    attributes.RESPONSE_TOKEN_IDS: (3,),
    attributes.BEHAVIOR_LOGPROBS: (-0.5,),
    attributes.SAMPLING_LOGPROBS: (-0.5,),
    attributes.POLICY_VERSIONS: (2, 3),
    attributes.AGENT: "",
}


def _root(**values: Any) -> Span:
    known = {attributes.ROLLOUT_ID: ROLLOUT.rollout_id, attributes.PROMPTS: '{"system": "Add"}'}
    return Span(TRACE, ROOT, None, "rollout", 100, 900, known | values)


def _call(span_id: str = "c" * 16, parent: str = ROOT, **values: Any) -> Span:
    return Span(TRACE, span_id, parent, "chat policy", 200, 300, CALL | values)


def _theirs(name: str, span_id: str, parent: str | None, **values: Any) -> Span:
    keys = {key.replace("__", "."): value for key, value in values.items()}
    trace_id = keys.pop("trace_id", TRACE)
    return Span(trace_id, span_id, parent, name, 400, 500, keys)


def _trace(*spans: Span, has_content: bool = True, **of_rollout: Any) -> list[Span]:
    finished = FinishedRollout(ROLLOUT, spans, agent="agent.py:run", **of_rollout)
    return to_trace(
        finished, (lambda span: {"gen_ai.input.messages": "[]"}) if has_content else None
    )


def test_the_root_says_what_the_rollout_earned_and_learned() -> None:
    call = _call()
    numbers = {call.span_id: {attributes.ADVANTAGE: -0.5}}
    root, sent = _trace(_root(), call, task={"question": "1 + 1"}, numbers=numbers)
    assert (root.name, root.parent_span_id, root.error) == ("invoke_agent agent.py:run", None, None)
    assert root.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "lightning_jax",
        "gen_ai.agent.name": "agent.py:run",
        "openinference.span.kind": "AGENT",
        "lightning.rollout_id": "train-00003-000-01-1",
        "lightning.task_id": "t7",
        "lightning.group_id": "train-00003-000",
        "lightning.phase": "train",
        "lightning.step": 3,
        "lightning.attempt": 1,
        "lightning.status": "scored",
        "lightning.reward": 0.75,
        "lightning.version": 3,
        "lightning.advantage": -0.5,
        "lightning.component.agent": 0.5,
        "lightning.component.judge": 0.25,
        "lightning.metric.f1": 0.5,
        "input.value": '{"question": "1 + 1"}',
        "lightning.prompts": '{"system": "Add"}',
    }
    assert sent.attributes["lightning.advantage"] == -0.5
    assert sent.attributes["lightning.version"] == 3


def test_a_call_keeps_its_ids_times_and_names_but_no_tokens() -> None:
    _, call = _trace(_root(), _call())
    assert (call.trace_id, call.span_id, call.parent_span_id) == (TRACE, "c" * 16, ROOT)
    assert (call.name, call.start_ns, call.end_ns) == ("chat policy", 200, 300)
    assert not INTERNAL & call.attributes.keys()
    assert call.attributes["gen_ai.input.messages"] == "[]"
    assert call.attributes["openinference.span.kind"] == "LLM"
    assert attributes.AGENT not in call.attributes  # it is ""


def test_a_failed_rollout_has_its_reason_and_detail() -> None:
    failed = Rollout(
        "r", "t", "g", "eval", 0, 0, 2, "agent_failure", 0.0, "KeyError", "no tool 'x' in /home/me"
    )
    (root,) = to_trace(FinishedRollout(failed, [_root()]), lambda span: {})
    assert (root.name, root.error) == ("invoke_agent", "no tool 'x' in /home/me")
    assert root.attributes["lightning.status"] == "agent_failure"
    assert root.attributes["lightning.reason"] == root.attributes["error.type"] == "KeyError"
    assert root.attributes["lightning.detail"] == root.error
    (root,) = to_trace(FinishedRollout(failed, [_root()]), None)
    assert root.error == "KeyError" and attributes.DETAIL not in root.attributes


def test_a_posted_reward_is_an_attribute_of_its_call() -> None:
    values = {
        attributes.ROLLOUT_ID: ROLLOUT.rollout_id,
        attributes.REWARD: 0.25,
        attributes.REWARD_CALL: "chatcmpl-1",
    }
    posted = Span(TRACE, "d" * 16, "c" * 16, "reward", 350, 350, values)
    _, call = _trace(_root(), _call(), posted)
    assert call.attributes["lightning.reward"] == 0.25


def test_an_openinference_tool_gets_the_names_of_the_conventions() -> None:
    _, tool = _trace(_root(), _theirs("look up", "d" * 16, ROOT, openinference__span__kind="TOOL"))
    assert tool.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look up",
        "openinference.span.kind": "TOOL",
    }


def test_spans_of_another_trace_join_and_keep_its_id_as_an_attribute() -> None:
    other = "e" * 32
    outer = _theirs("outer", "c" * 16, None, trace_id=other)  # the id of the call, by chance
    inner = _theirs("inner", "f" * 16, "c" * 16, trace_id=other)
    root, *rest = _trace(_root(), _call(), outer, inner)
    by_name = {span.name: span for span in rest}
    assert {span.trace_id for span in rest} == {TRACE}
    assert len({span.span_id for span in (root, *rest)}) == 4
    assert by_name["outer"].parent_span_id == ROOT
    assert by_name["inner"].parent_span_id == by_name["outer"].span_id
    assert by_name["outer"].attributes[attributes.ORIGINAL_TRACE_ID] == other
    assert attributes.ORIGINAL_TRACE_ID not in by_name["chat policy"].attributes


def test_circles_and_missing_parents_go_below_the_root() -> None:
    first = _theirs("first", "1" * 16, "2" * 16)
    second = _theirs("second", "2" * 16, "1" * 16)
    lost = _theirs("lost", "3" * 16, "9" * 16)
    trace = _trace(_root(), first, second, lost)
    parents = {span.name: span.parent_span_id for span in trace}
    assert parents["lost"] == ROOT
    assert {parents["first"], parents["second"]} in ({ROOT, "1" * 16}, {ROOT, "2" * 16})


def test_a_span_without_times_begins_with_the_rollout() -> None:
    _, span = _trace(_root(), Span(TRACE, "1" * 16, ROOT, "no clock", 0, 0))
    assert (span.start_ns, span.end_ns) == (100, 100)


def test_without_a_root_there_is_one_around_the_spans() -> None:
    call = _call(parent="9" * 16)
    root, sent = _trace(call)
    assert (root.start_ns, root.end_ns) == (200, 300)
    assert sent.parent_span_id == root.span_id and sent.trace_id == root.trace_id
    assert _trace(call)[0].span_id == root.span_id  # each time


def test_without_content_no_text_leaves() -> None:
    secret = "the patient's name"
    spans = (
        _root(**{attributes.PROMPTS: secret}),
        _call(**{key: secret for key in CONTENT}),
        Span(TRACE, "d" * 16, ROOT, "chat", 1, 2, CALL, error=secret),
        _theirs(
            "look up",
            "e" * 16,
            ROOT,
            gen_ai__operation__name="execute_tool",
            gen_ai__tool__name="search",
            gen_ai__tool__call__arguments=secret,
            input__value=secret,
            llm__input_messages=(secret,),
            num_results=3,
            anything={"at": secret},
        ),
    )
    trace = _trace(*spans, has_content=False, task={"question": secret})
    assert secret not in json.dumps([[s.attributes, s.error] for s in trace])
    tool = next(span for span in trace if span.name == "look up")
    assert tool.attributes["gen_ai.tool.name"] == "search"
    assert tool.attributes["num_results"] == 3
    assert len(trace) == 4


IDS = st.sampled_from([ROOT, *(digit * 16 for digit in "123")])


@given(st.lists(st.tuples(IDS, st.none() | IDS, st.sampled_from([TRACE, "e" * 32])), max_size=6))
def test_any_spans_become_one_tree(parts: list[tuple[str, str | None, str]]) -> None:
    spans = [_theirs("s", name, above, trace_id=trace) for name, above, trace in parts]
    root, *rest = _trace(_root(), *spans)
    before = {root.span_id}
    for span in rest:
        assert span.trace_id == TRACE and span.parent_span_id in before
        assert span.span_id not in before
        before.add(span.span_id)
