"""Checks a run's record: weights must give the tokens they sampled the stored log-probabilities."""

from lightning_jax.verify.check import VerifyError, verify
from lightning_jax.verify.report import Report, as_text

__all__ = ["Report", "VerifyError", "as_text", "verify"]
