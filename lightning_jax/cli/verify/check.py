"""Comparison of a run's stored calls with the weights that made them."""

import contextlib
from pathlib import Path

from lightning_jax.cli.verify.calls import stored_calls, with_known_weights
from lightning_jax.cli.verify.compare import compare_all
from lightning_jax.cli.verify.report import Report
from lightning_jax.cli.verify.weights import find_sources
from lightning_jax.errors import UserError
from lightning_jax.models.policies import ALL
from lightning_jax.settings import load_config
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config
from lightning_jax.train.directory import SETTINGS, STORE, require_run
from lightning_jax.train.tasks.data import evenly_spaced

# Allowed difference in nats, because sampler and trainer round differently. Measured for
# SmolLM2-135M on a CPU: up to 3.4e-5 in float32, and up to 0.32 (0.035 on average) in bfloat16.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}


class VerifyError(UserError, ValueError):
    """Run with nothing to compare. The message gives the reason."""


# Settings that determine which weights answered. The others may be from an older release.
SECTIONS = (
    *("model", "mesh", "seed", "policies", "roles", "algorithm", "warmup", "num_steps"),
    "checkpoint",
)


def verify(run_dir: Path, *, limit: int | None = None, tolerance: float | None = None) -> Report:
    """Compare the run's stored calls, at most `limit`, with the output of their weights.

    Raises UserError if this is not a run directory, or if no call's weights are available.
    """
    require_run(run_dir, SETTINGS, STORE)
    config = load_config(Config, [str(run_dir / SETTINGS)], only=SECTIONS)
    with contextlib.closing(Store(run_dir / STORE)) as store:
        calls, not_compared = stored_calls(store)
        last_version = max((version.version for version in store.versions()), default=0)
    # The initial weights may have answered, too, which belong to no single policy.
    policies = config.policy_table.sets
    weights_sources = {
        policy: find_sources(run_dir, config, last_version, policy) for policy in (*policies, ALL)
    }
    versions = weights_sources[policies[0]].keys()
    calls, reasons = with_known_weights(calls, versions)
    not_compared |= reasons
    if not calls:
        counted = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in reasons.items())
        raise VerifyError(
            f"{run_dir} has no calls to compare ({counted or 'none are stored'}); available "
            f"weights versions: {sorted(versions)}. Raise checkpoint.keep in later runs.",
            reason="nothing_to_compare",
            key=str(run_dir),
        )
    chosen = calls if limit is None else evenly_spaced(calls, limit)
    if len(chosen) < len(calls):
        not_compared["beyond_the_limit"] = len(calls) - len(chosen)
    reports = compare_all(chosen, config, weights_sources)
    return Report(
        tolerance=TOLERANCE[config.model.dtype] if tolerance is None else tolerance,
        versions=reports,
        not_compared=not_compared,
    )
