"""State that every process of a run holds: train states, references and checkpoints.

All processes call the same methods in the same order, because programs and checkpoints span all of
them. `multihost.Leader` ensures that. A run of one process has only the leader's replica.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.engine.engine import Engine
from lightning_jax.models.formats.load import LoadedModel, load_like
from lightning_jax.models.lora import adapted_facts, pick
from lightning_jax.models.mesh import serving_mesh
from lightning_jax.models.policies import TEACHER, Policy
from lightning_jax.models.reshard import copy_to_host, reshard
from lightning_jax.models.sharding import param_shardings, to_host
from lightning_jax.models.transformer import Params
from lightning_jax.rl.distill import (
    TeacherScorer,
    count_unscored,
    teacher_metrics,
    waits_for_teacher,
    with_scores,
)
from lightning_jax.rl.gae import CallValues
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.joining import join_metrics, join_values, sequences_of
from lightning_jax.rl.update.train_state import TrainState
from lightning_jax.rl.update.train_step import taking_turns
from lightning_jax.rl.update.updater import NO_MOMENTS, Updater
from lightning_jax.train.config import Config
from lightning_jax.train.directory import CHECKPOINTS, REFERENCE, WARMUP_BEST
from lightning_jax.train.state.checkpoint import Checkpointer, CheckpointError
from lightning_jax.train.state.teacher import load_teacher
from lightning_jax.train.state.updaters import phase_updater
from lightning_jax.types import Metrics, Trajectory

log = logging.getLogger(__name__)

Dispatching = Callable[[], contextlib.AbstractContextManager[None]]


class Replica:
    """Weights and moments at the current step, and the operations that change them.

    `states` has one state for each of `policies`, the table's sets of weights, and `reference` the
    frozen copy of its weights if the loss needs one. `progress` is the object saved with the newest
    checkpoint, or None without a checkpoint.
    """

    def __init__(self, config: Config, model: LoadedModel) -> None:
        directory = Path(config.run_dir)
        self.config, self.model = config, model
        self.step = 0
        self.progress: dict[str, Any] | None = None
        self.adapts = adapted_facts(model)  # before the state takes ownership of the weights
        if config.policies:
            self.adapts["policies"] = ", ".join(self._described(name) for name in config.policies)
        self.checkpointer = Checkpointer(
            directory / CHECKPOINTS, config.checkpoint, deletes_drafts=True
        )
        self.learners = {
            "warmup": phase_updater(model.config, config, supervised=True),
            "policy": phase_updater(model.config, config, supervised=False),
        }
        self.shares_devices = False  # with engines that run during an update
        self.dispatching: Dispatching = contextlib.nullcontext
        self.policies = config.policy_table.sets
        self.states = self._restore() or self._first_states()
        self.checkpointer.warn_of_disk(_packed(self.policies, self.states))
        self.reference = self._first_reference()
        self.teacher = load_teacher(
            model,
            config.policy_table.row(TEACHER),
            config.distill,
            config.model,
            config.batch,
            self.learner.mesh,
        )

    def share_devices(self, engine: Engine) -> None:
        """With `rollout.ahead`, take turns with the engine on the trainer's devices in an update.

        A single device of a CPU runs programs of several threads at once, so nothing waits there.
        """
        devices = set(self.learner.mesh.devices.flat) if self.config.rollout.ahead else set()
        self.shares_devices = bool(engine.devices & devices)
        is_one_cpu = len(devices) == 1 and next(iter(devices)).platform == "cpu"
        if not self.shares_devices or is_one_cpu:
            return
        self.dispatching = engine.dispatching
        self.learners = {
            phase: replace(learner, functions=taking_turns(learner.functions, engine.dispatching))
            for phase, learner in self.learners.items()
        }

    @property
    def phase(self) -> str:
        return "warmup" if self.step < self.config.warmup.num_steps else "policy"

    @property
    def learner(self) -> Updater:
        """Objective and optimizer for the next step's phase."""
        return self.learners[self.phase]

    def values(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[tuple[CallValues, ...]] | None, Metrics]:
        """Return `Updater.values` for the current weights."""
        parts, seconds = [], 0.0
        for policy in self._learning:
            state = self.states[policy.weights]
            values, metrics = self.learner.values(state, policy.calls(trajectories))
            if values is None:
                return None, {}
            parts, seconds = [*parts, values], seconds + metrics["time/values_s"]
        return join_values(trajectories, self._learning, parts), {"time/values_s": seconds}

    def update(self, sequences: Sequence[TrainingSequence]) -> Metrics:
        """Train on the sequences and return metrics.

        If no sequence has a gradient, the weights stay the same.
        """
        return join_metrics(self._learning, [self._update(p, sequences) for p in self._learning])

    def _update(self, policy: Policy, sequences: Sequence[TrainingSequence]) -> Metrics:
        index, mine = policy.weights, sequences_of(policy, sequences)
        mine, scored = self._scored(index, mine)
        state, metrics = self.learner.update(self.states[index], mine, self.reference[index])
        self.states[index] = state
        return metrics | scored

    def _scored(
        self, index: int, sequences: Sequence[TrainingSequence]
    ) -> tuple[Sequence[TrainingSequence], Metrics]:
        """Return (the sequences with the teacher's scores, metrics), without a teacher as is.

        The teacher is a model of its own, or the policy of the state `index` with a hint.
        """
        waiting = [item for item in sequences if waits_for_teacher(item)]
        if not (waiting and self.config.distill.has_teacher):
            return sequences, {}
        started = time.monotonic()
        if self.teacher is not None:
            scores = self.teacher.score(waiting)
        else:
            learner, top_k = self.learner, self.config.distill.num_top
            scorer = TeacherScorer(learner.functions.scores_fn, learner.batch, learner.mesh, top_k)
            scores = scorer(self.states[index].weights, waiting)
        scored = with_scores(sequences, scores)
        by_server = self.config.distill.teacher_url is not None
        metrics = teacher_metrics(scored) | count_unscored(scores, by_server=by_server)
        return scored, metrics | {"time/teacher_s": time.monotonic() - started}

    def advance(self) -> None:
        """Go to the next step.

        After the warm-up the optimizer is reset, and the warm-up's weights become the reference.
        """
        self.step += 1
        if self.step == self.config.warmup.num_steps:
            self._begin_policy()

    def keep_weights(self) -> None:
        """Save the weights of this step for `end_warmup`."""
        with self._checkpoints(WARMUP_BEST) as kept:
            kept.clear()
            self._save_weights(kept, self.states, self.policies)

    def end_warmup(self) -> None:
        """Skip the rest of the warm-up, with the weights that `keep_weights` saved."""
        with self._checkpoints(WARMUP_BEST) as kept:
            step = kept.latest_step
            assert step is not None, "the best probe's weights are saved"
            for policy in self.policies:
                state = self.states[policy.weights]
                params = kept.restore_params(state.params, step, policy.name)
                self.states[policy.weights] = replace(state, params=params)
        self.step = self.config.warmup.num_steps
        self._begin_policy()

    def forget_weights(self) -> None:
        """Delete what `keep_weights` saved."""
        shutil.rmtree(Path(self.config.run_dir) / WARMUP_BEST, ignore_errors=True)

    def _begin_policy(self) -> None:
        for index, policy in enumerate(self.policies):
            # Popped first, because old and new moments together would double the memory.
            params = self.states.pop(index).weights
            self.states.insert(index, self.learner.init(params, trains=policy in self._learning))
        self.reference = self._first_reference()

    @property
    def changed(self) -> tuple[Policy, ...]:
        """Policies whose weights the last step trained."""
        return self._trained_by(self.step - 1)

    def publish(self) -> None:
        """Do the other processes' share of `Engine.publish` for the weights just trained."""
        for policy in self.changed:
            self._publish(self.states[policy.weights].params)

    def publish_all(self) -> None:
        """Like `publish`, for all weights."""
        for state in self.states:
            self._publish(state.weights)

    def _publish(self, params: Params) -> None:
        if self.config.cluster.samplers:
            copy_to_host(params, self.config.model.dtype)
            return
        mesh = serving_mesh(self.config.serve.mesh, self.config.mesh)
        shardings = pick(param_shardings(self.model.config, mesh), params)
        reshard(params, shardings, jnp.dtype(self.config.model.dtype))

    def save(self, progress: dict[str, Any]) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.checkpointer.latest_step != self.step:
            described = progress | {"adapts": self.adapts}
            self.checkpointer.save(self.step, _packed(self.policies, self.states), described)

    def whole_params(self, policy: Policy) -> Params:
        """Return the policy's weights, on the host if they span several processes."""
        params = self.states[policy.weights].weights
        return params if jax.process_count() == 1 else to_host(params)

    def close(self) -> None:
        self.checkpointer.close()
        if self.teacher is not None:
            self.teacher.close()

    @property
    def _learning(self) -> tuple[Policy, ...]:
        """Policies whose weights steps of this phase change."""
        return self._trained_by(self.step)

    def _trained_by(self, step: int) -> tuple[Policy, ...]:
        """Return the policies whose weights this step changes. The warm-up trains all.

        A run without steps trains none, so that it holds no moments.
        """
        if self.config.total_steps == 0:
            return ()
        is_warmup = step < self.config.warmup.num_steps
        return tuple(policy for policy in self.policies if is_warmup or policy.trains)

    def _described(self, policy: str) -> str:
        """Return the policy's entry in a checkpoint, which has no moments for frozen weights."""
        is_set = not self.config.policy_table.adapters
        frozen = is_set and not self.config.policies[policy].trains
        return f"{policy} (frozen)" if frozen else policy

    def _first_states(self) -> list[TrainState]:
        """Return the states before the first step. Takes ownership of the model's weights."""
        return [
            self.learner.init(self._first_params(policy), trains=policy in self._learning)
            for policy in self.policies
        ]

    def _first_params(self, policy: Policy) -> Params:
        if policy.base not in (None, self.model.name):
            return load_like(self.model, policy.base).params
        if policy == self.policies[-1]:
            return self.model.params
        return jax.tree.map(np.array, self.model.params)

    def _restore(self) -> list[TrainState] | None:
        """Load the newest sound checkpoint and its step, or return None if there is none."""
        if self.checkpointer.latest_step is None:
            return None
        like = _packed(self.policies, self._first_states())

        def read(step: int) -> tuple[int, dict[str, Any], Any]:
            progress = self.checkpointer.progress(step)
            self._check_adapts(step, progress)
            return step, progress, self.checkpointer.restore(like, step)

        self.step, self.progress, packed = self.checkpointer.read_newest(read)
        log.info("resuming from the checkpoint of step %d in %s", self.step, self.config.run_dir)
        return [packed[policy.name] if policy.name else packed for policy in self.policies]

    def _check_adapts(self, step: int, progress: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless the weights of a checkpoint belong to this model."""
        saved = progress.get("adapts", {})
        for name, value in self.adapts.items():
            if saved.get(name) != value:
                raise CheckpointError.mismatch(
                    name,
                    f"the weights in the checkpoint of step {step} were trained with {name} "
                    f"{saved.get(name)}; expected {value}. Use the model and settings they were "
                    "trained with, or another run_dir.",
                )

    def _first_reference(self) -> list[Params | None]:
        """Return frozen copies of the weights that learn, if the loss needs them.

        The copies are saved on disk for resuming. With adapters only the adapters are copied. The
        first step of the policy phase always copies the current weights. A reference saved by an
        earlier attempt may have had other weights.
        """
        reference: list[Params | None] = [None] * len(self.policies)
        has_one = self.config.algorithm.has_reference and self.config.total_steps > 0
        if not has_one or self.phase == "warmup":
            return reference
        states = [self.states[policy.weights] for policy in self._learning]
        begins = self.step == self.config.warmup.num_steps
        with self._checkpoints(REFERENCE) as references:
            if (step := references.latest_step) is not None and not begins:
                copies = [
                    references.restore_params(state.params, step, policy.name)
                    for policy, state in zip(self._learning, states, strict=True)
                ]
            else:
                copies = [jax.tree.map(jnp.copy, state.params) for state in states]
                references.clear()
                self._save_weights(references, states, self._learning)
        for policy, copy in zip(self._learning, copies, strict=True):
            reference[policy.weights] = copy
        return reference

    @contextlib.contextmanager
    def _checkpoints(self, name: str) -> Iterator[Checkpointer]:
        """Open a directory of the run with weights that are not those of a checkpoint."""
        directory = Path(self.config.run_dir) / name
        with contextlib.closing(Checkpointer(directory, self.config.checkpoint)) as opened:
            yield opened

    def _save_weights(
        self, where: Checkpointer, states: Sequence[TrainState], policies: Sequence[Policy]
    ) -> None:
        """Save the states of this step without moments and critics, which nobody will read."""
        saved = [
            replace(state, opt_state=NO_MOMENTS.init(state.params), critic=None) for state in states
        ]
        where.save(self.step, _packed(policies, saved), {})


def _packed(policies: Sequence[Policy], states: Sequence[TrainState]) -> Any:
    """Return the states by policy, or the only one by itself, as checkpoints have them."""
    by_name = {policy.name: state for policy, state in zip(policies, states, strict=True)}
    return by_name.get("", by_name)
