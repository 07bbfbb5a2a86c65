"""Flags of the commands that run an agent without training it: `try` and `eval`.

Nothing heavy is imported before a command runs.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_jax.cli.runtime import (
    Index,
    Limit,
    add_settings,
    number_of,
    settings_layers,
    stop_on_sigterm,
)
from lightning_jax.studio import DEFAULT_CHARS

if TYPE_CHECKING:
    from lightning_jax.train.config import Config
    from lightning_jax.train.inference import PolicySource


def add_try(parser: argparse.ArgumentParser) -> None:
    _add_policy(parser)
    task = "task to run: its id, or its position among the training tasks (default: the first)"
    parser.add_argument("--task", metavar="ID|INDEX", help=task)
    attempts = "number of attempts, compared in a table (default: %(default)s)"
    count = number_of(Limit)
    parser.add_argument("-n", dest="attempts", type=count, default=1, metavar="N", help=attempts)
    greedy = "sample greedily, as evaluations do (default: as training does)"
    parser.add_argument("--greedy", action="store_true", help=greedy)
    record = "add the rollouts to this SQLite file, which `view` shows"
    parser.add_argument("--record", metavar="FILE", type=Path, help=record)
    chars = "maximum number of characters per text, 0 for no limit (default: %(default)s)"
    parser.add_argument("--chars", type=number_of(Index), default=DEFAULT_CHARS, help=chars)


def add_eval(parser: argparse.ArgumentParser) -> None:
    _add_policy(parser)
    tasks = "dev, train, or a file of tasks (default: %(default)s)"
    parser.add_argument("--tasks", default="dev", help=tasks)
    limit = "maximum number of tasks, evenly spaced (default: eval.num_tasks; of a file, all)"
    parser.add_argument("--limit", type=number_of(Limit), metavar="N", help=limit)
    repeats = "rollouts of each task (default: %(default)s)"
    parser.add_argument("--repeats", type=number_of(Limit), default=1, metavar="K", help=repeats)
    sampled = "sample as training does (default: greedily)"
    parser.add_argument("--sampled", action="store_true", help=sampled)
    save = "write a line of JSON for each task to this .jsonl file"
    parser.add_argument("--save", metavar="FILE", type=Path, help=save)
    compare = "compare task by task with saved results, or with the last evaluation of a run"
    parser.add_argument("--compare", metavar="FILE|RUN", type=Path, help=compare)


def _add_policy(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    run = "use the policy of this run, or its newest checkpoint, and by default its settings"
    parser.add_argument("--run", dest="run_dir", metavar="RUN", type=Path, help=run)
    url = "use an OpenAI-compatible server in place of the policy; no model is loaded"
    parser.add_argument("--url", help=url)
    key = "key of that server (default: $OPENAI_API_KEY)"
    parser.add_argument("--api-key", help=key)
    model = "model that the server is asked for (default: as the agent asks), or without --url, "
    parser.add_argument("--model", metavar="NAME", help=model + "a model to load for model.name")


def run_try(arguments: argparse.Namespace) -> int:
    """Run the agent of a config on one task and show its rollout, with the reward.

    Without FILE, use config.yaml. The exit code is 1 if an attempt failed.
    """
    config, source = _load(arguments)
    from lightning_jax.cli.try_agent import try_agent

    return try_agent(
        config,
        source,
        task_name=arguments.task,
        num_attempts=arguments.attempts,
        is_greedy=arguments.greedy,
        record=arguments.record,
        chars=arguments.chars,
    )


def run_eval(arguments: argparse.Namespace) -> int:
    """Score a policy on tasks without training, and compare it with an earlier result.

    Without FILE, use config.yaml.
    """
    config, source = _load(arguments)
    from lightning_jax.cli.evaluate import Evaluation, evaluate

    evaluate(
        config,
        source,
        Evaluation(
            tasks=arguments.tasks,
            limit=arguments.limit,
            repeats=arguments.repeats,
            is_sampled=arguments.sampled,
            save=arguments.save,
            compare=arguments.compare,
        ),
    )
    return 0


def _load(arguments: argparse.Namespace) -> "tuple[Config, PolicySource]":
    """Return the settings and what answers the calls. Raises ConfigError for a wrong flag."""
    from lightning_jax.settings import ConfigError, load_config
    from lightning_jax.train.check import check_agent, check_model
    from lightning_jax.train.config import Config
    from lightning_jax.train.directory import find_weights, with_fixed_paths

    stop_on_sigterm()
    run_dir, url, model = arguments.run_dir, arguments.url, arguments.model
    for flag, value in (("--url", url), ("--model", model)):
        if run_dir is not None and value is not None:
            raise ConfigError(
                f"--run and {flag} are both set; drop one of them.", reason="conflict", key=flag
            )
    if arguments.api_key is not None and url is None:
        raise ConfigError(
            "--api-key is set without --url; add --url, or drop it.",
            reason="conflict",
            key="--api-key",
        )
    if run_dir is not None:
        find_weights(run_dir)  # before its settings are read, which may be missing as well
    config = load_config(Config, settings_layers(arguments, run_dir or Path()))
    check_agent(config)
    config = with_fixed_paths(config)  # loaders and agents may change the directory
    if url is None and run_dir is None and model is None:
        check_model(config)

    from lightning_jax.gateway.calls.remote import remote_role  # imports JAX, after the checks
    from lightning_jax.train.inference import PolicySource

    if url is None:
        return config, PolicySource(run_dir=run_dir, model=model)
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    return config, PolicySource(server=remote_role(url, key, model))
