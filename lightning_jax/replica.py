"""What every process of a run holds alike: the train state, its reference and its checkpoints.

All processes call the same methods in the same order, because their programs and checkpoints span
them all; `distributed.Leader` sees to it. In a run of one process there is only the leader's.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lightning_jax.checkpoint import Checkpointer, CheckpointError
from lightning_jax.config import Config
from lightning_jax.learner import Learner, make_learner
from lightning_jax.metrics import Metrics
from lightning_jax.models.load import LoadedModel
from lightning_jax.models.lora import adapted_facts, overlay, pick
from lightning_jax.models.sharding import param_shardings, reshard, serving_mesh, to_host
from lightning_jax.rl.train_step import Params, TrainState
from lightning_jax.types import TrainingSequence, Trajectory

log = logging.getLogger(__name__)


class Replica:
    """The weights and moments at the step that the run directory has reached, and what changes
    them. `progress` is what the newest checkpoint says beside them, None without one.
    """

    def __init__(self, config: Config, model: LoadedModel) -> None:
        directory = Path(config.run_dir)
        self.config, self.model = config, model
        self.step = 0
        self.progress: dict[str, Any] | None = None
        self.serving_mesh = serving_mesh(config)
        self.adapts = adapted_facts(model)  # now, because the state takes over the weights
        if config.policies:
            self.adapts["policies"] = ", ".join(config.policies)
        self.checkpointer = Checkpointer(directory / "checkpoints", config.checkpoint)
        self.references = Checkpointer(directory / "reference", config.checkpoint)
        self.learners = {
            "warmup": make_learner(model.config, config, supervised=True),
            "policy": make_learner(model.config, config, supervised=False),
        }
        self.state = self._restore() or self.learner.init(model.params)
        self.reference = self._first_reference()

    @property
    def phase(self) -> str:
        return "warmup" if self.step < self.config.warmup.num_steps else "policy"

    @property
    def learner(self) -> Learner:
        """Objective and optimizer of the phase that the next step belongs to."""
        return self.learners[self.phase]

    def values(self, trajectories: Sequence[Trajectory]) -> Any:
        """`Learner.values` of the present weights."""
        return self.learner.values(self.state, trajectories)

    def update(self, sequences: Sequence[TrainingSequence]) -> Metrics:
        """Trains on the sequences; metrics. Without any that counts, the weights stay."""
        self.state, metrics = self.learner.update(self.state, sequences, self.reference)
        return metrics

    def advance(self) -> None:
        """To the next step. After the warm-up the optimizer starts afresh, and the reference is
        what the warm-up made.
        """
        self.step += 1
        if self.step != self.config.warmup.num_steps:
            return
        params = self.state.policy
        del self.state  # its moments would double the memory while the new ones are made
        self.state = self.learner.init(params)
        self.reference = self._first_reference()

    def publish(self) -> None:
        """The part of the other processes in `Engine.place` of the weights that are trained."""
        self._publish(self.state.params)

    def publish_all(self) -> None:
        """As `publish`, of all weights."""
        self._publish(self.state.policy)

    def _publish(self, params: Params) -> None:
        places = pick(param_shardings(self.model.config, self.serving_mesh), params)
        reshard(params, places, jnp.dtype(self.config.model.dtype))

    def save(self, progress: dict[str, Any]) -> None:
        """Writes a checkpoint of this step, unless there is one."""
        if self.checkpointer.latest_step != self.step:
            self.checkpointer.save(self.step, self.state, progress | {"adapts": self.adapts})

    def whole_params(self) -> Params:
        """The weights, on the host if they span several processes."""
        return self.state.policy if jax.process_count() == 1 else to_host(self.state.policy)

    def close(self) -> None:
        self.checkpointer.close()
        self.references.close()

    def _restore(self) -> TrainState | None:
        """Goes to the newest checkpoint's step; None if there is none."""
        if self.checkpointer.latest_step is None:
            return None
        self.step = self.checkpointer.latest_step
        saved = self.checkpointer.restore(self.learner.init(self.model.params))
        self.progress = saved.progress
        found = saved.progress.get("adapts", {})
        for name, value in self.adapts.items():
            if found.get(name) != value:
                raise CheckpointError(
                    f"the adapters in the checkpoint of step {self.step} were trained with {name} "
                    f"{found.get(name)}; expected {value}. Use the model and settings they were "
                    "trained with, or another run_dir."
                )
        log.info("going on from the checkpoint of step %d in %s", self.step, self.config.run_dir)
        return saved.state

    def _first_reference(self) -> Params | None:
        """The frozen copy for the KL term, kept on disk for resumption; None where no term needs
        it. Of a model with adapters it is a copy of those.
        """
        if self.config.algorithm.kl_coef == 0 or self.phase == "warmup":
            return None
        trained = jax.tree.map(jnp.copy, self.state.params)
        copy = self.learner.fresh(overlay(self.state.base, trained))
        if self.references.latest_step is not None:
            return self.references.restore(copy).state.params
        self.references.save(self.step, copy, {})
        return copy.params
