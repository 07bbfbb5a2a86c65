"""`lightning-jax try` and `eval`: run an agent without training it, with any policy.

Nothing heavy is imported before a command runs.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_jax.cli.command import AtLeastOne, Index, SettingsCommand, flag
from lightning_jax.cli.runtime import stop_on_sigterm
from lightning_jax.studio import DEFAULT_CHARS

if TYPE_CHECKING:
    from lightning_jax.train.config import Config
    from lightning_jax.train.loop.inference import PolicySource


@dataclass(frozen=True, kw_only=True)
class PolicyCommand(SettingsCommand):
    """Command whose calls a policy answers: a run's, a model or another server."""

    run_dir: Path | None = flag(
        "use the policy of this run, or its newest checkpoint, and by default its settings",
        "RUN",
        name="--run",
    )
    url: str | None = flag(
        "use an OpenAI-compatible server in place of the policy; no model is loaded"
    )
    api_key: str | None = flag("key of that server (default: $OPENAI_API_KEY)")
    model: str | None = flag(
        "model that the server is asked for (default: as the agent asks), or without --url, "
        "a model to load for model.name",
        "NAME",
    )

    def load(self) -> "tuple[Config, PolicySource]":
        """Return the settings and what answers the calls. Raises ConfigError for a wrong flag."""
        from lightning_jax.settings import ConfigError
        from lightning_jax.train.directory import find_weights, with_fixed_paths
        from lightning_jax.train.loop.check import check_agent, check_model

        stop_on_sigterm()
        for name, value in (("--url", self.url), ("--model", self.model)):
            if self.run_dir is not None and value is not None:
                raise ConfigError.conflict(
                    name, f"--run and {name} are both set; drop one of them."
                )
        if self.api_key is not None and self.url is None:
            raise ConfigError.conflict(
                "--api-key", "--api-key is set without --url; add --url, or drop it."
            )
        if self.run_dir is not None:
            find_weights(self.run_dir)  # before its settings are read, which may be missing as well
        config = self.load_config(self.run_dir or Path())
        check_agent(config)
        config = with_fixed_paths(config)  # loaders and agents may change the directory
        if self.url is None and self.run_dir is None and self.model is None:
            check_model(config)

        from lightning_jax.gateway.calls.remote import remote_role  # imports JAX, after the checks
        from lightning_jax.train.loop.inference import PolicySource

        if self.url is None:
            return config, PolicySource(run_dir=self.run_dir, model=self.model)
        key = self.api_key or os.environ.get("OPENAI_API_KEY")
        return config, PolicySource(server=remote_role(self.url, key, self.model))


@dataclass(frozen=True, kw_only=True)
class Try(PolicyCommand):
    """Run the agent of a config on one task and show its rollout, with the reward.

    Without FILE, use config.yaml. The exit code is 1 if an attempt failed.
    """

    task: str | None = flag(
        "task to run: its id, or its position among the training tasks (default: the first)",
        "ID|INDEX",
    )
    num_attempts: AtLeastOne = flag(
        "number of attempts, compared in a table (default: %(default)s)", "N", name="-n", default=1
    )
    greedy: bool = flag(
        "sample greedily, as evaluations do (default: as training does)", default=False
    )
    record: Path | None = flag("add the rollouts to this SQLite file, which `view` shows", "FILE")
    chars: Index = flag(
        "maximum number of characters per text, 0 for no limit (default: %(default)s)",
        default=DEFAULT_CHARS,
    )

    def run(self) -> int:
        config, source = self.load()
        from lightning_jax.cli.try_agent import try_agent

        return try_agent(config, source, self)


@dataclass(frozen=True, kw_only=True)
class Eval(PolicyCommand):
    """Score a policy on tasks without training, and compare it with an earlier result.

    Without FILE, use config.yaml.
    """

    tasks: str = flag("dev, train, or a file of tasks (default: %(default)s)", default="dev")
    limit: AtLeastOne | None = flag(
        "maximum number of tasks, evenly spaced (default: eval.num_tasks; of a file, all)", "N"
    )
    repeats: AtLeastOne = flag("rollouts of each task (default: %(default)s)", "K", default=1)
    sampled: bool = flag("sample as training does (default: greedily)", default=False)
    save: Path | None = flag("write a line of JSON for each task to this .jsonl file", "FILE")
    compare: Path | None = flag(
        "compare task by task with saved results, or with the last evaluation of a run", "FILE|RUN"
    )

    def run(self) -> int:
        config, source = self.load()
        from lightning_jax.cli.evaluate import evaluate

        evaluate(config, source, self)
        return 0
