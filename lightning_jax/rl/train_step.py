"""The optimizer step: gradients of microbatches added up on the device, then one update."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from lightning_jax.config import AlgorithmConfig
from lightning_jax.models.lora import frozen_part, overlay, trained_part
from lightning_jax.models.transformer import DecoderConfig, Gather, Params
from lightning_jax.rl import losses
from lightning_jax.rl.critic import (
    Critic,
    CriticState,
    ValueHead,
    init_critic,
    scale_gradient,
    state_values,
    value_loss,
)
from lightning_jax.rl.logprobs import (
    head_params,
    node_logprobs,
    read_nodes,
    response_logprobs,
)
from lightning_jax.rl.losses import Metrics
from lightning_jax.rl.several import Several, choose, kept_updates
from lightning_jax.types import Batch, Leaf, StateBatch

BUNDLE = 8  # a program takes a multiple of this many microbatches, some of which may be padding
# (logprobs, entropy, batch, ref_logprobs or None) -> (loss, metric sums)
Objective = Callable[..., tuple[Float[Array, ""], Metrics]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What an optimizer step reads and replaces; float32, whatever the model computes in.

    Where the model has adapters (`models/lora.py`) `params` are those alone. The other weights are
    `base`, in the dtype that they were loaded in; no update changes or donates them.
    """

    step: Leaf  # int32 scalar, optimizer updates made
    params: Any
    opt_state: Any
    critic: Any = None  # CriticState, None without a critic
    base: Any = None  # None: all weights are trained

    @property
    def policy(self) -> Params:
        """All weights that the policy computes with."""
        return overlay(self.base, self.params)


@dataclass(frozen=True)
class TrainFunctions:
    """The jitted halves of a step.

    `grads_fn(params, grads, metrics, bundle, count, ref_params or None, value_head or None, base
    or None) -> (grads, metrics)` adds the first `count` microbatches of a bundle, one after the
    other, to the accumulators, which it takes over (donated); `grads` is the pair of those of the
    params and of the value head. `apply_fn(state without base, grads, which of several policies
    take part) -> (state, metrics)` updates; it takes over the state. `logprobs_fn(bundle, count,
    policy)` measures the targets, a list of [B, R] in nats, and `values_fn(bundle, count, policy,
    value_head)` the states that they were chosen in; `policy` are all weights. `measure` calls
    them.
    """

    grads_fn: Callable[..., tuple[Any, Metrics]]
    apply_fn: Callable[..., tuple[TrainState, Metrics]]
    logprobs_fn: Callable[..., list[Float[Array, "B R"]]]
    values_fn: Callable[..., list[Float[Array, "B R"]]]
    objective: Objective
    critic: Critic | None = None


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


def init_state(
    params: Params, optimizer: optax.GradientTransformation, critic: Critic | None = None
) -> TrainState:
    """A state at step 0; the moments lie where the weights lie, scalars and the critic on all
    their devices.

    The first update donates what it trains of `params`: whoever else needs it keeps a copy.
    """
    norms, base = params["final_norm"], frozen_part(params)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained_part(params))
    scalars = functools.partial(_place_scalar, params)
    # The counts of several adapters' optimizers are a list; nothing else of adapters is.
    small = functools.partial(_place_scalar, params, most_axes=0 if base is None else 1)
    opt_state = jax.tree.map(small, optimizer.init(params))
    made = None
    if critic is not None:
        whole = functools.partial(_replicate, params)
        made = jax.tree.map(whole, init_critic(critic, norms["scale"].shape[0]))
    return TrainState(scalars(jnp.zeros((), jnp.int32)), params, opt_state, made, base)


