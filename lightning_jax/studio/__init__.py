"""Views of a run's rollouts: a table, and a waterfall for each rollout."""

DEFAULT_LIMIT = 30  # rollouts in a table
DEFAULT_CHARS = 2000  # characters of one text
AXES = ("steps", "samples", "minutes")  # of curves
