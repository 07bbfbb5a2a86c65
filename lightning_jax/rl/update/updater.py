"""Objective and optimizer, applied to the forest batches of a step."""

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lightning_jax.models.config import RematKind
from lightning_jax.models.lora import overlay
from lightning_jax.models.mesh import batch_sharding, num_row_shards
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import make_gather, param_shardings, put_on_mesh, to_host
from lightning_jax.models.transformer import Params
from lightning_jax.rl.adapters import AdapterPolicies, find_trained_policies, vmap_optimizer
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.batches.batching import make_batches, why_dropped
from lightning_jax.rl.batches.masks import mask_metrics
from lightning_jax.rl.batches.microbatches import (
    by_sequence,
    by_target,
    measure,
    place_batches,
    values_by_call,
)
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.critic import make_critic
from lightning_jax.rl.dpo import drop_broken_pairs, weigh_pairs
from lightning_jax.rl.gae import CallValues, state_sequences
from lightning_jax.rl.losses.objectives import policy_objective, supervised_objective
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.token_weights import split_minibatches
from lightning_jax.rl.update import train_step
from lightning_jax.rl.update.flops import mfu_metrics
from lightning_jax.rl.update.joining import merge_packing, merge_updates
from lightning_jax.rl.update.kl_costs import charge_later_calls, has_later_calls
from lightning_jax.rl.update.noise_scale import Halves, estimate_signal, split_halves
from lightning_jax.rl.update.routes import RouteProbe, make_probe, num_experts
from lightning_jax.rl.update.train_state import TrainState, init_state, make_optimizer
from lightning_jax.rl.update.train_step import TrainFunctions
from lightning_jax.settings import ConfigError
from lightning_jax.types import Metrics, Trajectory

NO_MOMENTS = optax.set_to_zero()
# Sequences of a minibatch, and the batches on the host that they are packed in.
Packed = tuple[list[TrainingSequence], list[Batch]]


