"""Reasons why steps taught little or nothing, as metrics show. findings.yaml has the texts."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lightning_jax.rollouts.agents.outcome import DEADLINE_IN_QUEUE

STALE_CALLS = "train/dropped_stale"


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
        Finding(kind, shares[kind], reason["text"])
        for kind, reason in _reasons().items()
        if shares[kind] >= reason["limit"]
    ]


@cache
def _reasons() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


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
