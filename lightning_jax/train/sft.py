"""Supervised steps on the stored attempts of a run: rejection sampling, or one round of RAFT.

The steps are those of a warm-up: the same updater and optimizer settings (`warmup.optimizer`), and
forest batches of `warmup.groups_per_step` groups. Attempts take the place of demonstrations. Their
token ids are those in the run's store. RAFT is arXiv 2304.06767.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.sources import load_tokenizer
from lightning_jax.rollouts.conditions import Condition
from lightning_jax.rollouts.metrics import TraceReader
from lightning_jax.settings import ConfigError, save_config
from lightning_jax.system.files import make_private, write_whole
from lightning_jax.traces.store import Store
from lightning_jax.train.attempts import (
    Attempt,
    attempt_sequences,
    choose_attempts,
    stored_attempts,
)
from lightning_jax.train.config import Config
from lightning_jax.train.directory import EXPORTED, METRICS, SETTINGS, STORE, find_weights
from lightning_jax.train.export import export
from lightning_jax.train.metrics import MetricsLog, Row
from lightning_jax.train.startup import load_trainable, with_dtypes
from lightning_jax.train.status import recorded_end
from lightning_jax.train.tasks import TaskIterator
from lightning_jax.train.updaters import phase_updater
from lightning_jax.types import Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Attempts to learn from, and how often."""

    condition: Condition
    only_best: bool = False  # of each group
    phase: str = "train"
    num_steps: int | None = None  # None: each group once
    rescored: Mapping[str, Rollout] = field(default_factory=dict)  # with other rewards, by id


def learn_from_attempts(
    source: Path, config: Config, choice: Choice, start: Literal["policy", "model"]
) -> list[Row]:
    """Learn from attempts of the run in `source`, and return the rows of metrics.

    `config` has the run's settings with another `run_dir`, which must not exist. It gets the
    settings, the metrics and the policy. Raises UserError if nothing can be learned.
    """
    directory = Path(config.run_dir)
    if directory.exists():
        raise ConfigError(
            f"run directory {directory} already exists; pass another run_dir.",
            reason="exists",
            key="run_dir",
        )
    if config.policies and not config.model.lora.rank:
        raise ConfigError(
            "this run has policies with weights of their own, which sft cannot train; set "
            "model.lora.rank, or train them with algorithm.loss=raft.",
            reason="unsupported",
            key="policies",
        )
    groups = _groups(source, config, choice)
    num_steps = choice.num_steps or -(-len(groups) // config.warmup.groups_per_step)
    config = with_dtypes(_begun_at(source, config, start))
    model = load_trainable(config)
    make_private(directory)
    with recorded_end(directory):
        warmup = replace(config.warmup, num_steps=0)
        save_config(replace(config, num_steps=num_steps, warmup=warmup), directory / SETTINGS)
        Store(directory / STORE).close()  # empty: the attempts are in the run's
        return _learn(config, model, groups, num_steps)


def _groups(source: Path, config: Config, choice: Choice) -> list[list[Attempt]]:
    """Return the chosen attempts of the run, and log their number."""
    decode = load_tokenizer(config.model.name).decode
    reader = TraceReader(config.roles, config.reward_rules, decode, config.policies, config.rollout)
    with closing(Store(source / STORE, read_only=True)) as store:
        attempts = stored_attempts(store, reader, choice.phase, choice.rescored)
    groups = choose_attempts(attempts, choice.condition, only_best=choice.only_best)
    number = sum(map(len, groups))
    log.info("learning from %d of %d attempts, in %d groups", number, len(attempts), len(groups))
    return groups


def _begun_at(source: Path, config: Config, start: Literal["policy", "model"]) -> Config:
    """Return the settings with the model that the steps start from."""
    if start == "model":
        return config
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


def _learn(
    config: Config, model: LoadedModel, groups: Sequence[Sequence[Attempt]], num_steps: int
) -> list[Row]:
    directory = Path(config.run_dir)
    learner = phase_updater(model.config, config, supervised=True)
    state = learner.init(model.params)
    batches = TaskIterator(groups, min(config.warmup.groups_per_step, len(groups)), config.seed)
    metrics = MetricsLog(directory / METRICS, 0, config.metrics)
    for step in range(num_steps):
        started, some = time.monotonic(), next(batches)
        state, row = learner.update(state, attempt_sequences(some, config.adapters), None)
        row |= {
            "train/num_tasks": float(len(some)),
            "train/num_conversations": float(sum(map(len, some))),
            "time/step_s": time.monotonic() - started,
        }
        metrics.write(step, {name.replace("train/", "warmup/"): v for name, v in row.items()})
        log.info("step %d: loss %.4g", step, row.get("train/loss", float("nan")))
    export(directory, model, "", state.policy, config.adapters)
    write_whole(directory / EXPORTED, f'{{"step": {num_steps}}}\n')
    metrics.close("finished")
    return metrics.rows
