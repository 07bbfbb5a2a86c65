"""Summaries of step metrics, and warnings or errors about steps that learn too little."""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_jax.errors import UserError
from lightning_jax.models.policies import Policy
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rollouts.agents.outcome import DEADLINE_IN_QUEUE
from lightning_jax.types import Metrics

log = logging.getLogger(__name__)

MANY_FEWER = 0.75  # share of the rows
# Nats. Sampler and trainer share one forward function, so more is a bug. bfloat16 rounds by 1e-3.
MISMATCH_ALARM = {"float32": 1e-3, "bfloat16": 1e-2}
STALE_CALLS = "train/dropped_stale"
FULL = 0.75  # share of used targets; the last row is rarely full, and calls are not split


class NotFinite(UserError, RuntimeError):
    """Non-finite gradients in many steps in a row, so that the run no longer learns."""


class FiniteWatch:
    """Counter of consecutive steps without a finite gradient, per weight set."""

    def __init__(self, policies: Sequence[Policy], limit: int) -> None:
        self._policies, self._limit = policies, limit
        self._in_a_row: Counter[Policy] = Counter()

    def observe(self, metrics: Metrics, step: int) -> None:
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


class PackingWatch:
    """One-time warning about a step whose targets need many more rows than its nodes."""

    def __init__(self, batch: BatchConfig) -> None:
        self._batch, self._has_warned = batch, False

    def observe(self, metrics: Metrics, step: int) -> None:
        """Read a step's metrics."""
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


class DropWatch:
    """One-time warning about sequences that no row can hold and that are never trained on."""

    def __init__(self, batch: BatchConfig) -> None:
        self._batch = batch
        self._known_reasons: set[str] = set()

    def observe(self, metrics: Metrics, step: int) -> None:
        """Read a step's metrics."""
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


@dataclass(frozen=True)
class Finding:
    """Reason why a step taught little or nothing, with the share of the step that it holds for."""

    kind: str
    share: float
    text: str  # with a place for the share

    @property
    def sentence(self) -> str:
        """Fact and fix, with the share."""
        return self.text.format(share=self.share)


def findings(row: Mapping[str, float | int]) -> list[Finding]:
    """Return what kept the agent of a step's metrics row from learning.

    Steps without rollouts, such as those of a warm-up, have none.
    """
    num_rollouts = row.get("rollout/num_scored", 0.0)
    # With a batch's mean, or a teacher, equal groups have a gradient.
    learns_from_equal = any(
        row.get(f"train/{name}", 0.0) > 0 for name in ("advantage_abs_mean", "teacher_share")
    )
    num_tempered = row.get("train/other_temperature", 0.0)
    shares = {
        "no_calls": row.get("rollout/dropped_no_calls", 0.0) / max(num_rollouts, 1.0),
        "equal_groups": 0.0 if learns_from_equal else row.get("train/equal_groups_share", 0.0),
        "failures_gain": row.get("train/failures_gain_share", 0.0),
        "without_teacher": (row.get("train/without_teacher", 0.0) - num_tempered)
        / max(row.get("rollout/num_calls", 0.0), 1.0),
        "other_temperature": num_tempered / max(row.get("rollout/num_calls", 0.0), 1.0),
        "cut_short": row.get("rollout/cut_short_share", 0.0),
        "adjusted": row.get("train/adjusted_share", 0.0),
        "noise": 1.0 - row.get("train/signal_share", 1.0),
        "late": row.get("serve/late_responses", 0.0) / max(row.get("serve/requests", 0.0), 1.0),
        "deadline_in_queue": sum(  # older runs counted it as the agent's
            row.get(f"rollout/{whose}_failure_{DEADLINE_IN_QUEUE}", 0.0)
            for whose in ("agent", "infrastructure")
        )
        / max(row.get("rollout/num_rollouts", 0.0), 1.0),
        "too_old": row.get("rollout/external_too_old_share", 0.0),
        "stale_calls": sum(
            value for name, value in row.items() if name.partition("/policy=")[0] == STALE_CALLS
        )
        / max(row.get("rollout/num_calls", 0.0), 1.0),
    }
    return [
        Finding(kind, shares[kind], text)
        for kind, (limit, text) in _FINDINGS.items()
        if shares[kind] >= limit
    ]


