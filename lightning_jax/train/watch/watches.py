"""Warnings and errors about steps that learn too little, or something else than is wanted."""

import json
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lightning_jax.errors import UserError
from lightning_jax.models.policies import Policy
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rollouts.config import RewardConfig
from lightning_jax.rollouts.results.audit import most_overrated
from lightning_jax.rollouts.results.metrics import metric_code
from lightning_jax.system.text import has_words
from lightning_jax.traces import attributes
from lightning_jax.traces.rewards import Decode, find_events
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.hook import Hook
from lightning_jax.train.watch.findings import TROUBLESHOOTING, findings, unused_names
from lightning_jax.types import Metrics, Rollout, Span, Transition

log = logging.getLogger(__name__)

MANY_FEWER = 0.75  # share of the rows
# Nats. Sampler and trainer share one forward function, so more is a bug. bfloat16 rounds by 1e-3.
MISMATCH_ALARM = {"float32": 1e-3, "bfloat16": 1e-2}
FULL = 0.75  # share of used targets; the last row is rarely full, and calls are not split
WINDOW = 4  # steps at the start, and newest steps, that are compared for gaming
NUM_ERRORS = 2.0  # standard errors that such a change must exceed
MAX_EXAMPLES = 5  # names in a warning
MAX_ROLLOUTS = 32  # rollouts to read for examples
MAX_CHARS = 60  # of an example's text


class NotFinite(UserError, RuntimeError):
    """Non-finite gradients in many steps in a row, so that the run no longer learns."""


class FiniteWatch(Hook):
    """Counter of consecutive steps without a finite gradient, per weight set."""

    def __init__(self, policies: Sequence[Policy], limit: int) -> None:
        self._policies, self._limit = policies, limit
        self._in_a_row: Counter[Policy] = Counter()

    def after_update(self, step: int, metrics: Metrics) -> None:
        """Read a step's metrics. Raises NotFinite if the limit is reached.

        Steps with nothing to learn from do not count.
        """
        for policy in self._policies:
            num_updates = metrics.get(f"train/num_updates{policy.suffix}", 0.0)
            if not num_updates:
                continue
            if metrics[f"train/skipped_updates{policy.suffix}"] < num_updates:
                self._in_a_row[policy] = 0
                continue
            self._in_a_row[policy] += 1
            if self._in_a_row[policy] >= self._limit:
                raise NotFinite(
                    f"the gradient{f' of {policy.name}' if policy.name else ''} was not finite "
                    f"in {self._in_a_row[policy]} steps in a row, up to step {step}, and the "
                    f"weights did not change; algorithm.max_nonfinite_steps is {self._limit}. "
                    "Lower the learning rate, or look for rewards and log-probabilities that are "
                    "not finite.",
                    reason="not_finite",
                    key=policy.name or None,
                )


class PackingWatch(Hook):
    """One-time warning about a step whose targets need many more rows than its nodes."""

    def __init__(self, batch: BatchConfig) -> None:
        self._batch, self._has_warned = batch, False

    def after_update(self, step: int, metrics: Metrics) -> None:
        batch, rows = self._batch, metrics["train/num_rows"]
        needed = math.ceil(metrics["train/tokens_forest"] / batch.row_len)
        if self._has_warned or metrics["train/targets_share"] < FULL or needed > MANY_FEWER * rows:
            return
        self._has_warned = True
        log.warning(
            "step %d: its nodes took %.0f rows of %d where about %d are enough, because a row is "
            "full at %d targets; raise batch.max_targets, which costs almost nothing",
            *(step, rows, batch.row_len, needed, batch.max_targets),
            extra={"event": "rows_full_of_targets", "step": step, "rows": rows, "needed": needed},
        )


class DropWatch(Hook):
    """One-time warning about sequences that no row can hold and that are never trained on."""

    def __init__(self, batch: BatchConfig) -> None:
        self._batch = batch
        self._known_reasons: set[str] = set()

    def after_update(self, step: int, metrics: Metrics) -> None:
        row_len, max_targets = self._batch.row_len, self._batch.max_targets
        for reason, words in (
            ("too_long", f"{row_len} tokens; raise batch.row_len"),
            ("too_many_targets", f"{max_targets} targets; raise batch.max_targets"),
        ):
            number = metrics.get(f"train/dropped_{reason}", 0.0)
            if number and reason not in self._known_reasons:
                self._known_reasons.add(reason)
                log.warning(
                    "step %d: %.0f sequences are not trained on, because they have more than %s",
                    *(step, number, words),
                    extra={
                        "event": "sequences_dropped",
                        "step": step,
                        "reason": reason,
                        "count": number,
                    },
                )


class LearningWatch(Hook):
    """One-time warning for each kind of finding, when it first occurs."""

    def __init__(self) -> None:
        self._known_kinds: set[str] = set()

    def after_step(self, step: int, row: Metrics) -> None:
        for finding in findings(row):
            if finding.kind not in self._known_kinds:
                self._known_kinds.add(finding.kind)
                log.warning(
                    "step %d: %s (%s)",
                    *(step, finding.sentence, TROUBLESHOOTING),
                    extra={"event": "little_learned", "finding": finding, "step": step},
                )


