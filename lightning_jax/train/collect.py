"""Rollouts of a step's tasks, and the trajectories made from them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.advantages import equal_groups
from lightning_jax.rl.credit import assign_credit
from lightning_jax.rollouts.collect import read_trajectories
from lightning_jax.rollouts.failures import FailureWatch
from lightning_jax.rollouts.metrics import TraceReader
from lightning_jax.rollouts.runner import Runner, make_requests, run_requests
from lightning_jax.system.threads import run_in_thread
from lightning_jax.train.config import Config
from lightning_jax.train.pipelines import Pipelines
from lightning_jax.train.progress import Progress
from lightning_jax.train.unused import UnusedWatch
from lightning_jax.types import Metrics, Rollout, Task, Trajectory


class Collector:
    """Source of each step's rollouts."""

    def __init__(
        self,
        config: Config,
        pipelines: Pipelines,
        runner: Runner,
        tokenizer: Tokenizer,
        progress: Progress,
        on_rollout: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_rollout` is called after each rollout."""
        self._config, self._pipelines, self._runner = config, pipelines, runner
        self._progress, self._on_rollout = progress, on_rollout
        self._failures = FailureWatch(runner.store, config.rollout.max_agent_failures)
        self._reader = TraceReader(
            config.roles, config.reward_rules, tokenizer.decode, config.policies, config.rollout
        )
        self._unused = UnusedWatch(self._reader, runner.store)

    async def sample(self, step: int) -> tuple[list[Trajectory], Metrics]:
        """Return (trajectories of the step's rollouts, metrics of all of them).

        If `max_sampling_rounds` is above 1, groups with equal returns are left out. Other tasks
        replace them while rounds are left (dynamic sampling, DAPO, arXiv 2503.14476). Metrics of
        rewards include the groups left out.
        """
        algorithm, size = self._config.algorithm, self._config.rollout.group_size
        wanted, num_rounds = self._config.rollout.tasks_per_step, 0
        store, rollouts = self._runner.store, list[Rollout]()
        num_tasks = num_useful = 0
        while True:
            tasks = self._pipelines.next_tasks(wanted - num_useful)
            rollouts += await self.run(tasks, "train", step, size, first_index=num_tasks)
            num_rounds, num_tasks = num_rounds + 1, num_tasks + len(tasks)
            trajectories, metrics = await read_trajectories(
                store, rollouts, policy_version=step, reader=self._reader
            )
            await run_in_thread(self._unused.observe, metrics, rollouts, step)
            if algorithm.max_sampling_rounds == 1:
                return trajectories, metrics
            equal = equal_groups(assign_credit(trajectories, algorithm))
            useful = [trajectory for trajectory in trajectories if trajectory.group_id not in equal]
            num_useful = len({trajectory.group_id for trajectory in useful})
            if num_useful == wanted or num_rounds == algorithm.max_sampling_rounds:
                return useful, metrics | {
                    "rollout/num_sampling_rounds": float(num_rounds),
                    "rollout/num_groups_left_out": float(num_tasks - num_useful),
                    "rollout/num_groups_replaced": float(num_tasks - wanted),
                }

    async def run(
        self, tasks: Sequence[Task], phase: str, step: int, group_size: int, *, first_index: int = 0
    ) -> list[Rollout]:
        """Run the tasks and return the finished rollouts.

        Task indices start at `first_index`. Raises TooManyFailures or BrokenAgent if the run
        should end.
        """
        requests = [
            replace(request, task_index=first_index + request.task_index)
            for request in make_requests(tasks, phase, step, group_size)
        ]
        name = f"{phase} {step}"
        self._progress.begin(name, len(requests))

        def count(rollout: Rollout) -> None:
            self._progress.advance(name)
            self._on_rollout()

        rollouts = await run_requests(requests, self._runner, on_done=count)
        await run_in_thread(self._failures.observe, rollouts, name)
        return rollouts