_FINDINGS = {  # kind -> (smallest share to report, text)
    "no_calls": (
        0.01,
        "{share:.0%} of the scored rollouts made no call to the policy, so nothing is learned from "
        "them; turn off the agent framework's cache of answers, and check that it calls "
        "llm.base_url",
    ),
    "equal_groups": (
        0.5,
        "all attempts at a task earned the same in {share:.0%} of the groups, which have no "
        "gradient; reward partial success, sample more attempts, raise "
        "algorithm.max_sampling_rounds, warm up on demonstrations, or give hints",
    ),
    "failures_gain": (
        0.01,
        "{share:.0%} of the failed rollouts had a positive advantage, so that failing pays; set "
        "rollout.agent_failure_reward=null to leave them out",
    ),
    "without_teacher": (
        0.01,
        "{share:.0%} of the calls were not scored by the teacher, because no row holds them with "
        "their hint; raise batch.row_len",
    ),
    "other_temperature": (
        0.01,
        "{share:.0%} of the calls were sampled at another temperature than 1, at which the "
        "teacher's server cannot score; set rollout.temperature=1, or load the teacher with "
        "distill.teacher",
    ),
    "cut_short": (
        0.5,
        "{share:.0%} of the replies were cut at the token limit; raise rollout.max_tokens and the "
        "agent's own max_tokens, or ask for shorter answers",
    ),
    "adjusted": (
        0.05,
        "{share:.0%} of the trained tokens were sampled from a distribution that a mask or a "
        "filter had changed by more than a tenth, so their gradients are biased "
        "(train/adjusted_share); sample with top_p 1 and top_k 0, and send no logit_bias and no "
        "penalties",
    ),
    "noise": (
        0.8,
        "{share:.0%} of the squared gradient was noise of the few tasks in a step "
        "(train/noise_scale); raise rollout.tasks_per_step, and lower rollout.group_size to pay "
        "for it",
    ),
    "late": (
        0.05,
        "{share:.0%} of the replies were cut at a time limit; raise rollout.call_timeout_s and "
        "rollout.timeout_s, or ask for shorter answers",
    ),
    "deadline_in_queue": (
        0.01,
        "{share:.0%} of the rollouts met their deadline while their calls waited for the server; "
        "lower rollout.concurrency, or raise rollout.timeout_s",
    ),
    "too_old": (
        0.05,
        "{share:.0%} of the rollouts from outside were dropped, because all of their group's calls "
        "were too old once a step could take them; raise rollout.tasks_per_step if "
        "rollout.group_size attempts come for each task, and lower rollout.group_size if not",
    ),
    "stale_calls": (
        0.05,
        "{share:.0%} of the calls were not trained on, because they were older than "
        "algorithm.max_staleness; raise it, or raise rollout.tasks_per_step so that steps are "
        "longer",
    ),
}
SAMPLERS = ("serve/samplers", "serve/samplers_lost")  # counters of a cluster
TROUBLESHOOTING = "more: lightning-jax help troubleshooting"
_UNUSED = re.compile(r"rollout/(?:num_rollouts/(?P<kind>role|policy)=|(?P<rule>rule)_)(?P<name>.+)")


def unused_names(rows: Sequence[Mapping[str, float | int]]) -> list[tuple[str, str]]:
    """Return (kind, name) of each role, policy and reward rule that matched nothing in any row.

    Rows without a call say nothing. The name of a rule is as in its metric.
    """
    totals: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for key in row if row.get("rollout/num_calls") else ():
            if match := _UNUSED.fullmatch(key):
                totals[match["kind"] or match["rule"], match["name"]] += row[key] > 0
    return [which for which, number in totals.items() if not number]


class LearningWatch:
    """One-time warning for each kind of finding, when it first occurs."""

    def __init__(self) -> None:
        self._known_kinds: set[str] = set()

    def observe(self, metrics: Metrics, step: int) -> None:
        """Read a step's metrics."""
        for finding in findings(metrics):
            if finding.kind not in self._known_kinds:
                self._known_kinds.add(finding.kind)
                log.warning(
                    "step %d: %s (%s)",
                    *(step, finding.sentence, TROUBLESHOOTING),
                    extra={"event": "little_learned", "finding": finding, "step": step},
                )


def warn_of_mismatch(metrics: Metrics, step: int, dtype: str) -> None:
    """Warn if the trainer's log-probabilities differ from those of the sampler by a bug.

    Samples of older weights differ without one.
    """
    mismatch, age = (metrics.get(f"train/{name}", 0.0) for name in ("mismatch_kl", "staleness_max"))
    if mismatch > MISMATCH_ALARM[dtype] and not age:
        log.warning(
            "train/mismatch_kl is %.2g at step %d, above %g; the rollouts were not sampled from "
            "these weights",
            *(mismatch, step, MISMATCH_ALARM[dtype]),
        )


def summary(row: Metrics) -> str:
    """Format the few metrics that a person watches, with the number of failed rollouts if any."""
    shown = {
        "eval": "eval/reward_mean",
        "reward": "rollout/reward_mean",
        "loss": "warmup/loss",
        "entropy": "rollout/entropy",
        "kl": "train/mismatch_kl",
    }
    failed = sum(
        row.get(f"{phase}/num_{whose}_failures", 0.0)
        for phase in ("eval", "rollout")
        for whose in ("agent", "infrastructure")
    )
    words = [f"{name} {row[key]:.3g}" for name, key in shown.items() if key in row]
    return " ".join(words + ([f"failed {failed:.0f}"] if failed else []))


def serve_metrics(before: Metrics, after: Metrics) -> Metrics:
    """Return the server's metrics between two readings of its counters."""
    did = {name: after[name] - before[name] for name in after if name in before}
    prompt = did["serve/prefill_tokens"] + did["serve/prefix_hit_tokens"]
    return {
        "serve/requests": did["serve/requests"],
        "serve/steps": did["serve/steps"],
        "serve/tokens_generated": did["serve/tokens_generated"],
        "serve/prefix_hit_share": did["serve/prefix_hit_tokens"] / max(prompt, 1.0),
        "serve/prefix_breaks": did["serve/prefix_breaks"],
        "serve/malformed_tool_calls": did["serve/malformed_tool_calls"],
        "serve/joined_calls": did["serve/joined_calls"],
        "serve/late_responses": did["serve/late_responses"],
        "serve/compiles": after["serve/compiles"],
        **{name: after[name] for name in SAMPLERS if name in after},
    }
