"""One phase's way to learn: its objective and optimizer over the forest batches of a step."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lightning_jax.config import BatchConfig, Config, ConfigError
from lightning_jax.metrics import Metrics
from lightning_jax.models.sharding import (
    batch_sharding,
    make_mesh,
    num_row_shards,
    param_shardings,
)
from lightning_jax.models.transformer import DecoderConfig
from lightning_jax.rl import train_step
from lightning_jax.rl.batching import make_batches
from lightning_jax.rl.optimizer import make_optimizer
from lightning_jax.rl.train_step import Params, TrainFunctions, TrainState
from lightning_jax.types import TrainingSequence


@dataclass(frozen=True)
class Learner:
    """Makes train states and updates them; holds no state of its own."""

    model: DecoderConfig
    mesh: Mesh
    optimizer: optax.GradientTransformation
    functions: TrainFunctions
    batch: BatchConfig
    skip_zero_advantage: bool

    def init(self, params: Params) -> TrainState:
        """A state with fresh moments. Takes over `params`, which move to their places."""
        shardings = param_shardings(self.model, self.mesh)
        return train_step.init_state(jax.device_put(params, shardings, donate=True), self.optimizer)

    def update(
        self, state: TrainState, sequences: Sequence[TrainingSequence], reference: Params | None
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step on all sequences, and its metrics. Takes over `state`.

        Without a sequence that could move the weights the state comes back as it is, and
        `train/skipped_updates` is 1.
        """
        started = time.monotonic()
        batches, metrics = make_batches(
            sequences, self.batch, skip_zero_advantage=self.skip_zero_advantage
        )
        if not batches:
            return state, metrics | {"train/skipped_updates": 1.0, "train/num_batches": 0.0}
        placed = jax.device_put(batches, batch_sharding(self.mesh))
        state, learned = train_step.update(self.functions, state, placed, reference)
        seconds = time.monotonic() - started
        return state, metrics | learned | {
            "train/num_batches": float(len(batches)),
            "train/tokens_per_s": metrics["train/tokens_naive"] / seconds,
            "train/forest_tokens_per_s": metrics["train/tokens_forest"] / seconds,
        }


def make_learner(model: DecoderConfig, config: Config, *, supervised: bool) -> Learner:
    """The learner of the warm-up (`supervised`) or of the policy phase."""
    algorithm, mesh = config.algorithm, make_mesh(config.mesh)
    if config.batch.rows % num_row_shards(mesh):
        raise ConfigError(
            f"batch.rows is {config.batch.rows}; expected a multiple of {num_row_shards(mesh)}, "
            "the devices of the mesh that share a batch (mesh.data times mesh.fsdp)."
        )
    if supervised:
        objective = train_step.supervised_objective()
    else:
        objective = train_step.policy_objective(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            kl_coef=algorithm.kl_coef,
        )
    optimizer = make_optimizer(config.warmup.optimizer if supervised else config.optimizer)
    functions = train_step.make_train_functions(
        model,
        optimizer,
        objective,
        head_chunk=config.batch.head_chunk,
        remat=config.model.remat,
        compute_dtype=jnp.dtype(config.model.dtype),
    )
    return Learner(
        model=model,
        mesh=mesh,
        optimizer=optimizer,
        functions=functions,
        batch=config.batch,
        skip_zero_advantage=algorithm.skip_zero_advantage and algorithm.kl_coef == 0,
    )
