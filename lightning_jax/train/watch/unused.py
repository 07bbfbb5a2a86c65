"""Warnings about roles, policies and reward rules that match nothing in a step."""

import logging
import re
from collections.abc import Iterable, Sequence

from lightning_jax.rollouts.results.metrics import metric_code
from lightning_jax.traces.rewards import find_events
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.watch.monitors import unused_names
from lightning_jax.types import Metrics, Rollout, Span, Transition

log = logging.getLogger(__name__)

MAX_EXAMPLES = 5  # names in a warning
MAX_ROLLOUTS = 32  # rollouts to read for examples
MAX_CHARS = 60  # of an example's text


class UnusedWatch:
    """One-time warning about each role, policy and reward rule that no call of a step matched."""

    def __init__(self, reader: TraceReader, store: Store) -> None:
        self._reader, self._store = reader, store
        self._known: set[tuple[str, str]] = set()

    def observe(self, metrics: Metrics, rollouts: Sequence[Rollout], step: int) -> None:
        """Read a step's metrics and, for the names to suggest, some of its rollouts."""
        found = [which for which in unused_names([metrics]) if which not in self._known]
        if not found:
            return
        self._known.update(found)
        traces = []
        for rollout in rollouts[:MAX_ROLLOUTS]:
            spans = self._store.spans(rollout.rollout_id)
            traces.append((spans, self._reader.transitions(spans)[0]))
        calls = [call for _, transitions in traces for call in transitions]
        for kind, name in found:
            words = self._rule(name, calls, traces) if kind == "rule" else _called(kind, calls)
            log.warning(
                "step %d: %s %s matched nothing, so it has no effect; %s",
                *(step, kind, name, words),
                extra={"event": "unused_name", "kind": kind, "unused": name, "step": step},
            )

    def _rule(
        self,
        name: str,
        calls: Sequence[Transition],
        traces: Sequence[tuple[Sequence[Span], Sequence[Transition]]],
    ) -> str:
        """Return what a rule could have matched, and the fix."""
        key = next(key for key in self._reader.rules if metric_code(key) == name)
        rule = self._reader.rules[key]
        texts = [
            event.text
            for spans, transitions in traces
            for event in find_events(spans, transitions, {rule.fact}, self._reader.decode)
        ]
        if not texts:
            return f"no {rule.fact} occurred (tools are seen if the agent's spans are sent here)"
        if not any(re.search(rule.pattern or "", text, re.M) for text in texts):
            example = texts[0][:MAX_CHARS]
            return f"no {rule.fact} has its pattern, such as {example!r}; correct the pattern"
        agents = _names(call.agent for call in calls)
        return f"{len(texts)} x {rule.fact} occurred, but by the agents {agents}; correct its agent"


def _called(kind: str, calls: Sequence[Transition]) -> str:
    """Return the names in the calls, and the fix for a role or a policy."""
    models, agents = _names(call.policy for call in calls), _names(call.agent for call in calls)
    fix = {
        "role": "correct its patterns, or move it before the role that takes its calls",
        "policy": "ask for it as the model, or name it as the policy of a role",
    }
    return f"calls asked for the models {models} as the agents {agents}; {fix[kind]}"


def _names(names: Iterable[str]) -> str:
    """Return the distinct names, or "none" without any."""
    distinct = [name for name in dict.fromkeys(names) if name]
    shown = ", ".join(name[:MAX_CHARS] for name in distinct[:MAX_EXAMPLES])
    return (shown or "none") + (", ..." if len(distinct) > MAX_EXAMPLES else "")