@dataclass(frozen=True)
class Updater:
    """Stateless factory and updater of train states."""

    model: DecoderConfig
    mesh: Mesh
    optimizer: optax.GradientTransformation
    functions: TrainFunctions
    batch: BatchConfig
    skip_zero_advantage: bool
    num_epochs: int = 1
    num_minibatches: int = 1
    needs_old_logprobs: bool = False  # True if the objective distinguishes them from the sampler's
    values_per_token: bool = False  # states of the critic: tokens if True, else calls
    policies: AdapterPolicies | None = None  # policies to train; None: a single policy
    dpo_beta: float | None = None  # None: the loss is not DPO
    reward_kl: AlgorithmConfig | None = None  # settings if the KL is in the reward
    measures_noise: bool = False  # of gradients, from two halves of a step's groups
    seed: int = 0  # for the order of minibatches
    routes: RouteProbe | None = None  # None: the model has no experts

    def init(self, params: Params, *, trains: bool = True) -> TrainState:
        """Place all weights, `params`, and return a state with fresh moments.

        Takes ownership of `params`. With `trains=False` the state has neither moments nor a critic
        and must not be updated.
        """
        sharded = put_on_mesh(params, param_shardings(self.model, self.mesh), donate=True)
        return self.fresh(sharded) if trains else init_state(sharded, NO_MOMENTS)

    def fresh(self, sharded: Params) -> TrainState:
        """Return a state with fresh moments for weights that are already sharded."""
        return init_state(sharded, self.optimizer, self.functions.critic)

    def values(
        self, state: TrainState, trajectories: Sequence[Trajectory]
    ) -> tuple[list[tuple[CallValues, ...]] | None, Metrics]:
        """Return (the critic's values of the states of each call, metrics).

        Without a critic, return (None, {}). A call that does not fit a row has None. The values
        come from one forward pass over a forest of the states, in the shape of the training
        batches.
        """
        if state.critic is None:
            return None, {}
        started = time.monotonic()
        sequences = state_sequences(
            trajectories,
            per_token=self.values_per_token,
            adapters=None if self.policies is None else self.policies.indices,
        )
        batches, _ = make_batches(sequences, self.batch)
        sharded = self._place(batches)
        weights = state.weights, state.critic.head
        measured = measure(self.functions.values_fn, sharded, *weights)
        values = values_by_call(trajectories, batches, to_host(measured))
        return values, {"time/values_s": time.monotonic() - started}

    def update(
        self, state: TrainState, sequences: Sequence[TrainingSequence], reference: Params | None
    ) -> tuple[TrainState, Metrics]:
        """Run the optimizer updates of one step and return (the new state, metrics).

        Takes ownership of `state`. There are `num_epochs` passes of up to `num_minibatches`
        updates, which each pass draws anew. Sequences without a gradient are left out before the
        split. Policies that learn separately have their own minibatches, updated side by side.

        If no sequence has a gradient, the state is returned unchanged with `train/num_updates` 0
        and `train/skipped_updates` 1. Otherwise the latter counts updates with a non-finite
        gradient.
        """
        started, metrics = time.monotonic(), mask_metrics(sequences)
        if self.dpo_beta is not None:
            sequences, num_broken = drop_broken_pairs(sequences, self.batch)
            metrics["train/dropped_pairs"] = float(num_broken)
        parts = [
            (part, *make_batches(part, self.batch, skip_zero_advantage=self.skip_zero_advantage))
            for part in self._minibatches(sequences, state)
        ]
        packed = [(part, batches) for part, batches, _ in parts if batches]
        metrics |= merge_packing([stats for _, _, stats in parts])
        metrics["time/batching_s"] = time.monotonic() - started
        minibatches = [self._place(batches) for _, batches in packed]
        if self.reward_kl is not None and has_later_calls(sequences):
            assert reference is not None, "a KL needs a reference policy"
            minibatches = [
                self._charge(self.reward_kl, part, sharded, state, reference)
                for part, sharded in zip(packed, minibatches, strict=True)
            ]
        present = [self._find_trained_policies(batches) for _, batches in packed]
        metrics |= self._measure_microbatches(state, packed, minibatches)
        if not minibatches:
            return state, metrics | {"train/skipped_updates": 1.0, "train/num_updates": 0.0}
        # With a single update the old log-probabilities equal the current ones.
        if self.needs_old_logprobs and self.num_epochs * len(minibatches) > 1:
            known_old = partial(train_step.with_old_logprobs, self.functions, state.weights)
            minibatches = [known_old(batches) for batches in minibatches]
        ref_logprobs = None
        if self.dpo_beta is not None:  # one minibatch, whose loss needs no other reference values
            assert reference is not None, "DPO keeps one"
            ref_logprobs = self._logprobs(minibatches[0], overlay(state.base, reference))
            reference = None
        fixed = self._fixed(packed, minibatches)
        halves = self._halves(*packed[0])
        updates: list[Metrics] = []
        for epoch in range(self.num_epochs):
            if epoch and fixed:
                minibatches, present = self._drawn_anew(fixed, state, epoch)
            for batches, some in zip(minibatches, present, strict=True):
                measured: Metrics = {}
                if ref_logprobs is not None:
                    current = self._logprobs(batches, state.weights)
                    batches, measured = self._prefer(packed[0], batches, current, ref_logprobs)
                half = None if updates else halves
                state, learned = train_step.update(
                    self.functions,
                    state,
                    [batches[index] for index in half.order] if half else batches,
                    reference,
                    some,
                    num_first=half.num_first if half else 0,
                )
                updates.append(learned | measured)
        metrics |= _signal(updates[0], halves, sequences, len(minibatches))
        seconds = (time.monotonic() - started) / self.num_epochs
        on_host, devices = [batch for _, batches in packed for batch in batches], self.mesh.devices
        metrics |= mfu_metrics(self.model, on_host, seconds, list(devices.flat))
        return state, metrics | merge_updates(updates) | {
            "train/tokens_per_s": metrics["train/tokens_naive"] / seconds,
            "train/forest_tokens_per_s": metrics["train/tokens_forest"] / seconds,
        }

    def _measure_microbatches(
        self, state: TrainState, packed: Sequence[Packed], sharded: Sequence[Sequence[Batch]]
    ) -> Metrics:
        """Return the number of microbatches, and the routing of the first one.

        The weights are those that did the sampling.
        """
        metrics = {"train/num_batches": float(sum(map(len, sharded)))}
        if self.routes is None or not sharded:
            return metrics
        (_, (on_host, *_)), (on_mesh, *_) = packed[0], sharded[0]
        return metrics | self.routes.measure(state.weights, on_mesh, on_host)

    def _halves(
        self, sequences: Sequence[TrainingSequence], batches: Sequence[Batch]
    ) -> Halves | None:
        """Return halves of the step's first minibatch, whose gradients tell signal from noise.

        None if it has one microbatch, or if its gradient is not that of one policy's rewards.
        """
        if not self.measures_noise or self.policies is not None:
            return None
        return split_halves(batches, sequences)

    def _fixed(
        self, packed: Sequence[Packed], sharded: Sequence[Sequence[Batch]]
    ) -> list[TrainingSequence]:
        """Return the packed sequences with what was measured before the first update.

        That is `old_logprobs`, and advantages that a KL changed. Their weights are those of the
        minibatches. Empty if later passes have the same minibatch.
        """
        fixed: list[TrainingSequence] = []
        if self.num_epochs == 1 or len(sharded) == 1:
            return fixed
        for (some, batches), on_mesh in zip(packed, sharded, strict=True):
            columns = {"advantage": [batch.advantages for batch in on_mesh]}
            if on_mesh[0].old_logprobs is not None:
                columns["old_logprobs"] = [batch.old_logprobs for batch in on_mesh]
            by_column = {
                name: by_sequence(batches, to_host(values), len(some))
                for name, values in columns.items()
            }
            fixed += [
                dataclasses.replace(
                    sequence, **{name: tuple(by_column[name][index].tolist()) for name in by_column}
                )
                for index, sequence in enumerate(some)
                if by_column["advantage"][index] is not None
            ]
        return fixed

    def _drawn_anew(
        self, fixed: Sequence[TrainingSequence], state: TrainState, epoch: int
    ) -> tuple[list[list[Batch]], list[Any]]:
        """Return (sharded minibatches of another random split, their trained policies)."""
        minibatches, present = [], []
        for some in self._minibatches(fixed, state, epoch):
            batches, _ = make_batches(some, self.batch, skip_zero_advantage=False)
            sharded = self._place(batches)
            if some[0].old_logprobs:
                old = by_target(batches, [sequence.old_logprobs for sequence in some])
                sharded = self._with("old_logprobs", old, sharded)
            minibatches.append(sharded)
            present.append(self._find_trained_policies(batches))
        return minibatches, present

    def _place(self, batches: Sequence[Batch]) -> list[Batch]:
        return place_batches(batches, self.batch, self.mesh)

    def _with(self, name: str, values: Any, sharded: Sequence[Batch]) -> list[Batch]:
        """Return the sharded batches with these values of the host in one field."""
        columns = put_on_mesh(values, batch_sharding(self.mesh))
        pairs = zip(sharded, columns, strict=True)
        return [dataclasses.replace(batch, **{name: column}) for batch, column in pairs]

    def _logprobs(self, sharded: Sequence[Batch], weights: Params) -> Any:
        """Return the log-probabilities of each batch's targets, on the host."""
        return to_host(measure(self.functions.logprobs_fn, sharded, weights))

    def _prefer(
        self, packed: Packed, sharded: Sequence[Batch], logprobs: Any, ref_logprobs: Any
    ) -> tuple[list[Batch], Metrics]:
        """Return (the sharded batches with DPO advantages, metrics of the pairs)."""
        beta = self.dpo_beta
        assert beta is not None, "DPO has one"
        advantages, metrics = weigh_pairs(*packed, logprobs, ref_logprobs, beta=beta)
        return self._with("advantages", advantages, sharded), metrics

    def _charge(
        self,
        algorithm: AlgorithmConfig,
        packed: Packed,
        sharded: Sequence[Batch],
        state: TrainState,
        reference: Params,
    ) -> list[Batch]:
        """Return the sharded batches with the KL of later calls subtracted from the advantages."""
        current = self._logprobs(sharded, state.weights)
        ref_logprobs = self._logprobs(sharded, overlay(state.base, reference))
        advantages = charge_later_calls(*packed, current, ref_logprobs, algorithm)
        return self._with("advantages", advantages, sharded)

    def _minibatches(
        self, sequences: Sequence[TrainingSequence], state: TrainState, epoch: int = 0
    ) -> list[list[TrainingSequence]]:
        """Return the sequences of each update of a pass.

        The order depends on the seed, the number of updates so far and the pass. Sequences that no
        row takes go to the first part, so that they are counted. The first pass makes the weights
        those of minibatches.
        """
        if self.num_minibatches == 1:
            return [list(sequences)]
        trained, left_out = [], []
        for sequence in sequences:
            skips = self.skip_zero_advantage and not epoch
            is_left_out = why_dropped(sequence, self.batch, skips) is not None
            (left_out if is_left_out else trained).append(sequence)
        seed = f"{self.seed} {int(to_host(state.step))}" + f" {epoch}" * (epoch > 0)
        by_policy = [trained]
        if self.policies is not None and self.policies.separate:
            by_policy = [
                [sequence for sequence in trained if sequence.adapter == index]
                for index in range(self.policies.number)
            ]
        parts = [
            split_minibatches(part, self.num_minibatches, seed, grows=not epoch)
            for part in by_policy
        ]
        first, *others = [
            list(itertools.chain(*some)) for some in itertools.zip_longest(*parts, fillvalue=())
        ]
        return [first + left_out, *others]

    def _find_trained_policies(self, batches: Sequence[Batch]) -> Any:
        return None if self.policies is None else find_trained_policies(self.policies, batches)


