"""The optimizer step: gradients of microbatches added up on the device, then one update."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from lightning_jax.config import AlgorithmConfig
from lightning_jax.models.transformer import DecoderConfig, forward, unembed
from lightning_jax.rl import losses
from lightning_jax.rl.losses import Metrics
from lightning_jax.types import Batch, Leaf

Params = dict[str, Any]
# (logprobs, entropy, batch, ref_logprobs or None) -> (loss, metric sums)
Objective = Callable[..., tuple[Float[Array, ""], Metrics]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What an optimizer step reads and replaces; float32, whatever the model computes in."""

    step: Leaf  # int32 scalar, optimizer updates made
    params: Any
    opt_state: Any


@dataclass(frozen=True)
class TrainFunctions:
    """The jitted halves of a step.

    `grads_fn(params, grads, metrics, batch, ref_params or None) -> (grads, metrics)` adds one
    microbatch to the accumulators, which it takes over (donated). `apply_fn(state, grads) ->
    (state, metrics)` updates; it takes over the state. `logprobs_fn(params, batch)` measures the
    targets, [B, R] in nats.
    """

    grads_fn: Callable[..., tuple[Any, Metrics]]
    apply_fn: Callable[[TrainState, Any], tuple[TrainState, Metrics]]
    logprobs_fn: Callable[[Params, Batch], Float[Array, "B R"]]
    objective: Objective


def policy_objective(algorithm: AlgorithmConfig | None = None, **changes: Any) -> Objective:
    """`losses.policy_loss` with these settings, of which `changes` replaces some."""
    settings = dataclasses.replace(algorithm or AlgorithmConfig(), **changes)

    def objective(logprobs: Any, entropy: Any, batch: Batch, ref_logprobs: Any) -> Any:
        return losses.policy_loss(
            logprobs, batch, settings, ref_logprobs=ref_logprobs, entropy=entropy
        )

    return objective


def supervised_objective() -> Objective:
    """`losses.supervised_loss`."""

    def objective(logprobs: Any, entropy: Any, batch: Batch, ref_logprobs: Any) -> Any:
        return losses.supervised_loss(logprobs, batch, entropy=entropy)

    return objective


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A state at step 0; the moments lie where the weights lie, scalars on all their devices.

    The first update donates `params`: whoever else needs them keeps a copy.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    scalars = functools.partial(_place_scalar, params)
    opt_state = jax.tree.map(scalars, optimizer.init(params))
    return TrainState(scalars(jnp.zeros((), jnp.int32)), params, opt_state)


