"""Check of a run's record against log-probabilities recomputed with the weights that sampled it."""

from lightning_jax.cli.verify.check import VerifyError, verify
from lightning_jax.cli.verify.report import Report, as_text

__all__ = ["Report", "VerifyError", "as_text", "verify"]