def make_train_functions(  # noqa: PLR0913  (each is a choice of its own)
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    head_chunk: int,
    remat: bool = False,
    compute_dtype: Any = jnp.float32,
    entropy_gradient: bool = False,
    critic: Critic | None = None,
    gather: Gather | None = None,
    several: Several | None = None,
) -> TrainFunctions:
    """Jitted functions for one objective; each compiles once per batch shape and sharding.

    `compute_dtype` is that of activations and of the weights as the forward pass reads them;
    gradients and weights stay float32. An objective with an entropy bonus needs `entropy_gradient`.
    With a critic a batch needs its `states`. Weights that are split need `sharding.make_gather`. Of
    `several` policies the optimizers are for that many, see `several.separately`.
    """
    read = functools.partial(read_nodes, config=config, gather=gather)
    of_targets = functools.partial(
        response_logprobs, config=config, remat=remat, head_chunk=head_chunk, gather=gather
    )

    def loss_fn(
        trained: tuple[Params, ValueHead | None],
        batch: Batch,
        ref_params: Params | None,
        base: Params | None,
    ) -> Any:
        params, head = _cast(overlay(base, trained[0]), compute_dtype), trained[1]
        nodes = read(params, batch=batch, remat=remat)
        logprobs, entropy = node_logprobs(
            head_params(params, gather),
            config,
            batch,
            nodes,
            head_chunk=head_chunk,
            entropy_gradient=entropy_gradient,
        )
        ref_logprobs = None
        if ref_params is not None:
            reference = _cast(overlay(base, ref_params), compute_dtype)
            ref_logprobs, _ = of_targets(reference, batch=batch)
        loss, sums = objective(logprobs, entropy, batch, ref_logprobs)
        if critic is None or head is None:
            return loss, sums
        nodes = scale_gradient(nodes, critic.trunk_coef)
        values = state_values(head, nodes, batch.states.nodes, batch.adapters)
        error, more = value_loss(values, batch.states, clip=critic.clip)
        return loss + error, sums | more

    def add_grads(
        params: Params,
        grads: Any,
        metrics: Metrics,
        bundle: tuple[Batch, ...],
        count: Int32[Array, ""],
        ref_params: Params | None,
        head: ValueHead | None = None,
        base: Params | None = None,
    ) -> tuple[Any, Metrics]:
        def add_one(added: tuple[Any, Metrics], batch: Batch, _: Any) -> tuple[Any, Metrics]:
            grad_fn = jax.grad(loss_fn, has_aux=True)
            new, sums = grad_fn((params, head), batch, ref_params, base)
            return jax.tree.map(jnp.add, added[0], new), losses.add_metrics(added[1], sums)

        return _for_each(bundle, count, add_one, (grads, metrics))

    def apply(state: TrainState, grads: Any, present: Any = None) -> tuple[TrainState, Metrics]:
        return _apply(optimizer, critic, state, grads, several, present)

    def logprobs(batch: Batch, params: Params) -> Float[Array, "B R"]:
        return of_targets(_cast(params, compute_dtype), batch=batch)[0]

    def values(batch: Batch, params: Params, head: ValueHead) -> Float[Array, "B R"]:
        nodes = read(_cast(params, compute_dtype), batch=batch, remat=False)
        found = state_values(head, nodes, batch.target_nodes, batch.adapters)
        return jnp.where(batch.target_mask, found, 0.0)

    return TrainFunctions(
        grads_fn=jax.jit(add_grads, donate_argnums=(1, 2)),
        apply_fn=jax.jit(apply, donate_argnums=0),
        logprobs_fn=jax.jit(_of_each(logprobs)),
        values_fn=jax.jit(_of_each(values)),
        objective=objective,
        critic=critic,
    )


def update(
    functions: TrainFunctions,
    state: TrainState,
    batches: Sequence[Batch],
    ref_params: Params | None = None,
    present: Bool[np.ndarray, " N"] | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """One optimizer update over all microbatches, and its metrics, fetched in one transfer.

    Takes over `state` but for its base, which completes `ref_params`, too. A gradient that is not
    finite changes nothing but the step count and is reported as train/skipped_updates = 1. Of
    several policies those that are not `present` stay as they are. Raises ValueError without a
    microbatch.
    """
    if not batches:
        raise ValueError("update got 0 microbatches; expected at least 1, skip the step instead.")
    head = None if state.critic is None else state.critic.head
    grads, metrics = zero_accumulators(
        functions, state.params, with_reference=ref_params is not None, head=head
    )
    grads, metrics = functions.grads_fn(
        state.params, grads, metrics, *bundle(batches), ref_params, head, state.base
    )
    chosen = () if present is None else (present,)
    new, applied = functions.apply_fn(dataclasses.replace(state, base=None), grads, *chosen)
    sums, applied = jax.device_get((metrics, applied))
    means = losses.mean_metrics({name: float(value) for name, value in sums.items()})
    state = dataclasses.replace(new, base=state.base)
    return state, means | {name: float(value) for name, value in applied.items()}


def bundle(batches: Sequence[Batch]) -> tuple[tuple[Batch, ...], Int32[np.ndarray, ""]]:
    """(microbatches in a number that few programs are compiled for, how many of them count)."""
    padding = [batches[-1]] * (-len(batches) % BUNDLE)
    return (*batches, *padding), np.asarray(len(batches), np.int32)


def with_old_logprobs(
    functions: TrainFunctions, params: Params, batches: Sequence[Batch]
) -> list[Batch]:
    """The batches with the log-probs of these weights as those before the step's first update."""
    measured = measure(functions.logprobs_fn, batches, params)
    return [
        dataclasses.replace(batch, old_logprobs=logprobs)
        for batch, logprobs in zip(batches, measured, strict=True)
    ]


def measure(
    function: Callable[..., list[Float[Array, "B R"]]], batches: Sequence[Batch], *weights: Any
) -> list[Float[Array, "B R"]]:
    """What `logprobs_fn` or `values_fn` makes of each microbatch; there may be none."""
    if not batches:
        return []
    return function(*bundle(batches), *weights)[: len(batches)]


def zero_accumulators(
    functions: TrainFunctions,
    params: Params,
    *,
    with_reference: bool = False,
    head: ValueHead | None = None,
) -> tuple[Any, Metrics]:
    """Gradients of params and value head, placed like them, and metric sums before the first
    microbatch.
    """
    names = metric_names(
        functions.objective, functions.critic if head is not None else None, with_reference
    )
    return (
        jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), (params, head)),
        {name: _place_scalar(params, jnp.zeros((), jnp.float32)) for name in names},
    )


