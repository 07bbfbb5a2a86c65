"""Tests of the chunked LM head against all logits at once and JAX's own gradient."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.config import LoraConfig
from lightning_jax.models.transformer import unembed
from lightning_jax.rl.batches.batch import Batch, DistinctTargets, MaskBatch
from lightning_jax.rl.update.logprobs import Head, head_params, score_nodes
from lightning_jax.testing.tiny import tiny_model

MODEL = tiny_model(num_layers=1)
TIED = MODEL.config.with_shape(tie_embeddings=True)
ROWS, NODES, TARGETS, CHUNK = 2, 20, 12, 4


def targets() -> Any:
    """Build a batch with only the head's inputs, whose second of three chunks is all padding."""
    rng = np.random.default_rng(0)
    mask = rng.random((ROWS, TARGETS)) < 0.7
    mask[:, CHUNK : 2 * CHUNK] = False
    return dataclasses.replace(
        Batch(**dict.fromkeys(field.name for field in dataclasses.fields(Batch))),
        target_nodes=jnp.asarray(rng.integers(0, NODES, (ROWS, TARGETS)), jnp.int32),
        target_ids=jnp.asarray(rng.integers(0, 259, (ROWS, TARGETS)), jnp.int32),
        target_mask=jnp.asarray(mask),
    )


BATCH = targets()
NODE_STATES = jnp.asarray(
    np.random.default_rng(1).normal(size=(ROWS, NODES, MODEL.config.shape.embed_dim)), jnp.float32
)


def in_chunks(params: Any, nodes: Any, config: Any, batch: Batch = BATCH) -> Any:
    head = Head(config, entropy_gradient=True)
    return score_nodes(params, batch, nodes, head, head_chunk=CHUNK)[:2]


def at_once(
    params: Any,
    nodes: Any,
    config: Any,
    batch: Batch = BATCH,
    temperatures: Any = 1.0,
    allowed: Any = None,
) -> Any:
    hidden = jnp.take_along_axis(nodes, batch.target_nodes[:, :, None], axis=1)
    logits = unembed(params, config, hidden) / temperatures
    logprobs = jax.nn.log_softmax(logits, axis=-1, where=allowed)
    if allowed is not None:
        logprobs = jnp.where(allowed, logprobs, -1e9)
    chosen = jnp.take_along_axis(logprobs, batch.target_ids[:, :, None], axis=-1)[:, :, 0]
    entropy = -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
    return jnp.where(batch.target_mask, chosen, 0.0), jnp.where(batch.target_mask, entropy, 0.0)


@functools.partial(jax.jit, static_argnums=(0, 3))
def value_and_grads(read: Any, params: Any, nodes: Any, config: Any) -> Any:
    """Return the result of `read`, and gradients of head and states for a weighted sum of it."""

    def weighed(params: Any, nodes: Any) -> Any:
        logprobs, entropy = read(params, nodes, config)
        weights = jnp.arange(1.0, TARGETS + 1)[None]
        return (weights * logprobs + (weights - 5.0) * entropy).sum(), (logprobs, entropy)

    grads, found = jax.grad(weighed, argnums=(0, 1), has_aux=True)(params, nodes)
    return found, grads


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_and_their_gradient_equal_those_of_all_logits(tied: bool) -> None:
    config = MODEL.config.with_shape(tie_embeddings=tied)
    kernel = 0.2 * np.random.default_rng(2).normal(size=(MODEL.config.shape.embed_dim, 259))
    head = {"kernel": jnp.asarray(kernel, jnp.float32)}
    params = MODEL.params if tied else MODEL.params | {"head": head}
    read = head_params(params, None)
    assert set(read) == ({"embed"} if tied else {"head"})
    ours, theirs = (
        value_and_grads(function, read, NODE_STATES, config) for function in (in_chunks, at_once)
    )
    for got, want in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_beside_adapters_the_head_gets_no_gradient_and_its_states_get_theirs() -> None:
    adapted = TIED.with_execution(lora=LoraConfig(rank=2))
    read = head_params(MODEL.params, None)
    (found, (head, states)), (_, (_, wanted)) = (
        value_and_grads(in_chunks, read, NODE_STATES, config) for config in (adapted, TIED)
    )
    assert not np.any(head["embed"]["embedding"])
    np.testing.assert_allclose(states, wanted, rtol=1e-5, atol=1e-6)
    assert np.any(found[0])


