"""Log-probabilities of a batch's targets, computed in chunks to limit the memory for logits."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lightning_jax.engine.sampling import unpack_mask
from lightning_jax.models.blocks.matmul import product
from lightning_jax.models.config import RematKind
from lightning_jax.models.mesh import MESH_AXES
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import Gather, Params, forward, unembed
from lightning_jax.rl.batches.batch import NO_TOKEN, Batch
from lightning_jax.rl.losses.surrogates import kl_to_top


class TargetScores(NamedTuple):
    """Scores of a batch's targets in nats, 0 where masked."""

    logprobs: Any  # [B, R], of the target
    entropy: Any  # [B, R], of its distribution
    teacher_kl: Any = None  # [B, R], to the teacher's likeliest tokens; None: it named none
    top_ids: Any = None  # [B, R, K], the likeliest tokens, best first; None: not asked for
    top_logprobs: Any = None  # [B, R, K]


def response_logprobs(
    params: Params,
    config: DecoderConfig,
    batch: Batch,
    *,
    remat: RematKind,
    head_chunk: int,
    entropy_gradient: bool = False,
    gather: Gather | None = None,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Return (log-probability of each target, entropy of its distribution), in nats.

    Both are 0 where masked. The entropy has a gradient only with `entropy_gradient`, to save its
    cost. The LM head runs only on nodes that predict a target, once for all targets that are the
    same token. `batch.distinct` lists these, with any temperatures and masks. The head takes
    `head_chunk` of a row at a time, and on a CPU skips chunks of padding. Logits of [R, V] are
    never allocated at once, not even in the backward pass.
    """
    nodes = read_nodes(params, config, batch, remat=remat, gather=gather)
    scores = score_nodes(
        head_params(params, gather),
        replace(batch, teacher=None),
        nodes,
        Head(config, entropy_gradient),
        head_chunk=head_chunk,
    )
    return scores.logprobs, scores.entropy


def read_nodes(
    params: Params,
    config: DecoderConfig,
    batch: Batch,
    *,
    remat: RematKind,
    gather: Gather | None = None,
) -> Float[Array, "B T E"]:
    """Return the last hidden state of each node."""
    return forward(
        params,
        config,
        batch.tokens,
        batch.positions,
        ends=batch.ends,
        remat=remat,
        gather=gather,
        adapters=batch.adapters,
    )[0]


def head_params(params: Params, gather: Gather | None) -> Params:
    """Return the gathered weights of the LM head, the only ones that `score_nodes` reads."""
    name = "head" if "head" in params else "embed"
    read = {name: params[name]}
    return gather(read) if gather else read


@dataclass(frozen=True)
class Head:
    """Settings and arithmetic of the LM head."""

    config: DecoderConfig
    entropy_gradient: bool = False
    top_k: int = 0  # likeliest tokens to return; all if the vocabulary is smaller
    num_ids: int | None = None  # these tokens have ids below it; None: any id

    @property
    def is_trained(self) -> bool:
        """False with adapters, which leave the head unchanged."""
        return self.config.execution.lora is None

    def read(self, params: Params, table: Any, hidden: Any, targets: "_Targets") -> TargetScores:
        """Return the scores of a chunk's targets."""
        return self.read_logits(unembed(params, self.config, hidden), table, targets)

    def read_logits(self, logits: Any, table: Any, targets: "_Targets") -> TargetScores:
        """Return the same as `read`, from float32 logits, with any temperatures and masks."""
        if targets.temperatures is not None:
            logits = logits / targets.temperatures[:, :, None]
        if targets.of_pairs is not None:
            logits = _masked(logits, table, targets.of_pairs)
        total = jax.nn.logsumexp(logits, axis=-1)
        scores = TargetScores(*_token_logprobs(logits, total, targets, self.entropy_gradient))
        if targets.top is not None:
            top_logits = jnp.take_along_axis(logits, targets.top.ids, axis=-1)
            named = targets.top.logprobs
            if targets.of_pairs is not None:  # a teacher that knows no mask may name others
                named = jnp.where(top_logits > FORBIDDEN, named, NO_TOKEN)
                top_logits = jnp.maximum(top_logits, total[:, :, None] + NO_TOKEN)
            kl = kl_to_top(top_logits - total[:, :, None], named, targets.top.kl)
            scores = scores._replace(teacher_kl=jnp.where(targets.mask, kl, 0.0))
        if self.top_k:
            ids, best = self._likeliest(logits)
            best = jnp.maximum(best - total[:, :, None], NO_TOKEN)
            scores = scores._replace(top_ids=ids, top_logprobs=best)
        return scores

    def _likeliest(self, logits: Any) -> tuple[Any, Any]:
        """Return (ids, logits) of the likeliest tokens, best first."""
        size = logits.shape[-1]
        if self.num_ids is not None and self.num_ids < size:
            logits = jnp.where(jnp.arange(size) < self.num_ids, logits, -jnp.inf)
        best, ids = jax.lax.top_k(logits, min(self.top_k, size))
        return ids.astype(jnp.int32), best

    def kernel_grads(self, params: Params, hidden: Any, logit_grads: Any) -> Params:
        """Return what a chunk adds to the gradient of the weights, in float32.

        Both sides are first rounded to the weights' dtype, as in the forward pass.
        """
        left, right = (array.reshape(-1, array.shape[-1]) for array in (hidden, logit_grads))
        if self.config.shape.tie_embeddings:
            left, right = right, left

        def grad(kernel: Any) -> Any:
            return product(left.astype(kernel.dtype), right.astype(kernel.dtype), (0, 0))

        return jax.tree.map(grad, params)

    def hidden_grad(self, params: Params, hidden: Any, logit_grads: Any) -> Any:
        """Return the gradient of a chunk's hidden states, in their dtype.

        Both sides of the product have the weights' dtype. JAX's own rule would widen the weights
        to the float32 of the logits. The sums are float32.
        """
        (kernel,) = jax.tree.leaves(params)
        axis = 0 if self.config.shape.tie_embeddings else 1
        return product(logit_grads, kernel, (logit_grads.ndim - 1, axis)).astype(hidden.dtype)


def score_nodes(
    params: Params, batch: Batch, nodes: Float[Array, "B T E"], head: Head, *, head_chunk: int
) -> TargetScores:
    """Return the scores of the targets from the hidden states of a batch's nodes.

    `params` are those of the head.
    """
    distinct, table, top = batch.distinct, None, None
    if batch.teacher is not None:
        top = batch.teacher.top
    if distinct is None:
        indices = batch.target_nodes
        targets = _Targets(batch.target_ids, batch.target_mask, None, None, top)
    else:
        indices, of_pairs = distinct.nodes, None
        if distinct.masks is not None:
            table, of_pairs = distinct.masks.table, distinct.masks.of_pairs
        is_pair = distinct.ids >= 0
        targets = _Targets(distinct.ids, is_pair, distinct.temperatures, of_pairs, top)
    # Several targets may read one node. Their gradients are summed in float32.
    hidden = _take(nodes.astype(jnp.float32), indices).astype(nodes.dtype)
    split = functools.partial(_split, size=head_chunk)
    hidden, targets = jax.tree.map(split, (hidden, targets))
    has_targets = targets.mask.any(axis=(1, 2))
    read: Any = _read_chunks(head, params, table, has_targets, hidden, targets)
    scores = jax.tree.map(_join, read)
    if distinct is None:
        return scores

    def of_targets(values: Any) -> Any:
        rows = _take(values, distinct.of_targets)
        return jnp.where(_like(batch.target_mask, rows), rows, jnp.zeros_like(rows))

    return jax.tree.map(of_targets, scores)


def _take(values: Any, indices: Any) -> Any:
    """Return the values at these indices of each row. The indices must be in bounds."""
    return jnp.take_along_axis(values, _like(indices, values), axis=1, mode="promise_in_bounds")


def _like(values: Any, other: Any) -> Any:
    """Return values [B, R] with as many axes as `other`."""
    return values.reshape(values.shape + (1,) * (other.ndim - 2))


class _Targets(NamedTuple):
    """Inputs of the head beside hidden states, of a chunk or of all chunks."""

    ids: Any
    mask: Any
    temperatures: Any  # None: all are 1
    of_pairs: Any  # index of each target's mask in the row's table; None: no masks
    top: Any  # TopTokens of a teacher; None: there are none


FORBIDDEN = -1e30  # logit of a token that a grammar forbids; finite, so that 0 times it is 0


def _masked(logits: Any, table: Any, of_pairs: Any) -> Any:
    """Return the logits [B size V] with those of forbidden tokens replaced.

    A teacher's vocabulary may be larger than that of the table. The rest is forbidden.
    """
    num_missing = max(0, -(-logits.shape[-1] // 8) - table.shape[-1])
    rows = jnp.take_along_axis(table, of_pairs[:, :, None], axis=1, mode="promise_in_bounds")
    packed = jnp.pad(rows, ((0, 0), (0, 0), (0, num_missing)))
    allowed = unpack_mask(packed.reshape(-1, packed.shape[-1]), logits.shape[-1])
    allowed = allowed.reshape(logits.shape) | (of_pairs == 0)[:, :, None]
    return jnp.where(allowed, logits, FORBIDDEN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_chunks(
    head: Head, params: Params, table: Any, has_targets: Any, hidden: Any, targets: _Targets
) -> TargetScores:
    """Apply `head.read` to each chunk [B size] in turn. Those without targets [N] may be skipped.

    `table` has the rows' masks [B M W], or is None.
    """

    def nothing(*inputs: Any) -> TargetScores:
        shapes = jax.eval_shape(head.read, *inputs)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def read(params: Params, table: Any, *chunks: Any) -> tuple[Any, None]:
        def one(chunk: Sequence[Any]) -> TargetScores:
            is_wanted, *inputs = chunk
            return _skip_unless(is_wanted, head.read, nothing, params, table, *inputs)

        return jax.lax.map(one, chunks), None

    return _run_on_row_shards(read, params, table, has_targets, hidden, targets)[0]


def _read_forward(head: Head, *inputs: Any) -> tuple[Any, Any]:
    return _read_chunks(head, *inputs), inputs


def _read_backward(head: Head, inputs: Any, out_grads: Any) -> tuple[Any, ...]:
    """Return the gradients of the head and the hidden states, recomputing the logits.

    Each device sums the chunks' contributions to the head's gradient in float32. Only the result
    is summed over devices. JAX's own rule sums over devices chunk by chunk, keeps a copy of the
    head for each chunk, and adds zeros for chunks that are not wanted.
    """

    def pull(params: Params, table: Any, *chunks: Any) -> tuple[Any, Any]:
        trained = params if head.is_trained else {}

        def one(added: Params, chunk: Any) -> tuple[Params, Any]:
            is_wanted, hidden, targets, grads = chunk

            def read(logits: Any) -> TargetScores:
                return head.read_logits(logits, table, targets)

            def add(added: Params, hidden: Any) -> tuple[Params, Any]:
                logits = unembed(params, head.config, hidden)
                (logit_grads,) = jax.vjp(read, logits)[1](grads)
                if trained:
                    new = head.kernel_grads(trained, hidden, logit_grads)
                    added = jax.tree.map(jnp.add, added, new)
                return added, head.hidden_grad(params, hidden, logit_grads)

            def nothing(added: Params, hidden: Any) -> tuple[Params, Any]:
                return added, jnp.zeros_like(hidden)

            return _skip_unless(is_wanted, add, nothing, added, hidden)

        start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
        added, hidden_grads = jax.lax.scan(one, start, chunks)
        add_up = functools.partial(_add_up, axes=_row_axes(inputs[3]))
        return hidden_grads, jax.tree.map(add_up, added, trained) or None

    hidden_grads, head_grads = _run_on_row_shards(pull, *inputs, out_grads)
    return head_grads, None, None, hidden_grads, None


_read_chunks.defvjp(_read_forward, _read_backward)


def _skip_unless(
    is_wanted: Any, work: Callable[..., Any], nothing: Callable[..., Any], *inputs: Any
) -> Any:
    """Return `work(*inputs)`. On a CPU, return `nothing(*inputs)` for a chunk without targets.

    For a branch, a GPU stops until the host has read the condition. There the host has left out
    chunks without targets (`microbatches.place_batches`).
    """

    def by_branch(*inputs: Any) -> Any:
        return jax.lax.cond(is_wanted, work, nothing, *inputs)

    return jax.lax.platform_dependent(*inputs, cpu=by_branch, default=work)


def _run_on_row_shards(
    run: Callable[..., tuple[Any, Any]], params: Params, table: Any, has_targets: Any, *chunks: Any
) -> tuple[Any, Any]:
    """Run `run` on each device's rows of the table [B ...] and of the chunks [N B ...].

    Returns the rows and a result that is equal on all devices. The compiler still partitions along
    the other mesh axes.
    """
    axes = _row_axes(chunks[0])
    if not axes:
        return run(params, table, has_targets, *chunks)
    rows, whole = jax.P(None, axes), jax.P()
    return jax.shard_map(
        run,
        mesh=jax.typeof(chunks[0]).sharding.mesh,
        axis_names=set(axes),
        in_specs=(whole, jax.P(axes), whole, *[rows] * len(chunks)),
        out_specs=(rows, whole),
        check_vma=False,
    )(params, table, has_targets, *chunks)


def _add_up(grad: Any, leaf: Any, axes: tuple[str, ...]) -> Any:
    """Sum a gradient over devices and cast it to its leaf's dtype. All devices get the result."""
    if not axes:
        return grad.astype(leaf.dtype)

    def in_float32(grad: Any) -> Any:  # XLA on a CPU aborts on such a sum in bfloat16
        return jax.lax.psum(grad, axes).astype(leaf.dtype)

    def as_it_is_used(grad: Any) -> Any:
        return jax.lax.psum(grad.astype(leaf.dtype), axes)

    return jax.lax.platform_dependent(grad, cpu=in_float32, default=as_it_is_used)


def _row_axes(chunk: Any) -> tuple[str, ...]:
    """Return the mesh axes over which a chunk's rows are split."""
    sizes = dict(jax.typeof(chunk).sharding.mesh.shape)
    return tuple(axis for axis in MESH_AXES["rows"] if sizes.get(axis, 1) > 1)


def _token_logprobs(
    logits: Float[Array, "B R V"],
    total: Float[Array, "B R"],
    targets: _Targets,
    entropy_gradient: bool,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """Return (log-probability, entropy) of each target. `total` is the logits' logsumexp."""
    # A comparison instead of a gather, because it fuses with the sums and can be partitioned over
    # a sharded vocabulary.
    chosen = jnp.arange(logits.shape[-1])[None, None, :] == targets.ids[:, :, None]
    logprobs = jnp.where(chosen, logits, 0.0).sum(axis=-1) - total
    if not entropy_gradient:
        logits, total = jax.lax.stop_gradient((logits, total))
    mask = targets.mask
    # The `where` between product and sum keeps YNN on a CPU from fusing them into a slow operation.
    expected = jnp.where(mask[:, :, None], jnp.exp(logits - total[:, :, None]) * logits, 0.0)
    entropy = total - expected.sum(axis=-1)
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def _split(x: Array, size: int) -> Array:
    """Reshape [B, N * size, ...] to [N, B, size, ...]."""
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _join(x: Array) -> Array:
    """Undo `_split`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])
