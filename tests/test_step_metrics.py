"""Steps without a finite gradient are counted in a row, for each set of weights."""

import pytest

from lightning_jax.step_metrics import FiniteWatch, NotFinite


def step(**skipped: float) -> dict[str, float]:
    """Of one update each, which policies skipped it."""
    found = {}
    for name, value in skipped.items():
        found |= {f"train/num_updates/policy={name}": 1.0}
        found |= {f"train/skipped_updates/policy={name}": value}
    return found


def test_one_policy_that_never_learns_stops_the_run_though_the_other_does() -> None:
    watch = FiniteWatch(("a", "b"), 2)
    watch.see(step(a=0.0, b=1.0), 0)
    watch.see(step(a=1.0, b=0.0), 1)
    watch.see(step(a=0.0), 2)  # nothing for b
    watch.see(step(a=0.0, b=1.0), 3)
    with pytest.raises(NotFinite, match="gradient of b was not finite in 2 steps in a row, the la"):
        watch.see(step(a=0.0, b=1.0), 4)
