"""Forward pass of one microbatch: its loss, its targets' log-probs and its states' values."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lightning_jax.models.config import RematKind
from lightning_jax.models.lora import overlay
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Gather, Params
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.critic import Critic, ValueHead, scale_gradient, state_values, value_loss
from lightning_jax.rl.losses.objectives import Objective
from lightning_jax.rl.losses.policy import Metrics
from lightning_jax.rl.update.logprobs import (
    Head,
    TargetScores,
    head_params,
    read_nodes,
    response_logprobs,
    score_nodes,
)


@dataclass(frozen=True)
class ForwardPass:
    """Forward pass with its settings. Its methods are pure and run inside the programs of a step.

    Weights are first cast to `compute_dtype`. With `entropy_gradient` the entropy has a gradient.
    """

    config: DecoderConfig
    head_chunk: int
    remat: RematKind
    compute_dtype: Any
    entropy_gradient: bool
    gather: Gather | None  # for sharded weights
    num_ids: int | None = None  # of the policy, if a teacher's vocabulary has more

    def loss(
        self,
        objective: Objective,
        critic: Critic | None,
        trained: tuple[Params, ValueHead | None],
        batch: Batch,
        ref_params: Params | None,
        base: Params | None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Return (loss, metric sums). `base` completes the trained params and `ref_params`."""
        params, head = self._cast(overlay(base, trained[0])), trained[1]
        nodes = self._nodes(params, batch, remat=self.remat)
        scores = self._scores(params, batch, nodes, Head(self.config, self.entropy_gradient))
        ref_logprobs = None
        if ref_params is not None:
            ref_logprobs = self.logprobs(batch, overlay(base, ref_params))
        loss, sums = objective(
            scores.logprobs, scores.entropy, batch, ref_logprobs, scores.teacher_kl
        )
        if critic is None or head is None:
            return loss, sums
        nodes = scale_gradient(nodes, critic.trunk_coef)
        values = state_values(head, nodes, batch.states.nodes, batch.adapters)
        error, more = value_loss(values, batch.states, clip=critic.clip)
        return loss + error, sums | more

    def logprobs(self, batch: Batch, params: Params) -> Float[Array, "B R"]:
        """Return the log-probability of each target, in nats, 0 where masked."""
        return response_logprobs(
            self._cast(params),
            self.config,
            batch,
            remat=self.remat,
            head_chunk=self.head_chunk,
            gather=self.gather,
        )[0]

    def scores(self, batch: Batch, params: Params, top_k: int) -> TargetScores:
        """Return the log-probability of each target, and the `top_k` likeliest tokens at its place.

        Only ids below `num_ids` are among the likeliest. The entropy is left out.
        """
        params = self._cast(params)
        nodes = self._nodes(params, batch, remat=self.remat)
        head = Head(self.config, top_k=top_k, num_ids=self.num_ids)
        return self._scores(params, batch, nodes, head)._replace(entropy=None)

    def values(self, batch: Batch, params: Params, head: ValueHead) -> Float[Array, "B R"]:
        """Return the value of the state in which each target was chosen, 0 where masked."""
        nodes = self._nodes(self._cast(params), batch, remat="none")
        values = state_values(head, nodes, batch.target_nodes, batch.adapters)
        return jnp.where(batch.target_mask, values, 0.0)

    def _scores(self, params: Params, batch: Batch, nodes: Any, head: Head) -> TargetScores:
        read = head_params(params, self.gather)
        return score_nodes(read, batch, nodes, head, head_chunk=self.head_chunk)

    def _nodes(self, params: Params, batch: Batch, *, remat: RematKind) -> Float[Array, "B T E"]:
        return read_nodes(params, self.config, batch, remat=remat, gather=self.gather)

    def _cast(self, params: Params) -> Params:
        return jax.tree.map(lambda leaf: leaf.astype(self.compute_dtype), params)
