"""Tests of which stored calls and log-probs can be compared with weights."""

import dataclasses

import pytest

from lightning_jax.cli.verify.calls import StoredCall, _is_plain, with_known_weights
from lightning_jax.testing.records import transition
from lightning_jax.traces import attributes
from lightning_jax.types import Span


def test_calls_of_lost_or_multiple_versions_are_counted() -> None:
    one, lost, mixed = (StoredCall(transition([1], [2, 3], version=v), True) for v in (0, 1, 0))
    changed = dataclasses.replace(mixed.transition, policy_versions=(0, 2))
    kept, reasons = with_known_weights([one, lost, StoredCall(changed, True)], {0, 2})
    assert kept == [one]
    assert reasons == {"weights_not_kept": 1, "weights_changed_during_the_call": 1}


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({attributes.REQUEST_TEMPERATURE: 0.7}, False),
        ({attributes.REQUEST_TOP_P: 0.9}, False),
        ({attributes.REQUEST_TOP_K: 5}, False),
        ({attributes.REQUEST_MIN_P: 0.1}, False),
        ({attributes.ADJUSTED: True}, False),
    ],
)
def test_only_calls_that_filter_nothing_are_plain(changes: dict, plain: bool) -> None:
    settings = {
        attributes.REQUEST_TEMPERATURE: 1.0,
        attributes.REQUEST_TOP_P: 1.0,
        attributes.REQUEST_TOP_K: 0,
        attributes.REQUEST_MIN_P: 0.0,
    }
    call = Span("t", "call", None, "chat", 1, 2, settings | changes)
    choice = Span("t", "choice", "call", "choice", 1, 2, {attributes.CHOICE_INDEX: 1})
    spans = {"call": call, "choice": choice}
    assert _is_plain("call", spans) is _is_plain("choice", spans) is plain
