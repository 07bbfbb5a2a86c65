"""The command `lightning-jax sft`. Nothing heavy is imported before it runs."""

import argparse
from dataclasses import replace
from pathlib import Path

from lightning_jax.cli.runtime import Limit, number_of, stop_on_sigterm

DEFAULT_WHERE = "reward > 0"


def add_sft(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `lightning-jax sft`."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    settings = "settings that differ from the run's, such as run_dir and warmup.optimizer.*"
    parser.add_argument("settings", nargs="*", metavar="key=value", help=settings)
    where = "attempts to learn from, such as 'reward > 0.9 and calls <= 3' (default: %(default)r)"
    parser.add_argument("--where", metavar="CONDITION", default=DEFAULT_WHERE, help=where)
    best = "only the best of them in each group, if it beats the group's mean or earned 1"
    parser.add_argument("--best", action="store_true", help=best)
    rewards = "score the attempts by the section `rewards` of this YAML file first"
    parser.add_argument("--rewards", metavar="FILE", type=Path, help=rewards)
    phase = "rollouts to learn from: train or eval (default: %(default)s)"
    parser.add_argument("--phase", choices=("train", "eval"), default="train", help=phase)
    steps = "number of steps, each of warmup.groups_per_step groups (default: each group once)"
    parser.add_argument("--steps", type=number_of(Limit), metavar="N", help=steps)
    start = "start from the run's policy or from the model it began with (default: %(default)s)"
    parser.add_argument("--start", choices=("policy", "model"), default="policy", help=start)


def run_sft(arguments: argparse.Namespace) -> int:
    """Train on the stored attempts of a run for which a condition holds, as on demonstrations.

    A condition compares reward, step, index, calls, tokens (sampled ones), task, components of the
    reward and numbers that the agent returned. The settings are those of the run. run_dir=DIR names
    the new run directory, by default RUN-sft. The run itself stays as it is, except that verdicts
    of judges are kept in its store.
    """
    from rich.console import Console

    from lightning_jax.cli.from_stored import print_policy, settings_of_new_run
    from lightning_jax.rollouts.conditions import parse_condition
    from lightning_jax.train.directory import SETTINGS, STORE, require_run

    stop_on_sigterm()
    source = arguments.run_dir
    require_run(source, SETTINGS, STORE)
    condition = parse_condition(arguments.where)
    config = settings_of_new_run(source, "-sft", arguments.settings)

    from lightning_jax.train.sft import Choice, learn_from_attempts  # imports JAX, after the checks

    rescored = None
    if arguments.rewards is not None:
        from lightning_jax.cli.rescore import rescored_groups

        scored, groups = rescored_groups(source, arguments.rewards, phase=arguments.phase)
        config = replace(config, rewards=scored.rewards)
        rescored = {after.rollout_id: after for group in groups for _, after in group}
    choice = Choice(condition, arguments.best, arguments.phase, arguments.steps, rescored)
    rows = learn_from_attempts(source, config, choice, arguments.start)
    console = Console(highlight=False, soft_wrap=True)
    losses = [row["warmup/loss"] for row in rows if "warmup/loss" in row]
    if losses:  # not if no attempt fits a row
        console.print(f"{len(rows)} steps: {losses[0]:.4f} to {losses[-1]:.4f} nats per token")
    print_policy(console, config.run_dir)
    return 0
