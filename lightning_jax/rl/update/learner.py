"""Weights in training, for a loop of one's own."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.grammar.compiler import GrammarCompiler
from lightning_jax.models.config import MeshConfig, RematKind
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.mesh import make_mesh, num_row_shards
from lightning_jax.models.transformer import Params
from lightning_jax.rl.batches.masks import with_masks
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.gae import CallValues
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.updater import make_updater
from lightning_jax.types import Metrics, Trajectory

MAX_LEN = 2048  # tokens of a sequence, unless `batch.row_len` says otherwise


class Learner:
    """Weights in training: the current ones, the optimizer's state and, if needed, a reference.

    Starts from a copy of the model's weights, in float32. Of a model with adapters it trains only
    the adapters. By default it uses all devices, and a microbatch has one row for each device that
    shares it. `dtype` is that of the computation, by default the model's own.
    """

    def __init__(
        self,
        model: LoadedModel,
        algorithm: AlgorithmConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        batch: BatchConfig | None = None,
        *,
        mesh: MeshConfig | None = None,
        dtype: str | None = None,
        remat: RematKind = "none",
        seed: int = 0,
    ) -> None:
        algorithm, devices = algorithm or AlgorithmConfig(), make_mesh(mesh or MeshConfig())
        self.updater = make_updater(
            model.config,
            algorithm,
            optimizer or OptimizerConfig(),
            (batch or BatchConfig(rows=num_row_shards(devices))).with_sizes(MAX_LEN),
            mesh=devices,
            dtype=dtype or str(model.params["embed"]["embedding"].dtype),
            remat=remat,
            seed=seed,
        )
        self._grammars = GrammarCompiler.shared(
            model.tokenizer, model.config.shape.vocab_size, ServeConfig()
        )
        self._shell = replace(model, params={})
        self.state = self.updater.init(jax.tree.map(np.array, model.params))
        copied = jax.tree.map(jnp.copy, self.state.params) if algorithm.has_reference else None
        self.reference: Params | None = copied

    @property
    def params(self) -> Params:
        """Trained weights, for `Engine.publish`: all of them or, with adapters, the adapters."""
        return self.state.params

    @property
    def model(self) -> LoadedModel:
        """The model with the current weights, such as for `save_hf`.

        The next `update` deletes them.
        """
        return replace(self._shell, params=self.state.weights)

    def values(
        self, trajectories: Sequence[Trajectory]
    ) -> tuple[list[tuple[CallValues, ...]] | None, Metrics]:
        """Return (the critic's values for `prepare`, metrics), or (None, {}) without a critic.

        Blocks while it computes.
        """
        return self.updater.values(self.state, trajectories)

    def update(self, sequences: Sequence[TrainingSequence]) -> Metrics:
        """Run the optimizer updates of one step and return metrics.

        If no sequence has a gradient, the weights stay the same and `train/num_updates` is 0.
        Blocks while it compiles, at first, and computes. While agents run on the same event loop,
        call it as `await asyncio.to_thread(learner.update, sequences)`.
        """
        sequences, of_masks = with_masks(sequences, self._grammars)
        self.state, metrics = self.updater.update(self.state, sequences, self.reference)
        return metrics | of_masks
