"""Construction of a run, and its steps."""