def _apply(
    optimizer: optax.GradientTransformation,
    critic: Critic | None,
    state: TrainState,
    grads: tuple[Any, Any],
    several: Several | None = None,
    present: Bool[Array, " N"] | None = None,
) -> tuple[TrainState, Metrics]:
    """`grads` are those of the weights and of the value head."""
    grad_norm, value_grad_norm = map(optax.tree.norm, grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(value_grad_norm)
    updates, opt_state = optimizer.update(grads[0], state.opt_state, state.params)
    made = state.critic
    metrics = {
        "train/grad_norm": grad_norm,
        "train/skipped_updates": 1.0 - finite.astype(jnp.float32),
    }
    if critic is not None and made is not None:
        moved, moments = critic.optimizer.update(grads[1], made.opt_state, made.head)
        made = CriticState(optax.apply_updates(made.head, moved), moments)
        metrics["train/value_grad_norm"] = value_grad_norm
    new = optax.apply_updates(state.params, updates), opt_state, made
    old = state.params, state.opt_state, state.critic
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
    if several is None or present is None:
        return TrainState(state.step + 1, *keep(new, old)), metrics
    which, of_each = kept_updates(several, grads, present)
    params, opt_state = choose(which, new[:2], old[:2])
    is_stack = critic is not None and critic.num_heads is not None
    head = choose(which, new[2], old[2]) if is_stack else keep(new[2], old[2])
    return TrainState(state.step + 1, params, opt_state, head), metrics | of_each


def _for_each(
    bundle: tuple[Batch, ...],
    count: Int32[Array, ""],
    body: Callable[[Any, Batch, Int32[Array, ""]], Any],
    start: Any,
) -> Any:
    """`body(carry, microbatch, its index)` for the first `count` microbatches, one after the other.

    One program for all: on a CPU each run gets gigabytes of fresh memory, page by page.
    """
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *bundle)

    def one(index: Int32[Array, ""], carry: Any) -> Any:
        return body(carry, jax.tree.map(lambda leaf: leaf[index], stacked), index)

    return jax.lax.fori_loop(0, count, one, start)


def _of_each(function: Callable[..., Float[Array, "B R"]]) -> Callable[..., list[Any]]:
    """`function(microbatch, *weights)` over a bundle; zeros for its padding."""

    def run(bundle: tuple[Batch, ...], count: Int32[Array, ""], *weights: Any) -> list[Any]:
        def write(found: Any, batch: Batch, index: Any) -> Any:
            new = function(batch, *weights)
            return jax.lax.dynamic_update_index_in_dim(found, new, index, axis=0)

        shape = (len(bundle), *bundle[0].target_ids.shape)
        return list(_for_each(bundle, count, write, jnp.zeros(shape, jnp.float32)))

    return run


def _cast(params: Params, dtype: Any) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def metric_names(objective: Objective, critic: Critic | None, with_reference: bool) -> list[str]:
    """What objective and critic report, found on shapes alone and without the model."""
    floats, ints = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.float32, jnp.int32))
    mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
    batch = Batch(ints, ints, ints, ints, ints, mask, ints, floats, floats, floats)
    reference = floats if with_reference else None
    reported = jax.eval_shape(objective, floats, floats, batch, reference)[1]
    if critic is not None:
        states = StateBatch(ints, floats, floats, floats)
        error = functools.partial(value_loss, clip=critic.clip)
        reported |= jax.eval_shape(error, floats, states)[1]
    return sorted(reported)


def _place_scalar(params: Params, value: Any, *, most_axes: int = 0) -> Any:
    """A scalar on every device of the weights, where jit leaves it: else step two recompiles.

    Arrays with more axes than `most_axes` come back as they are.
    """
    return _replicate(params, value) if jnp.ndim(value) <= most_axes else value


def _replicate(params: Params, value: Any) -> Any:
    """An array whole on every device of the weights."""
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        return jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return value