def alike() -> tuple[Batch, Batch]:
    """Build a batch with many repeated targets, without and with `distinct`.

    Repeated targets are the same token after the same node.
    """
    nodes = jnp.asarray([[3, 3, 3, 5, 3, 5, 5, 3, 0, 0, 0, 0], [1, 2] * 6])
    ids = jnp.asarray([[7, 7, 8, 7, 7, 7, 7, 8, 0, 0, 0, 0], [4] * 12])
    mask = jnp.asarray([[True] * 8 + [False] * 4, [True] * 12])
    naive = dataclasses.replace(BATCH, target_nodes=nodes, target_ids=ids, target_mask=mask)
    distinct = DistinctTargets(
        nodes=jnp.asarray([[3, 3, 5] + [0] * 9, [1, 2] + [0] * 10]),
        ids=jnp.asarray([[7, 8, 7] + [-1] * 9, [4, 4] + [-1] * 10]),
        of_targets=jnp.asarray([[0, 0, 1, 2, 0, 2, 2, 1, 0, 0, 0, 0], [0, 1] * 6]),
    )
    return naive, dataclasses.replace(naive, distinct=distinct)


def test_targets_that_are_alike_are_read_once_and_have_the_gradient_of_each() -> None:
    naive, once = (
        value_and_grads(
            functools.partial(in_chunks, batch=batch),
            head_params(MODEL.params, None),
            NODE_STATES,
            TIED,
        )
        for batch in alike()
    )
    for got, want in zip(*map(jax.tree.leaves, (once, naive)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    (logprobs, entropy), _ = once
    assert (logprobs[0, 8:] == 0).all() and (entropy[0, 8:] == 0).all()
    assert (logprobs[alike()[0].target_mask] < 0).all()


def test_logits_are_divided_by_the_temperature_that_a_pair_was_sampled_at() -> None:
    naive, once = alike()
    temperatures = jnp.asarray([[0.5, 2.0, 0.7] + [1.0] * 9, [1.3, 1.0] + [1.0] * 10])
    tempered = dataclasses.replace(once.distinct, temperatures=temperatures)
    of_targets = jnp.take_along_axis(temperatures, once.distinct.of_targets, axis=1)
    whole = functools.partial(at_once, batch=naive, temperatures=of_targets[:, :, None])
    chunks = functools.partial(in_chunks, batch=dataclasses.replace(once, distinct=tempered))
    head = head_params(MODEL.params, None)
    ours, theirs = (
        value_and_grads(function, head, NODE_STATES, TIED) for function in (chunks, whole)
    )
    for got, want in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [33, 20])
def test_forbidden_tokens_have_no_mass_and_no_gradient(width: int) -> None:
    """Each pair has its own mask, except the first row's third. Masks may end before the logits."""
    naive, once = alike()
    allowed = np.random.default_rng(3).random((ROWS, 3, 8 * 33)) < 0.3
    allowed[:, :, [4, 7, 8]] = True  # the targets
    allowed[:, :, 8 * width :] = False
    allowed[:, 0] = False
    table = jnp.asarray(np.packbits(allowed[:, :, : 8 * width], axis=-1, bitorder="little"))
    allowed[:, 0] = True  # index 0 allows everything, whatever is in the table
    of_pairs = jnp.asarray([[1, 2, 0] + [0] * 9, [1, 2] + [0] * 10])
    temperatures = jnp.asarray([[0.5, 2.0, 0.7] + [1.0] * 9, [1.3, 1.0] + [1.0] * 10])
    distinct = dataclasses.replace(
        once.distinct, masks=MaskBatch(table, of_pairs), temperatures=temperatures
    )
    masks, divisors = (
        jnp.take_along_axis(array, once.distinct.of_targets[:, :, None], axis=1)
        for array in (jnp.asarray(allowed[:, :, :259])[jnp.asarray([[0], [1]]), of_pairs],
                      temperatures[:, :, None])
    )  # fmt: skip
    whole = functools.partial(at_once, batch=naive, temperatures=divisors, allowed=masks)
    chunks = functools.partial(in_chunks, batch=dataclasses.replace(once, distinct=distinct))
    head = head_params(MODEL.params, None)
    ours, theirs = (
        value_and_grads(function, head, NODE_STATES, TIED) for function in (chunks, whole)
    )
    for got, want in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_bfloat16_states_and_head_lose_no_more_than_the_rounding_of_the_result(
    temperature: float | None,
) -> None:
    """Check against float32 on the same rounded inputs. One rounding is 1.7e-3 on average.

    Gradients have two, of the logits' gradients and of the result.
    """
    _, once = alike()
    if temperature is not None:
        temperatures = jnp.full(once.distinct.ids.shape, temperature)
        tempered = dataclasses.replace(once.distinct, temperatures=temperatures)
        once = dataclasses.replace(once, distinct=tempered)
    read = functools.partial(in_chunks, batch=once)
    narrow = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16), (head_params(MODEL.params, None), NODE_STATES)
    )
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
    (found, grads), (wanted, exact) = (
        value_and_grads(read, *inputs, TIED) for inputs in (narrow, wide)
    )
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    head, states = (jax.tree.leaves(tree)[0].astype(jnp.float32) for tree in grads)
    exact_head, exact_states = (jax.tree.leaves(tree)[0] for tree in exact)
    assert np.linalg.norm(head - exact_head) < 3e-3 * np.linalg.norm(exact_head)
    assert np.linalg.norm(states - exact_states) < 4e-3 * np.linalg.norm(exact_states)