def make_updater(  # noqa: PLR0913  (the arguments are independent)
    model: DecoderConfig,
    algorithm: AlgorithmConfig | None,
    optimizer: OptimizerConfig,
    batch: BatchConfig,
    *,
    mesh: Mesh,
    dtype: str,
    remat: RematKind = "none",
    policies: AdapterPolicies | None = None,
    seed: int = 0,
) -> Updater:
    """Return the updater for an algorithm, or for supervised learning if `algorithm` is None.

    It computes in `dtype` on the devices of `mesh`, and its backward pass recomputes activations as
    `remat` says. Raises ConfigError if the mesh does not divide `batch.rows`.
    """
    if batch.rows % num_row_shards(mesh):
        raise ConfigError.mismatch(
            "batch.rows",
            f"batch.rows is {batch.rows}; must be a multiple of {num_row_shards(mesh)}, the "
            "number of devices that share a batch (mesh.data * mesh.fsdp * mesh.expert)",
        )
    transformation = make_optimizer(optimizer)
    if policies is not None and policies.separate:
        transformation = vmap_optimizer(transformation, policies.number)
    functions = partial(
        train_step.make_train_functions,
        model.with_execution(scans_layers=mesh.devices.flat[0].platform == "cpu"),
        transformation,
        head_chunk=batch.chunk_of(model.shape.vocab_size),
        remat=remat,
        compute_dtype=jnp.dtype(dtype),
        gather=make_gather(model, mesh),
        policies=policies,
    )
    routes = None
    if num_experts(model):
        platform, gather = mesh.devices.flat[0].platform, make_gather(model, mesh)
        routes = make_probe(model, platform, compute_dtype=jnp.dtype(dtype), gather=gather)
    updater = partial(
        Updater, model, mesh, transformation, batch=batch, policies=policies, routes=routes
    )
    if algorithm is None:
        return updater(functions(supervised_objective()), skip_zero_advantage=True)
    return updater(
        functions(
            policy_objective(algorithm),
            entropy_gradient=algorithm.entropy_coef > 0,
            critic=make_critic(algorithm, policies),
        ),
        skip_zero_advantage=algorithm.skip_zero_advantage and algorithm.has_only_policy_gradient,
        num_epochs=algorithm.num_epochs,
        num_minibatches=algorithm.num_minibatches,
        needs_old_logprobs=algorithm.needs_old_logprobs,
        values_per_token=algorithm.credit == "learned_token",
        reward_kl=algorithm if algorithm.kl_coef > 0 and algorithm.kl_in == "reward" else None,
        seed=seed,
        dpo_beta=algorithm.dpo_beta if algorithm.loss == "dpo" else None,
        measures_noise=algorithm.loss != "dpo",
    )


def _signal(
    first: Metrics, halves: Halves | None, sequences: Sequence[TrainingSequence], num_parts: int
) -> Metrics:
    """Return estimates of a step's signal and noise from the metrics of its first update.

    Removes its norm over half of the groups.
    """
    norm_of_half = first.pop("first_grad_norm", None)
    if halves is None or norm_of_half is None:
        return {}
    norm, num_groups = first["train/grad_norm"], len({item.group for item in sequences})
    signal, noise = estimate_signal(norm_of_half, norm, halves, num_groups / num_parts)
    if not math.isfinite(signal):
        return {}
    return {
        "train/grad_signal": signal,
        "train/grad_noise": noise,
        "train/grad_square": norm**2,
    }
