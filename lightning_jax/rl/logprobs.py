"""Log-probabilities of a batch's targets, without logits of all of them at once."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lightning_jax.models.mesh_axes import MESH_AXES
from lightning_jax.models.transformer import DecoderConfig, Gather, Params, forward, unembed
from lightning_jax.types import Batch


def response_logprobs(
    params: Params,
    config: DecoderConfig,
    batch: Batch,
    *,
    remat: bool,
    head_chunk: int,
    entropy_gradient: bool = False,
    gather: Gather | None = None,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """(log-probability of each target, entropy of its distribution), in nats.

    The entropy has a gradient only with `entropy_gradient`, because it costs one. Both are 0 where
    masked. The LM head sees only nodes that predict a target, `head_chunk` of a row at a time, and
    skips chunks that hold only padding; logits of [R, V] never exist at once, not in the backward
    pass either.
    """
    nodes = read_nodes(params, config, batch, remat=remat, gather=gather)
    return node_logprobs(
        head_params(params, gather),
        config,
        batch,
        nodes,
        head_chunk=head_chunk,
        entropy_gradient=entropy_gradient,
    )


def read_nodes(
    params: Params,
    config: DecoderConfig,
    batch: Batch,
    *,
    remat: bool,
    gather: Gather | None = None,
) -> Float[Array, "B T E"]:
    """The last hidden state of each node."""
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
    """The weights of the LM head, ready for use: all that `node_logprobs` reads."""
    name = "head" if "head" in params else "embed"
    read = {name: params[name]}
    return gather(read) if gather else read


def node_logprobs(
    params: Params,
    config: DecoderConfig,
    batch: Batch,
    nodes: Float[Array, "B T E"],
    *,
    head_chunk: int,
    entropy_gradient: bool,
) -> tuple[Float[Array, "B R"], Float[Array, "B R"]]:
    """`response_logprobs` of hidden states."""
    hidden = jnp.take_along_axis(
        nodes, batch.target_nodes[:, :, None], axis=1, mode="promise_in_bounds"
    )
    head = _Head(config, entropy_gradient)
    targets = (hidden, batch.target_ids, batch.target_mask)
    chunks = jax.tree.map(lambda part: _split(part, head_chunk), targets)
    wanted = chunks[2].any(axis=(1, 2))
    logprobs, entropy = _on_each_device(head, params, wanted, *chunks)
    return _join(logprobs), _join(entropy)


@dataclass(frozen=True)
class _Head:
    """How the LM head is read."""

    config: DecoderConfig
    entropy_gradient: bool

    @property
    def is_trained(self) -> bool:
        """Adapters leave it as it is."""
        return self.config.lora is None

    def read(self, params: Params, hidden: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
        """(log-probability, entropy) of each target of a chunk."""
        logits = unembed(params, self.config, hidden)
        return _token_logprobs(logits, ids, mask, entropy_gradient=self.entropy_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read_chunks(
    head: _Head, params: Params, wanted: Any, hidden: Any, ids: Any, mask: Any
) -> tuple[Any, Any]:
    """`head.read` of each chunk [B size], one after the other; zeros where none is `wanted` [N]."""

    def one(chunk: Any) -> tuple[Any, Any]:
        is_wanted, *targets = chunk

        def nothing(params: Params, hidden: Any, ids: Any, mask: Any) -> tuple[Any, Any]:
            return jnp.zeros(mask.shape, jnp.float32), jnp.zeros(mask.shape, jnp.float32)

        return jax.lax.cond(is_wanted, head.read, nothing, params, *targets)

    return jax.lax.map(one, (wanted, hidden, ids, mask))


def _read_forward(head: _Head, *inputs: Any) -> tuple[Any, Any]:
    return _read_chunks(head, *inputs), inputs


def _read_backward(head: _Head, saved: Any, out_grads: Any) -> tuple[Any, ...]:
    """Logits are made anew, and what the chunks add to the head's gradient is added where it lies.

    JAX's own rule keeps a copy of the head for each chunk, and adds zeros for those that are not
    wanted.
    """
    params, *chunks = saved

    def one(added: Params, chunk: Any) -> tuple[Params, Any]:
        is_wanted, hidden, ids, mask, *grads = chunk

        def read(trained: Params, hidden: Any) -> tuple[Any, Any]:
            return head.read(trained or params, hidden, ids, mask)

        def add(added: Params, hidden: Any) -> tuple[Params, Any]:
            new, hidden_grad = jax.vjp(read, trained, hidden)[1](tuple(grads))
            return jax.tree.map(jnp.add, added, new), hidden_grad

        def nothing(added: Params, hidden: Any) -> tuple[Params, Any]:
            return added, jnp.zeros_like(hidden)

        return jax.lax.cond(is_wanted, add, nothing, added, hidden)

    trained = params if head.is_trained else {}
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), trained)
    added, hidden_grads = jax.lax.scan(one, start, (*chunks, *out_grads))
    head_grads = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), added, trained)
    return head_grads or None, None, hidden_grads, None, None


_read_chunks.defvjp(_read_forward, _read_backward)


def _on_each_device(head: _Head, params: Params, *chunks: Any) -> tuple[Any, Any]:
    """`_read_chunks` of each device's rows, so that the head's gradients are added up over devices
    once, not chunk by chunk. The compiler still splits what lies along other axes of the mesh.
    """
    read = functools.partial(_read_chunks, head)
    mesh = jax.typeof(chunks[1]).sharding.mesh
    axes = [axis for axis in MESH_AXES["rows"] if dict(mesh.shape).get(axis, 1) > 1]
    if not axes:
        return read(params, *chunks)
    rows, whole = jax.P(None, axes), jax.P()
    return jax.shard_map(
        read,
        mesh=mesh,
        axis_names=set(axes),
        in_specs=(whole, whole, rows, rows, rows),
        out_specs=(rows, rows),
        check_vma=False,  # else the gradients would be added up where the weights meet the rows
    )(params, *chunks)


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
    # A choice between product and sum, else YNN on a CPU makes both one slow operation.
    expected = jnp.where(mask[:, :, None], jnp.exp(logits - total[:, :, None]) * logits, 0.0)
    entropy = total - expected.sum(axis=-1)
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def _split(x: Array, size: int) -> Array:
    """[B, N * size, ...] as [N, B, size, ...]."""
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)


def _join(x: Float[Array, "N B R"]) -> Float[Array, "B T"]:
    """The inverse of `_split`."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)
