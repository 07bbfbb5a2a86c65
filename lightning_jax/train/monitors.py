"""Summaries of step metrics, and warnings or errors about steps that learn too little."""

import logging
import math
from collections import Counter
from collections.abc import Sequence

from lightning_jax.errors import UserError
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.multi_policy.scope import PolicyScope
from lightning_jax.types import Metrics

log = logging.getLogger(__name__)

MANY_FEWER = 0.75  # share of the rows
# Nats. Sampler and trainer share one forward function, so more is a bug. bfloat16 rounds by 1e-3.
MISMATCH_ALARM = {"float32": 1e-3, "bfloat16": 1e-2}
FULL = 0.75  # share of used targets; the last row is rarely full, and calls are not split


class NotFinite(UserError, RuntimeError):
    """Non-finite gradients in many steps in a row, so that the run no longer learns."""


class FiniteWatch:
    """Counter of consecutive steps without a finite gradient, per weight set."""

    def __init__(self, scopes: Sequence[PolicyScope], limit: int) -> None:
        self._scopes, self._limit = scopes, limit
        self._in_a_row: Counter[PolicyScope] = Counter()

    def observe(self, metrics: Metrics, step: int) -> None:
        """Read a step's metrics. Raises NotFinite if the limit is reached.

        Steps with nothing to learn from do not count.
        """
        for scope in self._scopes:
            num_updates = metrics.get(f"train/num_updates{scope.suffix}", 0.0)
            if not num_updates:
                continue
            if metrics[f"train/skipped_updates{scope.suffix}"] < num_updates:
                self._in_a_row[scope] = 0
                continue
            self._in_a_row[scope] += 1
            if self._in_a_row[scope] >= self._limit:
                raise NotFinite(
                    f"the gradient{f' of {scope.policy}' if scope.policy else ''} was not finite "
                    f"in {self._in_a_row[scope]} steps in a row, up to step {step}, and the "
                    f"weights did not change; algorithm.max_nonfinite_steps is {self._limit}. "
                    "Lower the learning rate, or look for rewards and log-probabilities that are "
                    "not finite.",
                    reason="not_finite",
                    key=scope.policy or None,
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


def warn_of_mismatch(metrics: Metrics, step: int, dtype: str) -> None:
    """Warn if the trainer's log-probabilities differ from those of the sampler by a bug."""
    mismatch = metrics.get("train/mismatch_kl", 0.0)
    if mismatch > MISMATCH_ALARM[dtype]:
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
        "entropy": "train/entropy",
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
        "serve/compiles": after["serve/compiles"],
    }