class MismatchWatch(Hook):
    """Warning if the trainer's log-probabilities differ from those of the sampler by a bug.

    Samples of older weights differ without one.
    """

    def __init__(self, dtype: str) -> None:
        self._alarm = MISMATCH_ALARM[dtype]

    def after_step(self, step: int, row: Metrics) -> None:
        mismatch, age = (row.get(f"train/{name}", 0.0) for name in ("mismatch_kl", "staleness_max"))
        if mismatch > self._alarm and not age:
            log.warning(
                "train/mismatch_kl is %.2g at step %d, above %g; the rollouts were not sampled "
                "from these weights",
                *(mismatch, step, self._alarm),
            )


class GamingWatch(Hook):
    """One-time warning for each held-out component that falls while the reward rises."""

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._held_out = [name for name, reward in rewards.items() if not reward.weight]
        self._means: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._known: set[str] = set()

    def after_rollouts(self, step: int, rollouts: Sequence[Rollout], metrics: Metrics) -> None:
        for name in self._held_out:
            held_out = metrics.get(f"reward/{name}_mean")
            if held_out is None or "rollout/reward_mean" not in metrics:
                continue
            means = self._means[name]
            means.append((metrics["rollout/reward_mean"], held_out))
            rise, fall = (change([pair[i] for pair in means]) for i in (0, 1))
            if name in self._known or rise <= NUM_ERRORS or fall >= -NUM_ERRORS:
                continue
            self._known.add(name)
            named = [rollout.rollout_id for rollout in most_overrated(rollouts, name)]
            log.warning(
                "step %d: the reward has risen and the held-out reward %s has fallen since the "
                "first %d steps, so the reward may be gamed; look at %s (docs/howto/"
                "rewards_from_judges.md)",
                *(step, name, WINDOW, ", ".join(named) or "the rollouts"),
                extra={"event": "gamed_reward", "component": name, "named": named, "step": step},
            )


def change(values: Sequence[float]) -> float:
    """Return the change from the first to the newest WINDOW steps, in standard errors.

    0 if there are fewer than twice as many steps. The error is that of the two means.
    """
    if len(values) < 2 * WINDOW:
        return 0.0
    first, last = np.asarray(values[:WINDOW]), np.asarray(values[-WINDOW:])
    difference = float(last.mean() - first.mean())
    error = float(np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / WINDOW))
    return difference / max(error, 1e-9)


Trace = tuple[Sequence[Span], Sequence[Transition]]


class UnusedWatch(Hook):
    """One-time warning about each role, policy, reward rule and prompt that a step did not use."""

    def __init__(self, reader: TraceReader, store: Store, *, has_prompts: bool = False) -> None:
        self._reader, self._store = reader, store
        self._known: set[tuple[str, str]] = set()
        self._reads_prompts = has_prompts

    def after_rollouts(self, step: int, rollouts: Sequence[Rollout], metrics: Metrics) -> None:
        """Read a step's metrics and some of its rollouts, if anything may be unused.

        Prompts are looked for in the first step with calls.
        """
        unused = [which for which in unused_names([metrics]) if which not in self._known]
        if not unused and not self._reads_prompts:
            return
        self._known.update(unused)
        traces = []
        for rollout in rollouts[:MAX_ROLLOUTS]:
            spans = self._store.spans(rollout.rollout_id)
            traces.append((spans, self._reader.transitions(spans)[0]))
        calls = [call for _, transitions in traces for call in transitions]
        if self._reads_prompts and calls:
            self._reads_prompts = False
            unused += [("prompt", name) for name in unread_prompts(traces, self._reader.decode)]
        for kind, name in unused:
            words = self._rule(name, calls, traces) if kind == "rule" else _called(kind, calls)
            log.warning(
                "step %d: %s %s matched nothing, so it has no effect; %s",
                *(step, kind, name, words),
                extra={"event": "unused_name", "kind": kind, "unused": name, "step": step},
            )

    def _rule(self, name: str, calls: Sequence[Transition], traces: Sequence[Trace]) -> str:
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


def unread_prompts(traces: Sequence[Trace], decode: Decode) -> list[str]:
    """Return the names of the prompts that rollouts got and whose texts no call has.

    Agents fill in placeholders such as {schema}, so only the longest part between them is compared.
    """
    names, read = set[str](), set[str]()
    for spans, transitions in traces:
        texts = [decode(call.prompt_token_ids) for call in transitions]
        for span in spans:
            prompts = json.loads(str(span.attributes.get(attributes.PROMPTS, "{}")))
            for name, prompt in prompts.items():
                names.add(name)
                part = max(re.split(r"\{[^{}]*\}", prompt), key=len)
                if any(has_words(text, part) for text in texts):
                    read.add(name)
    return sorted(names - read)


def _called(kind: str, calls: Sequence[Transition]) -> str:
    """Return what to do about a role, a policy or a prompt, with the names in the calls."""
    if kind == "prompt":
        return (
            f"its text is in none of {len(calls)} calls; rename it to the key that the agent reads"
        )
    models, agents = _names(call.policy for call in calls), _names(call.agent for call in calls)
    fix = {
        "role": "correct its patterns, or move it before the role that takes its calls",
        "policy": "ask for it as the model, or name it as the policy of a role",
    }
    return f"calls asked for the models {models} as the agents {agents}; {fix[kind]}"


def _names(names: Iterable[str]) -> str:
    """Return the distinct names, or "none" without any."""
    distinct = [name for name in dict.fromkeys(names) if name]
    text = ", ".join(name[:MAX_CHARS] for name in distinct[:MAX_EXAMPLES])
    return (text or "none") + (", ..." if len(distinct) > MAX_EXAMPLES else "")
