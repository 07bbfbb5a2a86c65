"""Tasks in Harbor's folders: an instruction, files to start from, and a test script.

`load` is a loader for `data.load`. `run` is an agent for `agent.function`: it starts a command-line
agent in a copy of the files, then the test script, and returns the reward that the script wrote.
docs/howto/harbor_tasks.md says what the sandbox contains and what it does not.
"""

from lightning_jax.environments.harbor.attempt import TestFailure, read_reward, run
from lightning_jax.environments.harbor.folders import load, read_task, read_tasks

__all__ = ["TestFailure", "load", "read_reward", "read_task", "read_tasks", "run"]
