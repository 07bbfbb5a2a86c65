"""A run's rollouts, as a table and each as a waterfall."""

DEFAULT_LIMIT = 30  # rollouts of a table
DEFAULT_CHARS = 2000  # of one text
