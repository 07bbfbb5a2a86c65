"""Runs that learn from the stored attempts of another run, without sampling.

`learn_from_rewards` makes policy steps on whole groups with other rewards. train/sft.py makes
supervised steps on chosen attempts.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Literal

import jax
import jax.numpy as jnp

from lightning_jax.engine.grammar import GrammarCompiler
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.sources import load_tokenizer
from lightning_jax.rl.advantages import without_equal_groups
from lightning_jax.rl.masks import with_masks
from lightning_jax.rl.multi_policy.prepare import prepare_policies
from lightning_jax.rl.train_state import TrainState
from lightning_jax.rollouts.results.metrics import to_trajectories
from lightning_jax.settings import ConfigError, load_config, save_config
from lightning_jax.system.files import make_private, write_whole
from lightning_jax.traces.store import Store
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.train.attempts import regroup, stored_steps
from lightning_jax.train.check import check_new
from lightning_jax.train.config import Config
from lightning_jax.train.directory import EXPORTED, METRICS, SETTINGS, STORE, find_weights
from lightning_jax.train.export import export
from lightning_jax.train.metrics import MetricsLog, Row
from lightning_jax.train.startup import load_trainable, with_dtypes
from lightning_jax.train.status import recorded_end
from lightning_jax.train.updaters import phase_updater
from lightning_jax.types import Metrics, Rollout, Trajectory

log = logging.getLogger(__name__)

Start = Literal["policy", "model"]
Step = Callable[[TrainState, int], tuple[TrainState, Metrics]]
ANY_AGE = 2**31 - 1


def learn_from_rewards(
    source: Path,
    config: Config,
    rescored: Mapping[str, Rollout],
    *,
    phase: str = "train",
    num_steps: int | None = None,
    start: Start = "model",
) -> list[Row]:
    """Make policy steps on the stored groups of the run in `source`, and return the metrics rows.

    `rescored` has rollouts with their new rewards, by id; others are left out. Failed ones belong
    to their groups. `config` has the run's settings, with another `run_dir`, which must not exist.
    A step takes the groups that a step of the run took, as often as `num_steps` needs; by default
    each group comes once. If groups are left out or `rollout.tasks_per_step` differs from the
    run's, a step takes that many groups in the same order. Samples are never too old.

    Raises UserError if nothing can be learned.
    """
    check_new(config)
    if config.distill.has_teacher:
        raise ConfigError(
            "stored rollouts are learned without a teacher; set distill.teacher, "
            "distill.teacher_url and distill.hint to null.",
            reason="unsupported",
            key="distill",
        )
    steps = read_steps(source, config, phase, rescored)
    if not any(trajectory.transitions for step in steps for trajectory in step):
        raise ConfigError(
            f"run {source} has no scored {phase} rollouts with calls to learn from; choose "
            "another --phase.",
            reason="empty",
            key="--phase",
        )
    num_steps = num_steps or len(steps)
    num_groups = len({trajectory.group_id for step in steps for trajectory in step})
    log.info("learning from %d groups in %d steps", num_groups, len(steps))
    algorithm = replace(config.algorithm, max_staleness=ANY_AGE)
    upcoming = cycle(steps)
    with new_run(source, config, num_steps, start) as (config, model):
        learner = phase_updater(model.config, config, supervised=False)
        grammars = GrammarCompiler.shared(model.tokenizer, model.config.vocab_size, config.serve)
        state = learner.init(model.params)
        reference = jax.tree.map(jnp.copy, state.policy) if algorithm.has_reference else None

        def step(state: TrainState, _: int) -> tuple[TrainState, Metrics]:
            trajectories = next(upcoming)
            values, metrics = learner.values(state, trajectories)
            sequences, of_data = prepare_policies(
                trajectories, algorithm, config.policies, values=values
            )
            sequences, of_masks = with_masks(sequences, grammars)
            state, of_update = learner.update(state, sequences, reference)
            return state, {
                **metrics,
                **of_data,
                **of_masks,
                **of_update,
                "rollout/num_rollouts": float(len(trajectories)),
                "rollout/reward_mean": fmean(trajectory.reward for trajectory in trajectories),
            }

        return learn(config, model, state, step, num_steps)


def read_steps(
    source: Path, config: Config, phase: str, rescored: Mapping[str, Rollout]
) -> list[list[Trajectory]]:
    """Return the trajectories of each step on the rescored rollouts of the run in `source`."""
    of_run = load_config(Config, [str(source / SETTINGS)]).rollout
    per_step, algorithm = config.rollout.tasks_per_step, config.algorithm
    reader, found = trace_reader(config), []
    with closing(Store(source / STORE, read_only=True)) as store:
        whole, steps = stored_steps(store, phase), stored_steps(store, phase, rescored)
        if per_step != of_run.tasks_per_step or _num_groups(steps) < _num_groups(whole):
            steps = regroup(steps, per_step)
        for rollouts in steps:
            made, _ = to_trajectories(store, rollouts, policy_version=0, reader=reader)
            has_left_out = algorithm.max_sampling_rounds > 1
            found.append(without_equal_groups(made, algorithm) if has_left_out else made)
    return [step for step in found if step]


def trace_reader(config: Config) -> TraceReader:
    """Return the reader of a run's spans."""
    decode = load_tokenizer(config.model.name).decode
    return TraceReader(config.roles, config.reward_rules, decode, config.policies, config.rollout)


def _num_groups(steps: Sequence[Sequence[Rollout]]) -> int:
    return len({rollout.group_id for step in steps for rollout in step})


@contextmanager
def new_run(
    source: Path, config: Config, num_steps: int, start: Start
) -> Iterator[tuple[Config, LoadedModel]]:
    """Yield (settings, model) of a new run in `config.run_dir`, and record how the block ends.

    The run has no warm-up and an empty store: its attempts are those of `source`. Raises
    ConfigError if the directory exists or the policies cannot be trained.
    """
    check_new(config)
    config = with_dtypes(_begun_at(source, config, start))
    model, directory = load_trainable(config), Path(config.run_dir)
    make_private(directory)
    with recorded_end(directory):
        warmup = replace(config.warmup, num_steps=0)
        save_config(replace(config, num_steps=num_steps, warmup=warmup), directory / SETTINGS)
        Store(directory / STORE).close()
        yield config, model


def learn(
    config: Config, model: LoadedModel, state: TrainState, step: Step, num_steps: int
) -> list[Row]:
    """Make the steps, write their metrics, export the policy and return the metrics rows."""
    directory = Path(config.run_dir)
    metrics = MetricsLog(directory / METRICS, 0, config.metrics)
    for number in range(num_steps):
        started = time.monotonic()
        state, row = step(state, number)
        metrics.write(number, row | {"time/step_s": time.monotonic() - started})
        loss = row.get("train/loss", row.get("warmup/loss", float("nan")))
        log.info("step %d: loss %.4g", number, loss)
    export(directory, model, "", state.policy, config.adapters)
    write_whole(directory / EXPORTED, f'{{"step": {num_steps}}}\n')
    metrics.close("finished")
    return metrics.rows


def _begun_at(source: Path, config: Config, start: Start) -> Config:
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
