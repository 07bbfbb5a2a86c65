"""Metric sinks: places that keep a run's metrics in addition to `metrics.jsonl`."""

from lightning_jax.train.sinks.base import ResultTable, Status
from lightning_jax.train.sinks.feeds import Feeds, check_sinks

__all__ = ["Feeds", "ResultTable", "Status", "check_sinks"]
