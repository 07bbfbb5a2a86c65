"""The command `lightning-jax learn`. Nothing heavy is imported before it runs."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_jax.cli.runtime import Limit, number_of, stop_on_sigterm
from lightning_jax.system.process_state import kept_process

if TYPE_CHECKING:
    from lightning_jax.train.config import Config

DEFAULT_WHERE = "reward > 0"
# Settings of the other run that have no meaning without sampling.
UNUSED = (
    "agent.external=false", "rollout.ahead=0", "rollout.source=null", "prompt_search.every=0",
    "data.sampler=uniform", "warmup.num_steps=0", "warmup.demonstrations=null",
    "warmup.stop.every=0", "distributed.mode=none", "cluster.samplers=0", "cluster.trainers=0",
    "cluster.workers=0",
)  # fmt: skip
SUPERVISED = ("distill.teacher=null", "distill.teacher_url=null", "distill.hint=null")
POLICY = (f"algorithm.max_staleness={2**31 - 1}",)  # no sample is too old


def add_learn(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `lightning-jax learn`."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    settings = "settings that differ from the run's, such as run_dir, warmup.* and algorithm.*"
    parser.add_argument("settings", nargs="*", metavar="key=value", help=settings)
    steps = parser.add_mutually_exclusive_group(required=True)
    supervised = "supervised steps, which imitate the attempts that --where and --best choose"
    steps.add_argument("--supervised", action="store_true", help=supervised)
    policy = "policy steps on whole groups, by their rewards: with advantages and algorithm.loss"
    steps.add_argument("--policy", action="store_true", help=policy)
    where = "with --supervised: attempts to imitate, such as 'reward > 0.9 and calls <= 3' "
    where += f"(default: '{DEFAULT_WHERE}')"
    parser.add_argument("--where", metavar="CONDITION", help=where)
    best = "with --supervised: only the best of them in each group, if it beats the group's mean "
    parser.add_argument("--best", action="store_true", help=f"{best}or earned 1")
    rewards = "score the attempts by the section `rewards` of this YAML file first"
    parser.add_argument("--rewards", metavar="FILE", type=Path, help=rewards)
    phase = "rollouts to learn from: train or eval (default: %(default)s)"
    parser.add_argument("--phase", choices=("train", "eval"), default="train", help=phase)
    limit = "maximum number of groups, evenly spaced (default: all)"
    parser.add_argument("--limit", type=number_of(Limit), metavar="N", help=limit)
    number = "number of steps (default: each group once)"
    parser.add_argument("--steps", type=number_of(Limit), metavar="N", help=number)
    start = "start from the run's policy or from the model that it began with (default: policy "
    start += "with --supervised, model with --policy)"
    parser.add_argument("--start", choices=("policy", "model"), help=start)


def run_learn(arguments: argparse.Namespace) -> int:
    """Train on the stored attempts of a run. Nothing is sampled but evaluations.

    A step takes warmup.groups_per_step groups with --supervised, and with --policy those that a
    step of the run took. A condition compares reward, step, index, calls, tokens (sampled ones),
    task, components of the reward and numbers that the agent returned. The settings are those of
    the run. run_dir=DIR names the new run directory, by default RUN-learned. The same command
    resumes it. The other run stays as it is, except that verdicts of judges are kept in its store.
    The exit code is 1 if no policy step changed the weights.
    """
    from lightning_jax.train.check import check_start
    from lightning_jax.train.data import load_tasks
    from lightning_jax.train.directory import SETTINGS, STORE, require_run, with_fixed_paths

    stop_on_sigterm()
    require_run(arguments.run_dir, SETTINGS, STORE)
    config = _settings(arguments)
    check_start(config)
    with kept_process():  # loaders and agents may change the directory
        fixed = with_fixed_paths(config)
        tasks = load_tasks(fixed)

        from lightning_jax.cli.train import train_and_report  # imports JAX, after the checks

        return train_and_report(fixed, *tasks, shown=Path(config.run_dir))


def _settings(arguments: argparse.Namespace) -> "Config":
    """Return the settings of the new run. Raises ConfigError if a flag does not fit them."""
    from lightning_jax.rollouts.conditions import parse_condition
    from lightning_jax.settings import ConfigError
    from lightning_jax.train.check import read_rewards
    from lightning_jax.train.config import LearnConfig

    source, where = arguments.run_dir, arguments.where
    if arguments.policy and (where is not None or arguments.best):
        raise ConfigError(
            "--where and --best choose attempts to imitate, and policy steps learn from whole "
            "groups; pass --supervised, or drop both.",
            reason="conflict",
            key="--where",
        )
    condition = parse_condition(DEFAULT_WHERE if where is None else where)
    beside = f"run_dir={source.with_name(source.resolve().name + '-learned')}"
    if arguments.policy:
        config = settings_of_policy_steps(source, [beside, *arguments.settings])
    else:
        config = _load(source, [*UNUSED, *SUPERVISED, beside, *arguments.settings])
    if arguments.rewards is not None:
        config = replace(config, rewards=read_rewards(arguments.rewards))
    learn = LearnConfig(
        run=str(source.resolve()),
        supervised=arguments.supervised,
        where=condition.text,
        only_best=arguments.best,
        phase=arguments.phase,
        rescored=arguments.rewards is not None,
        num_groups=arguments.limit,
        num_steps=arguments.steps,
    )
    start = arguments.start or ("model" if arguments.policy else "policy")
    return replace(_begun_at(source, config) if start == "policy" else config, learn=learn)


def settings_of_policy_steps(source: Path, settings: Sequence[str]) -> "Config":
    """Return the settings of the run in `source`, with these, for policy steps on its samples.

    These come from weights that differ more and more from those in training. PPO's clip against the
    policy that sampled would ignore most tokens, so by default the ratio is to the trainer's own
    `old` policy, and a truncated importance weight corrects for the rest. A correction of the run
    stays. DPO has no ratio.
    """
    changes = [*UNUSED, *POLICY]
    config = _load(source, [*changes, *settings])
    if config.algorithm.loss == "dpo":
        return config
    changes.append("algorithm.proximal=old")
    config = _load(source, [*changes, *settings])
    if config.algorithm.correction == "none" and config.algorithm.proximal == "old":
        changes.append("algorithm.correction=truncate")
    return _load(source, [*changes, *settings])


def _load(source: Path, settings: Sequence[str]) -> "Config":
    from lightning_jax.settings import load_config
    from lightning_jax.train.config import Config
    from lightning_jax.train.directory import SETTINGS

    return load_config(Config, [str(source / SETTINGS), *settings])


def _begun_at(source: Path, config: "Config") -> "Config":
    """Return settings that begin with the policy of the run in `source`."""
    from lightning_jax.settings import ConfigError
    from lightning_jax.train.directory import find_weights

    found = find_weights(source)
    if not found.is_exported or config.policies:
        fact = "trains several policies" if found.is_exported else "has not ended"
        raise ConfigError(
            f"run {source} {fact}, so its policy is no model to start from; pass --start model.",
            reason="not_exported",
            key="--start",
        )
    name = str(found.path.resolve())  # has the settings' template and its variables in it
    model = replace(config.model, name=name, chat_template=None, chat_template_kwargs={})
    return replace(config, model=model)
