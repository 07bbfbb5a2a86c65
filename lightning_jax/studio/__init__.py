"""Views of a run's rollouts: a table, and a waterfall for each rollout."""

from typing import Literal, get_args

DEFAULT_LIMIT = 30  # rollouts in a table
DEFAULT_CHARS = 2000  # characters of one text
Axis = Literal["steps", "samples", "minutes"]  # of curves
AXES = get_args(Axis)