def response_logprobs(
    params: Params,
    config: DecoderConfig,
    batch: Batch,
    *,
    remat: bool,
    head_chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """(log-probability of each target, entropy of its distribution), in nats.

    The entropy has a gradient only with `entropy_gradient`, because it costs one. Both are 0 where
    masked. The LM head sees only nodes that predict a target, `head_chunk` of a row at a time, and
    skips chunks that hold only padding; logits of [R, V] never exist at once, not in the backward
    pass either.
    """
    nodes, _ = forward(params, config, batch.tokens, batch.positions, ends=batch.ends, remat=remat)
    hidden = jnp.take_along_axis(
        nodes, batch.target_nodes[:, :, None], axis=1, mode="promise_in_bounds"
    )

    # Under the checkpoint the branches keep nothing for the backward pass but their inputs.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def chunk_logprobs(chunk: Any) -> Any:
        def head(hidden: Any, ids: Any, mask: Any) -> Any:
            logits = unembed(params, config, hidden)
            return _token_logprobs(logits, ids, mask, entropy_gradient=entropy_gradient)

        def nothing(hidden: Any, ids: Any, mask: Any) -> Any:
            return jnp.zeros(mask.shape, jnp.float32), jnp.zeros(mask.shape, jnp.float32)

        return jax.lax.cond(chunk[2].any(), head, nothing, *chunk)

    parts = (hidden, batch.target_ids, batch.target_mask)
    chunks = jax.tree.map(lambda part: _split(part, head_chunk), parts)
    logprobs, entropy = jax.lax.map(chunk_logprobs, chunks)
    return _join(logprobs), _join(entropy)


def make_train_functions(
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    head_chunk: int,
    remat: bool = False,
    compute_dtype: Any = jnp.float32,
    entropy_gradient: bool = False,
) -> TrainFunctions:
    """Jitted functions for one objective; each compiles once per batch shape and sharding.

    `compute_dtype` is that of activations and of the weights as the forward pass reads them;
    gradients and weights stay float32. An objective with an entropy bonus needs `entropy_gradient`.
    """
    measure = functools.partial(
        response_logprobs, config=config, remat=remat, head_chunk=head_chunk
    )

    def loss_fn(params: Params, batch: Batch, ref_params: Params | None) -> Any:
        logprobs, entropy = measure(
            _cast(params, compute_dtype), batch=batch, entropy_gradient=entropy_gradient
        )
        ref_logprobs = None
        if ref_params is not None:
            ref_logprobs, _ = measure(_cast(ref_params, compute_dtype), batch=batch)
        return objective(logprobs, entropy, batch, ref_logprobs)

    def add_grads(
        params: Params, grads: Any, metrics: Metrics, batch: Batch, ref_params: Params | None
    ) -> tuple[Any, Metrics]:
        new, sums = jax.grad(loss_fn, has_aux=True)(params, batch, ref_params)
        return jax.tree.map(jnp.add, grads, new), losses.add_metrics(metrics, sums)

    def apply(state: TrainState, grads: Any) -> tuple[TrainState, Metrics]:
        return _apply(optimizer, state, grads)

    def logprobs(params: Params, batch: Batch) -> Float[Array, "B R"]:
        return measure(_cast(params, compute_dtype), batch=batch)[0]

    return TrainFunctions(
        grads_fn=jax.jit(add_grads, donate_argnums=(1, 2)),
        apply_fn=jax.jit(apply, donate_argnums=0),
        logprobs_fn=jax.jit(logprobs),
        objective=objective,
    )


def update(
    functions: TrainFunctions,
    state: TrainState,
    batches: Sequence[Batch],
    ref_params: Params | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """One optimizer update over all microbatches, and its metrics, fetched in one transfer.

    Takes over `state`. A gradient that is not finite changes nothing but the step count and is
    reported as train/skipped_updates = 1. Raises ValueError without a microbatch.
    """
    if not batches:
        raise ValueError("update got 0 microbatches; expected at least 1, skip the step instead.")
    with_reference = ref_params is not None
    grads, metrics = zero_accumulators(functions, state.params, with_reference=with_reference)
    for batch in batches:
        grads, metrics = functions.grads_fn(state.params, grads, metrics, batch, ref_params)
    state, applied = functions.apply_fn(state, grads)
    sums, applied = jax.device_get((metrics, applied))
    means = losses.mean_metrics({name: float(value) for name, value in sums.items()})
    return state, means | {name: float(value) for name, value in applied.items()}


def with_old_logprobs(
    functions: TrainFunctions, params: Params, batches: Sequence[Batch]
) -> list[Batch]:
    """The batches with the log-probs of these weights as those before the step's first update."""
    return [
        dataclasses.replace(batch, old_logprobs=functions.logprobs_fn(params, batch))
        for batch in batches
    ]


def zero_accumulators(
    functions: TrainFunctions, params: Params, *, with_reference: bool = False
) -> tuple[Any, Metrics]:
    """Gradients, placed like the weights, and metric sums before the first microbatch."""
    names = _metric_names(functions.objective, with_reference=with_reference)
    return (
        jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), params),
        {name: _place_scalar(params, jnp.zeros((), jnp.float32)) for name in names},
    )


def _apply(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Any
) -> tuple[TrainState, Metrics]:
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    return TrainState(state.step + 1, params, opt_state), {
        "train/grad_norm": grad_norm,
        "train/skipped_updates": 1.0 - finite.astype(jnp.float32),
    }


def _token_logprobs(
    logits: Float[Array, "B R V"],
    ids: Int[Array, "B R"],
    mask: Bool[Array, "B R"],
    *,
    entropy_gradient: bool,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    total = jax.nn.logsumexp(logits, axis=-1)
    # A comparison instead of a gather: it fuses with the sums, and splits over a sharded
    # vocabulary.
    chosen = jnp.arange(logits.shape[-1])[None, None, :] == ids[:, :, None]
    logprobs = jnp.where(chosen, logits, 0.0).sum(axis=-1) - total
    if not entropy_gradient:
        logits, total = jax.lax.stop_gradient((logits, total))
    entropy = total - (jnp.exp(logits - total[:, :, None]) * logits).sum(axis=-1)
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def _split(x: Array, size: int) -> Array:
    """[B, N * size, ...] as [N, B, size, ...]."""
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _join(x: Float[Array, "N B R"]) -> Float[Array, "B T"]:
    """The inverse of `_split`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _metric_names(objective: Objective, *, with_reference: bool) -> list[str]:
    """What the objective reports, found on shapes alone and without the model."""
    floats, ints = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.float32, jnp.int32))
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    batch = Batch(ints, ints, ints, ints, ints, mask, ints, floats, floats, floats)
    reference = floats if with_reference else None
    return sorted(jax.eval_shape(objective, floats, floats, batch, reference)[1])


def _place_scalar(params: Params, value: Any) -> Any:
    """A scalar on every device of the weights, where jit leaves it: else step two recompiles.

    Arrays with axes come back as they are.
    """
    sharding = jax.tree.leaves(params)[0].sharding
    if jnp.ndim(value) == 0 and isinstance(sharding, NamedSharding):
        return jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return value
