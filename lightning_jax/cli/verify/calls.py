"""Stored calls of a run, and the selection of those that can be compared."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from lightning_jax.traces import attributes
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.store import Store
from lightning_jax.types import Span, Transition


@dataclass(frozen=True)
class StoredCall:
    """One call. `is_plain` is True if it was sampled at temperature 1 and without filters."""

    transition: Transition
    is_plain: bool

    @property
    def version(self) -> int:
        """Version of the weights that sampled its tokens, the same for all of them."""
        return self.transition.policy_versions[0]


def stored_calls(store: Store) -> tuple[list[StoredCall], dict[str, int]]:
    """Return the calls that hold tokens, by rollout, and the number of other calls by reason."""
    calls: list[StoredCall] = []
    left_out: Counter[str] = Counter()
    rollouts = store.rollouts()
    superseded = {rollout.rollout_id for rollout in rollouts if rollout.superseded}
    for rollout_id in (*(rollout.rollout_id for rollout in rollouts), None):
        spans = store.spans(rollout_id)
        transitions, reasons = spans_to_transitions(spans)
        if rollout_id in superseded:  # sampled by weights that the run has discarded
            left_out["superseded"] += len(transitions)
            continue
        left_out.update(reasons)
        by_id = {span.span_id: span for span in spans}
        calls += [StoredCall(call, _is_plain(call.call_id, by_id)) for call in transitions]
    return calls, dict(left_out)


def _is_plain(call_id: str, spans: Mapping[str, Span]) -> bool:
    """Return True if tokens were drawn from the policy's own distribution.

    The span of one of several choices has no settings, so its parent's are used.
    """
    span = spans[call_id]
    if attributes.CHOICE_INDEX in span.attributes:
        span = spans.get(span.parent_span_id or "", span)
    plain = {
        attributes.REQUEST_TEMPERATURE: 1,
        attributes.REQUEST_TOP_P: 1,
        attributes.REQUEST_TOP_K: 0,
        attributes.REQUEST_MIN_P: 0,
    }
    values = span.attributes
    same = all(values.get(name) == value for name, value in plain.items())
    return same and not values.get(attributes.ADJUSTED)


def with_known_weights(
    calls: Sequence[StoredCall], versions: Set[int]
) -> tuple[list[StoredCall], dict[str, int]]:
    """Return the calls whose weights version is known, and the number of other calls by reason.

    If the weights changed during a call, its KV cache held keys of several versions. No single
    version reproduces its numbers.
    """
    kept: list[StoredCall] = []
    reasons: Counter[str] = Counter()
    for call in calls:
        used = set(call.transition.policy_versions)
        if not used <= versions:
            reasons["weights_not_kept"] += 1
        elif len(used) > 1:
            reasons["weights_changed_during_the_call"] += 1
        else:
            kept.append(call)
    return kept, dict(reasons)
