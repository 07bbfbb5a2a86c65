"""Report of comparing a run's calls with their weights, and its text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64

from lightning_jax.types import Transition

NUM_NAMED = 10  # calls listed in the text


@dataclass(frozen=True)
class Comparison:
    """Stored and recomputed log-probs of one call, in nats."""

    call: Transition
    kind: Literal["behavior", "sampling"]
    stored: Float64[np.ndarray, " T"]
    computed: Float64[np.ndarray, " T"]

    @property
    def differences(self) -> Float64[np.ndarray, " T"]:
        """Absolute differences, infinite if either number is NaN."""
        return np.nan_to_num(np.abs(self.stored - self.computed), nan=np.inf)


@dataclass(frozen=True)
class VersionReport:
    """Comparisons of the calls of one weights version."""

    version: int
    weights: str  # their source
    comparisons: tuple[Comparison, ...]

    def differences(self, kind: str) -> Float64[np.ndarray, " T"]:
        """Return the absolute differences of all tokens, in nats."""
        differences = [
            comparison.differences for comparison in self.comparisons if comparison.kind == kind
        ]
        return np.concatenate(differences) if differences else np.zeros(0)


@dataclass(frozen=True)
class Report:
    """Result of `verify`."""

    tolerance: float  # nats
    versions: tuple[VersionReport, ...]
    not_compared: Mapping[str, int]  # number of calls by reason

    @property
    def off(self) -> list[Comparison]:
        """Comparisons with a token beyond the tolerance, worst first."""
        off = [
            comparison
            for version in self.versions
            for comparison in version.comparisons
            if comparison.differences.max() > self.tolerance
        ]
        return sorted(off, key=lambda comparison: -comparison.differences.max())


def as_text(report: Report) -> str:
    """Format the report as a table, then the calls that are off."""
    columns = ("version", "calls", "tokens", "max diff", "mean diff", "share off", "sampling max")
    lines = [" ".join(f"{name:>12}" for name in columns) + "  weights"]
    for version_report in report.versions:
        behavior = version_report.differences("behavior")
        sampling = version_report.differences("sampling")
        cells = (
            version_report.version,
            sum(comparison.kind == "behavior" for comparison in version_report.comparisons),
            behavior.size,
            f"{behavior.max():.2e}",
            f"{behavior.mean():.2e}",
            f"{(behavior > report.tolerance).mean():.3%}",
            f"{sampling.max():.2e}" if sampling.size else "-",
        )
        lines.append(" ".join(f"{cell!s:>12}" for cell in cells) + f"  {version_report.weights}")
    for reason, count in sorted(report.not_compared.items()):
        lines.append(f"not compared: {count} calls, {reason.replace('_', ' ')}")
    lines += [_sentence(comparison) for comparison in report.off[:NUM_NAMED]]
    if len(report.off) > NUM_NAMED:
        lines.append(f"and {len(report.off) - NUM_NAMED} more differ")
    num_off = len({comparison.call.call_id for comparison in report.off})
    num_calls = sum(
        comparison.kind == "behavior" for v in report.versions for comparison in v.comparisons
    )
    if num_off:
        verdict = f"off by more than {report.tolerance:g} nats: {num_off} of {num_calls} calls"
    else:
        verdict = f"all {num_calls} calls are within {report.tolerance:g} nats"
    lines.append(verdict)
    return "\n".join(lines)


def _sentence(off: Comparison) -> str:
    token = int(off.differences.argmax())
    rollout = f"rollout {off.call.rollout_id}" if off.call.rollout_id else "no rollout"
    return (
        f"off: call {off.call.call_id} of {rollout}, {off.kind} log-prob of response token "
        f"{token}: stored {off.stored[token]:.6f}, computed {off.computed[token]:.6f}"
    )
