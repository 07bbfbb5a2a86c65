"""Tests of reports about failed rollouts."""

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from coded import raises_coded
from log_events import records

from lightning_jax.rollouts.results.failures import BrokenAgent, Failure, FailureWatch, failures
from lightning_jax.traces import attributes
from lightning_jax.traces.listing import Filter, StoreListing
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout, RolloutStatus, Span


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "store.sqlite")) as store:
        yield store


def rollout(
    number: int, status: RolloutStatus = "scored", reason: str | None = None, detail: str = ""
) -> Rollout:
    return Rollout(
        f"r{number}", "t", "g", "eval", 0, number, 1, status, reason=reason, detail=detail
    )


def test_each_kind_of_failure_is_told_when_it_is_first_seen(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lightning_jax")
    watch = FailureWatch(store)
    some = [
        rollout(0),
        rollout(1, "agent_failure", "KeyError", "'text'\n  of a task"),
        rollout(2, "agent_failure", "KeyError", "'answer'"),
        rollout(3, "infrastructure_failure", "call_timeout"),
    ]
    watch.observe(some, "eval 0")
    watch.observe(some, "train 0")
    watch.observe([*some, rollout(4, "agent_failure", "deadline", "longer than 5 s")], "train 1")
    found = [(r.what, r.total, r.failure) for r in records(caplog, "rollouts_failed")]
    agent, infrastructure = "agent_failure", "infrastructure_failure"
    assert found == [
        ("eval 0", 4, Failure(agent, "KeyError", 2, "r1", "'text' of a task")),
        ("eval 0", 4, Failure(infrastructure, "call_timeout", 1, "r3")),
        ("train 1", 5, Failure(agent, "deadline", 1, "r4", "longer than 5 s")),
    ]
    assert len(caplog.records) == 3


def test_a_run_ends_where_no_rollout_gets_an_answer(store: Store) -> None:
    failed = [rollout(0, "agent_failure", "KeyError", "'text'"), rollout(1, "agent_failure", "no")]
    refused = Span("t", "1", None, "chat", 0, 1, {attributes.POLICY: "policy"}, "too long")
    store.add_span("r1", refused)
    with raises_coded(BrokenAgent, "all_failed", "r0") as caught:
        FailureWatch(store).observe(failed, "eval 0")
    assert "KeyError: 'text'" in str(caught.value)
    FailureWatch(store).observe([*failed, rollout(2)], "eval 0")
    store.add_span("r1", Span("t", "2", None, "chat", 1, 2, {attributes.POLICY: "policy"}))
    FailureWatch(store).observe(failed, "eval 0")


def test_a_run_ends_where_no_rollout_calls_the_policy(store: Store) -> None:
    scored = [replace(rollout(number), phase="train") for number in range(2)]
    FailureWatch(store).observe(scored, "train 0")
    watch = FailureWatch(store, max_share=0.5)
    watch.observe([rollout(0)], "eval 0")  # evaluations may
    with raises_coded(BrokenAgent, "no_calls", "r0"):
        watch.observe(scored, "train 0")
    store.add_span("r1", Span("t", "2", None, "chat", 1, 2, {attributes.POLICY: "policy"}))
    watch.observe(scored, "train 0")


def test_a_step_without_rollouts_is_no_failure(store: Store) -> None:
    FailureWatch(store).observe([], "train 0")


def test_an_agent_that_mostly_fails_for_one_reason_ends_the_run_at_the_second_step(
    store: Store,
) -> None:
    def step(num_failed: int, reason: str = "KeyError") -> list[Rollout]:
        failed = [rollout(i, "agent_failure", reason, "'text'") for i in range(num_failed)]
        return [*failed, *(rollout(i) for i in range(num_failed, 4))]

    watch = FailureWatch(store, max_share=0.5)
    for number, rollouts in enumerate(
        [step(3), step(2), step(3), step(3, "ValueError"), step(3, "KeyError")]
    ):
        watch.observe(rollouts, f"train {number}")  # never twice in a row for one reason
    with raises_coded(BrokenAgent, "too_many_failures", "r0") as caught:
        watch.observe(step(3), "eval 5")
    assert "eval 5" in str(caught.value) and "train 4" in str(caught.value)
    tolerant = FailureWatch(store, max_share=1.0)
    for number in range(3):
        tolerant.observe(step(3), f"train {number}")


def test_a_failed_run_lists_its_rollouts_until_it_resumes(store: Store) -> None:
    for number in range(2):
        made = rollout(number, "queued")
        store.add_rollout(made)
        store.set_status(made.rollout_id, "running")
        store.set_status(made.rollout_id, "agent_failure", reason="KeyError")
    store.set_step_groups(0, ["g"])
    with raises_coded(BrokenAgent, "all_failed", "r0"):
        FailureWatch(store).observe(store.rollouts(), "train 0")
    with closing(StoreListing(store.path)) as listing:
        assert listing.counts() == {"agent_failure": 2}
        assert listing.number(Filter(phase="eval")) == 2
        assert [row[:3] for row in listing.failures()] == [("agent_failure", "KeyError", 2)]
        store.supersede_marked()
        assert listing.counts() == {} and listing.failures() == []
    assert all(found.superseded for found in store.rollouts()) and store.step_groups(0) == []


def test_a_failure_counts_replies_that_the_token_limit_cut(store: Store) -> None:
    for number, late in ((0, None), (1, True), (2, None)):
        reason = "length" if number < 2 else "stop"
        values = {attributes.RESPONSE_FINISH_REASONS: (reason,), attributes.LATE: late}
        values = {name: value for name, value in values.items() if value is not None}
        store.add_span(
            f"r{number}",
            Span("t", "1", None, "chat", 0, 1, {attributes.POLICY: "policy"} | values),
        )
    failed = [rollout(number, "agent_failure", "Cut") for number in range(3)]
    watch = FailureWatch(store, max_share=0.5)
    watch.observe(failed, "train 0")
    with raises_coded(BrokenAgent, "too_many_failures", "r0") as caught:
        watch.observe(failed, "train 1")
    assert "rollout.max_tokens" in str(caught.value) and "1 of the 3" in str(caught.value)


@pytest.mark.parametrize("folder", ["a", "long " * 60])
def test_a_long_detail_keeps_its_place(folder: str) -> None:
    place = f"(at /{folder}/agent.py:12 in run)"
    (found,) = failures([rollout(0, "agent_failure", "E", "word\n" * 99 + f"done {place}")])
    assert found.detail.startswith("word word") and found.detail.endswith(f" ... {place}")
    (plain,) = failures([rollout(0, "agent_failure", "E", "word " * 99)])
    assert plain.detail.endswith(" ...") and len(plain.detail) <= 240


@pytest.mark.parametrize(
    ("workers", "named"),
    [
        (["a", "a", "a", "b"], "no file (3 in worker a)"),
        (["a", "a", "b", "b", "a", "b"], "no file"),  # each has half
        (["a", "a"], "no file"),
        ([None] * 5, "no file"),
    ],
)
def test_worker_with_most_failures_is_named(workers: list[str | None], named: str) -> None:
    failed = [
        replace(rollout(n, "agent_failure", "FileNotFoundError", "no file"), worker=worker)
        for n, worker in enumerate(workers)
    ]
    (found,) = failures(failed)
    assert (found.count, found.detail) == (len(workers), named)
