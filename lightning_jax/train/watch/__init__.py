"""Metrics, curves, warnings and reports: what people see of a run."""
