"""Supervised steps on the stored attempts of a run: rejection sampling, or one round of RAFT.

The steps are those of a warm-up: the same updater and optimizer settings (`warmup.optimizer`), and
forest batches of `warmup.groups_per_step` groups. Attempts take the place of demonstrations. Their
token ids are those in the run's store. RAFT is arXiv 2304.06767.
"""

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.rl.update.train_state import TrainState
from lightning_jax.rollouts.conditions import Condition
from lightning_jax.traces.store import Store
from lightning_jax.train.attempts import (
    Attempt,
    attempt_sequences,
    choose_attempts,
    stored_attempts,
)
from lightning_jax.train.check import check_new
from lightning_jax.train.config import Config
from lightning_jax.train.directory import STORE
from lightning_jax.train.metrics import Row
from lightning_jax.train.offline import Start, learn, new_run, trace_reader
from lightning_jax.train.tasks import TaskIterator
from lightning_jax.train.updaters import phase_updater
from lightning_jax.types import Metrics, Rollout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Attempts to learn from, and how often."""

    condition: Condition
    only_best: bool = False  # of each group
    phase: str = "train"
    num_steps: int | None = None  # None: each group once
    rescored: Mapping[str, Rollout] | None = None  # with other rewards, by id


def learn_from_attempts(source: Path, config: Config, choice: Choice, start: Start) -> list[Row]:
    """Learn from attempts of the run in `source`, and return the rows of metrics.

    `config` has the run's settings with another `run_dir`, which must not exist. It gets the
    settings, the metrics and the policy. Raises UserError if nothing can be learned.
    """
    check_new(config)
    groups = _groups(source, config, choice)
    per_step = config.warmup.groups_per_step
    num_steps = choice.num_steps or -(-len(groups) // per_step)
    batches = TaskIterator(groups, min(per_step, len(groups)), config.seed)
    with new_run(source, config, num_steps, start) as (config, model):
        learner = phase_updater(model.config, config, supervised=True)

        def step(state: TrainState, _: int) -> tuple[TrainState, Metrics]:
            some = next(batches)
            state, row = learner.update(state, attempt_sequences(some, config.adapters), None)
            row |= {
                "train/num_tasks": float(len(some)),
                "train/num_conversations": float(sum(map(len, some))),
            }
            return state, {name.replace("train/", "warmup/"): v for name, v in row.items()}

        return learn(config, model, learner.init(model.params), step, num_steps)


def _groups(source: Path, config: Config, choice: Choice) -> list[list[Attempt]]:
    """Return the chosen attempts of the run, and log their number."""
    with closing(Store(source / STORE, read_only=True)) as store:
        attempts = stored_attempts(store, trace_reader(config), choice.phase, choice.rescored)
    groups = choose_attempts(attempts, choice.condition, only_best=choice.only_best)
    number = sum(map(len, groups))
    log.info("learning from %d of %d attempts, in %d groups", number, len(attempts), len(groups))
    return groups
