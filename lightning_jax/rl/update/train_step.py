"""Optimizer step: gradients of microbatches are summed on the device, followed by one update."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int32

from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import RematKind
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Gather, Params
from lightning_jax.rl.adapters import AdapterPolicies, find_valid_updates, select
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.batches.microbatches import bundles, fold_bundle, map_bundle, measure
from lightning_jax.rl.critic import Critic, CriticState, ValueHead
from lightning_jax.rl.losses import policy
from lightning_jax.rl.losses.objectives import Objective, metric_names
from lightning_jax.rl.losses.policy import Metrics
from lightning_jax.rl.update.forward_pass import ForwardPass
from lightning_jax.rl.update.logprobs import TargetScores
from lightning_jax.rl.update.train_state import TrainState, place_scalar


@dataclass(frozen=True)
class TrainFunctions:
    """Jitted parts of a step.

    `grads_fn(params, grads, metrics, bundle, count, ref_params or None, value_head or None, base
    or None) -> (grads, metrics)` adds the first `count` microbatches of a bundle, one after
    another, to the donated accumulators. `grads` is the pair of gradients of the params and of the
    value head. `apply_fn(state without base, grads, mask of policies) -> (state, metrics)`
    applies the update and donates the state. `norm_fn(grads)` is the norm of those of the params.

    `logprobs_fn(bundle, count, policy)` measures the targets, a list of [B, R] in nats.
    `scores_fn(bundle, count, policy, top_k)` does the same for a teacher, with the likeliest tokens
    at each target, a list of `TargetScores`. `values_fn(bundle, count, policy, value_head)`
    measures the states in which they were chosen. `policy` is all weights. `measure` calls these
    three. All functions take bundles of one size (`microbatches.py`), so each compiles once per
    batch shape.
    """

    grads_fn: Callable[..., tuple[Any, Metrics]]
    apply_fn: Callable[..., tuple[TrainState, Metrics]]
    logprobs_fn: Callable[..., list[Float[Array, "B R"]]]
    scores_fn: Callable[..., list[TargetScores]]
    values_fn: Callable[..., list[Float[Array, "B R"]]]
    norm_fn: Callable[[Any], Float[Array, ""]]
    objective: Objective
    critic: Critic | None = None


def make_train_functions(  # noqa: PLR0913  (the arguments are independent)
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    *,
    head_chunk: int,
    remat: RematKind = "none",
    compute_dtype: Any = jnp.float32,
    entropy_gradient: bool = False,
    critic: Critic | None = None,
    gather: Gather | None = None,
    policies: AdapterPolicies | None = None,
) -> TrainFunctions:
    """Build the jitted functions for one objective.

    Each compiles once per batch shape and sharding. `compute_dtype` is the dtype of activations and
    of weights in the forward pass. Gradients and stored weights stay float32. An objective with an
    entropy bonus needs `entropy_gradient`. With a critic a batch needs `states`. Sharded weights
    need `gather` from `sharding.make_gather`. With separate `policies`, the optimizers must
    come from `vmap_optimizer`.
    """
    forward = ForwardPass(config, head_chunk, remat, compute_dtype, entropy_gradient, gather)

    def apply(state: TrainState, grads: Any, present: Any = None) -> tuple[TrainState, Metrics]:
        return _apply(optimizer, critic, state, grads, policies, present)

    return TrainFunctions(
        grads_fn=jax.jit(_grads_adder(forward, objective, critic), donate_argnums=(1, 2)),
        apply_fn=jax.jit(apply, donate_argnums=0),
        logprobs_fn=jax.jit(map_bundle(forward.logprobs)),
        scores_fn=jax.jit(map_bundle(forward.scores), static_argnums=3),
        values_fn=jax.jit(map_bundle(forward.values)),
        norm_fn=jax.jit(lambda grads: optax.tree.norm(grads[0])),
        objective=objective,
        critic=critic,
    )


def taking_turns(
    functions: TrainFunctions, dispatching: Callable[[], AbstractContextManager[None]]
) -> TrainFunctions:
    """Return the functions for devices that also run other programs, of other threads.

    Each starts within `dispatching()` and is waited for. So programs of the others run between two
    microbatches instead of behind all of them, and all devices start programs in one order.
    """
    return dataclasses.replace(
        functions,
        grads_fn=_InTurn(functions.grads_fn, dispatching),
        apply_fn=_InTurn(functions.apply_fn, dispatching),
        logprobs_fn=_InTurn(functions.logprobs_fn, dispatching),
        scores_fn=_InTurn(functions.scores_fn, dispatching),
        values_fn=_InTurn(functions.values_fn, dispatching),
        norm_fn=_InTurn(functions.norm_fn, dispatching),
    )


@dataclass(frozen=True)
class _InTurn:
    """Jitted function that starts within a context and is waited for."""

    function: Any
    dispatching: Callable[[], AbstractContextManager[None]]

    def __call__(self, *arguments: Any) -> Any:
        with self.dispatching():
            results = self.function(*arguments)
        return jax.block_until_ready(results)

    def lower(self, *arguments: Any) -> Any:
        return self.function.lower(*arguments)


def update(
    functions: TrainFunctions,
    state: TrainState,
    batches: Sequence[Batch],
    ref_params: Params | None = None,
    present: Bool[np.ndarray, " N"] | None = None,
    num_first: int = 0,
) -> tuple[TrainState, dict[str, float]]:
    """Run one optimizer update over all microbatches and fetch its metrics in one transfer.

    `state` is donated except its base, which also completes `ref_params`. A gradient that is not
    finite changes only the step count and is reported as train/skipped_updates = 1. With several
    policies, those not `present` are unchanged. With `num_first`, the norm of the gradient of that
    many microbatches is reported as first_grad_norm. Raises ValueError without a microbatch.
    """
    if not batches:
        raise InvalidValue.empty("batches", "update got no microbatches; skip the step instead")
    head = None if state.critic is None else state.critic.head
    teacher = batches[0].teacher
    grads, metrics = zero_accumulators(
        functions,
        state.params,
        with_reference=ref_params is not None,
        with_top=teacher is not None and teacher.top is not None,
        head=head,
    )
    first: Metrics = {}
    for part in (batches[:num_first], batches[num_first:]):
        for bundle, count in bundles(part):
            grads, metrics = functions.grads_fn(
                state.params, grads, metrics, bundle, count, ref_params, head, state.base
            )
        if num_first and not first:
            first = {"first_grad_norm": functions.norm_fn(grads)}
    chosen = () if present is None else (present,)
    new, applied = functions.apply_fn(dataclasses.replace(state, base=None), grads, *chosen)
    sums, applied = jax.device_get((metrics, applied | first))
    means = policy.mean_metrics({name: float(value) for name, value in sums.items()})
    state = dataclasses.replace(new, base=state.base)
    return state, means | {name: float(value) for name, value in applied.items()}


def with_old_logprobs(
    functions: TrainFunctions, params: Params, batches: Sequence[Batch]
) -> list[Batch]:
    """Return the batches with `old_logprobs` measured with these weights."""
    measured = measure(functions.logprobs_fn, batches, params)
    return [
        dataclasses.replace(batch, old_logprobs=logprobs)
        for batch, logprobs in zip(batches, measured, strict=True)
    ]


def zero_accumulators(
    functions: TrainFunctions,
    params: Params,
    *,
    with_reference: bool = False,
    with_top: bool = False,
    head: ValueHead | None = None,
) -> tuple[Any, Metrics]:
    """Build zero gradients, sharded like params and value head, and zero metric sums."""
    critic = functions.critic if head is not None else None
    names = metric_names(functions.objective, critic, with_reference, with_top)
    return (
        jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), (params, head)),
        {name: place_scalar(params, jnp.zeros((), jnp.float32)) for name in names},
    )


def _grads_adder(
    forward: ForwardPass, objective: Objective, critic: Critic | None
) -> Callable[..., tuple[Any, Metrics]]:
    """Build `TrainFunctions.grads_fn` before jit."""
    grad_fn = jax.grad(functools.partial(forward.loss, objective, critic), has_aux=True)

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
            new, sums = grad_fn((params, head), batch, ref_params, base)
            return jax.tree.map(jnp.add, added[0], new), policy.add_metrics(added[1], sums)

        return fold_bundle(bundle, count, add_one, (grads, metrics))

    return add_grads


def _apply(
    optimizer: optax.GradientTransformation,
    critic: Critic | None,
    state: TrainState,
    grads: tuple[Any, Any],
    policies: AdapterPolicies | None = None,
    present: Bool[Array, " N"] | None = None,
) -> tuple[TrainState, Metrics]:
    """Apply the gradients of the weights and of the value head, and return (state, metrics)."""
    grad_norm, value_grad_norm = map(optax.tree.norm, grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(value_grad_norm)
    metrics = {
        "train/grad_norm": grad_norm,
        "train/skipped_updates": 1.0 - finite.astype(jnp.float32),
    }
    if critic is not None and state.critic is not None:
        metrics["train/value_grad_norm"] = value_grad_norm
    old = state.params, state.opt_state, state.critic
    move = functools.partial(_move, optimizer, critic)
    if policies is None or present is None:
        return TrainState(state.step + 1, *_move_if(finite, move, old, grads)), metrics
    new = move(old, grads)
    kept, policy_metrics = find_valid_updates(policies, grads, present)
    params, opt_state = select(kept, new[:2], old[:2])
    is_stack = critic is not None and critic.num_heads is not None
    head = select(kept, new[2], old[2]) if is_stack else _keep(finite, new[2], old[2])
    return TrainState(state.step + 1, params, opt_state, head), metrics | policy_metrics


def _move(
    optimizer: optax.GradientTransformation,
    critic: Critic | None,
    old: tuple[Params, Any, CriticState | None],
    grads: tuple[Any, Any],
) -> tuple[Any, Any, CriticState | None]:
    """Return the params, their optimizer state and the critic after an update."""
    params, opt_state, critic_state = old
    updates, opt_state = optimizer.update(grads[0], opt_state, params)
    if critic is not None and critic_state is not None:
        head, moments = critic_state.head, critic_state.opt_state
        moved, moments = critic.optimizer.update(grads[1], moments, head)
        critic_state = CriticState(optax.apply_updates(head, moved), moments)
    return optax.apply_updates(params, updates), opt_state, critic_state


def _move_if(finite: Bool[Array, ""], move: Callable[..., Any], old: Any, grads: Any) -> Any:
    """Return `move(old, grads)`, or `old` if the gradient is not finite.

    `optax.apply_if_finite` would apply such a gradient after a number of steps, and would judge the
    weights and the value head separately.
    """

    def by_choice(old: Any, grads: Any) -> Any:
        return _keep(finite, move(old, grads), old)

    def by_branch(old: Any, grads: Any) -> Any:  # with `where`, XLA on a CPU copies the moments
        return jax.lax.cond(finite, move, lambda old, _: old, old, grads)

    return jax.lax.platform_dependent(old, grads, cpu=by_branch, default=by_choice)


def _keep(finite: Bool[Array, ""], new: Any, old: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
