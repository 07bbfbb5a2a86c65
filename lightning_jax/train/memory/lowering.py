"""Programs of an update, lowered from shapes alone. Nothing is allocated or run."""

import contextlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lightning_jax.models.lora import frozen_part, pick, trained_part
from lightning_jax.models.mesh import batch_sharding
from lightning_jax.models.sharding import param_shardings
from lightning_jax.models.transformer import param_shapes
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.microbatches import bundles, cut_pairs
from lightning_jax.rl.config import DistillConfig
from lightning_jax.rl.losses.objectives import metric_names
from lightning_jax.rl.sequence import LikelyTokens, TeacherScores, TrainingSequence
from lightning_jax.rl.update.train_state import TrainState
from lightning_jax.rl.update.updater import Updater


def lower_step(
    updater: Updater,
    dtype: str,
    distill: DistillConfig,
    *,
    has_kl: bool = False,
    num_pairs: int | None = None,
) -> tuple[Any, Any]:
    """Return the two lowered programs of a step, without a value head.

    These are the gradients of a bundle of microbatches, and the optimizer update. Frozen weights
    have `dtype`. With `has_kl` the loss reads a reference. `num_pairs` is one of `pair_sizes`, by
    default the largest.
    """
    functions: Any = updater.functions
    whole = NamedSharding(updater.mesh, PartitionSpec())
    state = _abstract_state(updater, dtype)
    params, policies = state.params, updater.policies
    smallest = _smallest_sequence(None if policies is None else 0, distill)
    (batch,), _ = make_batches([smallest], updater.batch)
    if num_pairs is not None:
        batch = cut_pairs(batch, num_pairs)
    batch = jax.tree.map(lambda leaf: _abstract(leaf, batch_sharding(updater.mesh)), batch)
    reference = params if has_kl else None
    ((bundle, count),) = bundles([batch])
    has_top = batch.teacher is not None and batch.teacher.top is not None
    names = metric_names(functions.objective, None, reference is not None, has_top)
    sums = {name: _scalar(jnp.float32, whole) for name in names}
    grads = (params, None)
    present = () if policies is None else (np.ones(policies.number, bool),)
    device = updater.mesh.devices.flat[0]
    is_here = device in jax.devices()  # then the same context as the run's, or it compiles again
    with contextlib.nullcontext() if is_here else jax.default_device(device):  # for attention.py
        return (
            functions.grads_fn.lower(
                params, grads, sums, bundle, count, reference, None, state.base
            ),
            functions.apply_fn.lower(replace(state, base=None), grads, *present),
        )


def _abstract_state(updater: Updater, dtype: str) -> TrainState:
    """Return the updater's train state as shapes and shardings; frozen weights have `dtype`."""
    whole = NamedSharding(updater.mesh, PartitionSpec())
    everything = param_shardings(updater.model, updater.mesh)
    shapes = param_shapes(updater.model)
    shardings, base = trained_part(everything), frozen_part(shapes)
    params = jax.tree.map(_abstract, trained_part(shapes), shardings)
    if base is not None:
        base = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, jnp.dtype(dtype), sharding=sharding
            ),
            base,
            pick(everything, base),
        )
    moments = optax.tree.map_params(
        updater.optimizer,
        _abstract,
        jax.eval_shape(updater.optimizer.init, params),
        shardings,
        transform_non_params=lambda leaf: _abstract(leaf, whole),
    )
    return TrainState(_scalar(jnp.int32, whole), params, moments, base=base)


def _smallest_sequence(adapter: int | None, distill: DistillConfig) -> TrainingSequence:
    scores = None
    if distill.has_teacher:
        shape = (1, distill.num_top)
        top = LikelyTokens(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
        scores = TeacherScores((0.0,), top if distill.num_top else None)
    return TrainingSequence(
        *((1,), (1,), (0.0,), 1.0, 1.0),
        adapter=adapter,
        teacher_scores=scores,
        teacher_kl=distill.kl,
    )


def _abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _scalar(dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype, sharding=sharding)