def test_bfloat16_gradients_of_the_head_against_float64() -> None:
    """The reference has the same rounded inputs and no other rounding.

    Each side of a product is rounded once more (2**-9 at most) and the result once, so the error
    of all numbers together is well below 4e-3. Sums in bfloat16 would be off by several per cent:
    a chunk has 1,024 targets here.
    """
    rng = np.random.default_rng(5)
    num_targets, width = 1024, MODEL.config.shape.embed_dim
    nodes = jnp.asarray(rng.normal(size=(1, num_targets, width)), jnp.bfloat16)
    table = jnp.asarray(0.1 * rng.normal(size=(259, width)), jnp.bfloat16)
    ids, weights = rng.integers(0, 259, num_targets), 1.0 + rng.random(num_targets)
    batch = dataclasses.replace(
        BATCH,
        target_nodes=jnp.arange(num_targets)[None],
        target_ids=jnp.asarray(ids, jnp.int32)[None],
        target_mask=jnp.ones((1, num_targets), bool),
    )

    @jax.jit
    def grads(params: Any, nodes: Any) -> Any:
        def weighed(params: Any, nodes: Any) -> Any:
            scores = score_nodes(params, batch, nodes, Head(TIED), head_chunk=num_targets)
            return (jnp.asarray(weights)[None] * scores.logprobs).sum()

        return jax.grad(weighed, argnums=(0, 1))(params, nodes)

    head, states = grads({"embed": {"embedding": table}}, nodes)
    hidden, kernel = (np.asarray(array, np.float64) for array in (nodes[0], table))
    logits = hidden @ kernel.T
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    of_logits = weights[:, None] * (np.eye(259)[ids] - probs)
    for got, want in (
        (head["embed"]["embedding"], of_logits.T @ hidden),
        (states[0], of_logits @ kernel),
    ):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(got, np.float64) - want)
        assert error < 4e-3 * np.linalg.norm(want)


def test_chunks_of_padding_change_nothing_where_none_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> Any:
        read = functools.partial(in_chunks, batch=alike()[1])  # a new function is traced anew
        return value_and_grads(read, head_params(MODEL.params, None), NODE_STATES, TIED)

    skipped = run()
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *inputs, default, **_: default(*inputs)
    )
    for got, want in zip(*map(jax.tree.leaves, (run(), skipped)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
