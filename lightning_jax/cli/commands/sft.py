"""The command `lightning-jax sft`. Nothing heavy is imported before it runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lightning_jax.cli.command import AtLeastOne, Command, argument, flag
from lightning_jax.cli.runtime import stop_on_sigterm

DEFAULT_WHERE = "reward > 0"


@dataclass(frozen=True, kw_only=True)
class Sft(Command):
    """Train on the stored attempts of a run for which a condition holds, as on demonstrations.

    A condition compares reward, step, index, calls, tokens (sampled ones), task, components of the
    reward and numbers that the agent returned. The settings are those of the run. run_dir=DIR names
    the new run directory, by default RUN-sft. The run itself stays as it is, except that verdicts
    of judges are kept in its store.
    """

    run_dir: Path = argument("RUN", "a run directory")
    settings: list[str] = argument(
        "key=value",
        "settings that differ from the run's, such as run_dir and warmup.optimizer.*",
        default_factory=list,
    )
    where: str = flag(
        "attempts to learn from, such as 'reward > 0.9 and calls <= 3' (default: %(default)r)",
        "CONDITION",
        default=DEFAULT_WHERE,
    )
    best: bool = flag(
        "only the best of them in each group, if it beats the group's mean or earned 1",
        default=False,
    )
    rewards: Path | None = flag(
        "score the attempts by the section `rewards` of this YAML file first", "FILE"
    )
    phase: Literal["train", "eval"] = flag(
        "rollouts to learn from: train or eval (default: %(default)s)", default="train"
    )
    steps: AtLeastOne | None = flag(
        "number of steps, each of warmup.groups_per_step groups (default: each group once)", "N"
    )
    start: Literal["policy", "model"] = flag(
        "start from the run's policy or from the model it began with (default: %(default)s)",
        default="policy",
    )

    def run(self) -> int:
        from rich.console import Console

        from lightning_jax.cli.from_stored import print_policy, settings_of_new_run
        from lightning_jax.rollouts.conditions import parse_condition
        from lightning_jax.train.directory import SETTINGS, STORE, require_run

        stop_on_sigterm()
        source = self.run_dir
        require_run(source, SETTINGS, STORE)
        condition = parse_condition(self.where)
        config = settings_of_new_run(source, "-sft", self.settings)

        from lightning_jax.train.sft import (  # imports JAX, after the checks
            Choice,
            learn_from_attempts,
        )

        rescored = None
        if self.rewards is not None:
            from lightning_jax.cli.rescore import rescored_groups

            scored, groups = rescored_groups(source, self.rewards, phase=self.phase)
            config = replace(config, rewards=scored.rewards)
            rescored = {after.rollout_id: after for group in groups for _, after in group}
        choice = Choice(condition, self.best, self.phase, self.steps, rescored)
        rows = learn_from_attempts(source, config, choice, self.start)
        console = Console(highlight=False, soft_wrap=True)
        losses = [row["warmup/loss"] for row in rows if "warmup/loss" in row]
        if losses:  # not if no attempt fits a row
            console.print(f"{len(rows)} steps: {losses[0]:.4f} to {losses[-1]:.4f} nats per token")
        print_policy(console, config.run_dir)
        return 0
