"""Interface of what takes part in the steps of a run, built in or of a file of yours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.train.directory import Status
from lightning_jax.types import Metrics, Rollout, Task, Trajectory


@dataclass(frozen=True)
class UpdateInput:
    """Sequences that the update of a step learns from, and what they were made from.

    A supervised step has sequences only. `tasks` are those of the trajectories, by group id.
    """

    sequences: Sequence[TrainingSequence]
    trajectories: Sequence[Trajectory] = ()
    tasks: Mapping[str, Task] = field(default_factory=dict)


class Hook:
    """Part of each step of a run. Its methods do nothing by default.

    They are called in the order below, for one hook after the other. `begin_phase` and
    `rollout_ended` are called in the event loop and have to be quick. All others that are not
    `async` are called in a thread.
    """

    def __init__(self, *arguments: Any) -> None:
        """Take the settings of the run, if `hooks` names the class."""

    async def before_rollouts(self, step: int) -> Metrics:
        """Work before the rollouts of a step. Return metrics for its row.

        This is also called before the last evaluation, when no step follows.
        """
        return {}

    def begin_phase(self, phase: str, num_rollouts: int = 0) -> None:
        """Hear that a phase begins, such as `train 3`, `eval 3` or `update 3`."""

    def rollout_ended(self, phase: str | None) -> None:
        """Hear that a rollout of a phase ended, or one of a coming step (None)."""

    def after_rollouts(self, step: int, rollouts: Sequence[Rollout], metrics: Metrics) -> None:
        """Read the training rollouts of a step so far and their metrics, in each sampling round."""

    def before_update(
        self, step: int, update: UpdateInput
    ) -> tuple[Sequence[TrainingSequence], Metrics]:
        """Return (the sequences to train on, metrics for the step's row)."""
        return update.sequences, {}

    def after_update(self, step: int, metrics: Metrics) -> None:
        """Read the metrics of an update, whose weights are not published yet.

        After an error the step is repeated from the newest checkpoint.
        """

    def after_step(self, step: int, row: Metrics) -> None:
        """Read a row of metrics when the step is complete, or the one of the last evaluation."""

    def close(self, status: Status) -> None:
        """End the work, because the run ends."""
