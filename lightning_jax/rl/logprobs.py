"""Log-probabilities of a batch's targets, without logits of all of them at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
    read = {name: params[name] for name in ("embed", "head") if name in params}
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
