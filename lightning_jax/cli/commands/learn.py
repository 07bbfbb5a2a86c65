"""The command `lightning-jax learn`. Nothing heavy is imported before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_jax.cli.command import AtLeastOne, RunCommand, UsageError, argument, flag
from lightning_jax.cli.commands.train import train_on_tasks
from lightning_jax.cli.runtime import stop_on_sigterm

if TYPE_CHECKING:
    from lightning_jax.models.config import ModelConfig
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


@dataclass(frozen=True, kw_only=True)
class Learn(RunCommand):
    """Train on the stored attempts of a run. Nothing is sampled but evaluations.

    A step takes warmup.groups_per_step groups with --supervised, and with --policy those that a
    step of the run took. A condition compares reward, step, index, calls, tokens (sampled ones),
    task, components of the reward and numbers that the agent returned. The settings are those of
    the run. run_dir=DIR names the new run directory, by default RUN-learned. The same command
    resumes it. The other run stays as it is, except that verdicts of judges are kept in its store.
    The exit code is 1 if no policy step changed the weights.
    """

    can_resume: ClassVar[bool] = True
    settings: list[str] = argument(
        "key=value",
        "settings that differ from the run's, such as run_dir, warmup.* and algorithm.*",
        default_factory=list,
    )
    supervised: bool = flag(
        "supervised steps, which imitate the attempts that --where and --best choose", default=False
    )
    policy: bool = flag(
        "policy steps on whole groups, by their rewards: with advantages and algorithm.loss",
        default=False,
    )
    where: str | None = flag(
        "with --supervised: attempts to imitate, such as 'reward > 0.9 and calls <= 3' "
        f"(default: '{DEFAULT_WHERE}')",
        "CONDITION",
    )
    best: bool = flag(
        "with --supervised: only the best of them in each group, if it beats the group's mean or "
        "earned 1",
        default=False,
    )
    rewards: Path | None = flag(
        "score the attempts by the section `rewards` of this YAML file first", "FILE"
    )
    phase: Literal["train", "eval"] = flag(
        "rollouts to learn from: train or eval (default: %(default)s)", default="train"
    )
    limit: AtLeastOne | None = flag("maximum number of groups, evenly spaced (default: all)", "N")
    steps: AtLeastOne | None = flag("number of steps (default: each group once)", "N")
    start: Literal["policy", "model"] | None = flag(
        "start from the run's policy or from the model that it began with (default: policy with "
        "--supervised, model with --policy)"
    )

    def run(self) -> int:
        from lightning_jax.train.loop.check import check_start

        stop_on_sigterm()
        if self.supervised == self.policy:
            raise UsageError(
                "the steps are either supervised or policy steps; pass --supervised or --policy.",
                reason="conflict" if self.policy else "missing",
                key="--supervised",
            )
        self.require_run()
        config = self._config()
        check_start(config)
        return train_on_tasks(config)

    def _config(self) -> "Config":
        """Return the settings of the new run. Raises ConfigError if a flag does not fit them."""
        from lightning_jax.rollouts.conditions import parse_condition
        from lightning_jax.settings import ConfigError
        from lightning_jax.train.config import LearnConfig
        from lightning_jax.train.loop.check import read_rewards

        source = self.run_dir
        if self.policy and (self.where is not None or self.best):
            raise ConfigError.conflict(
                "--where",
                "--where and --best choose attempts to imitate, and policy steps learn from whole "
                "groups; pass --supervised, or drop both.",
            )
        condition = parse_condition(DEFAULT_WHERE if self.where is None else self.where)
        beside = f"run_dir={source.with_name(source.resolve().name + '-learned')}"
        if self.policy:
            config = settings_of_policy_steps(source, [beside, *self.settings])
        else:
            config = _load(source, [*UNUSED, *SUPERVISED, beside, *self.settings])
        if self.rewards is not None:
            config = replace(config, rewards=read_rewards(self.rewards))
        learn = LearnConfig(
            run=str(source.resolve()),
            supervised=self.supervised,
            where=condition.text,
            only_best=self.best,
            phase=self.phase,
            rescored=self.rewards is not None,
            num_groups=self.limit,
            num_steps=self.steps,
        )
        start = self.start or ("model" if self.policy else "policy")
        if start == "policy":
            model = _exported_model(source, config.model, has_policies=bool(config.policies))
            config = replace(config, model=model)
        return replace(config, learn=learn)


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


def _exported_model(source: Path, model: "ModelConfig", *, has_policies: bool) -> "ModelConfig":
    """Return the settings of the model that the run in `source` has exported."""
    from lightning_jax.settings import ConfigError
    from lightning_jax.train.directory import find_weights

    weights = find_weights(source)
    if not weights.is_exported or has_policies:
        fact = "trains several policies" if weights.is_exported else "has not ended"
        raise ConfigError(
            f"run {source} {fact}, so its policy is no model to start from; pass --start model.",
            reason="not_exported",
            key="--start",
        )
    name = str(weights.path.resolve())  # has the settings' template and its variables in it
    return replace(model, name=name, chat_template=None, chat_template_kwargs={})
