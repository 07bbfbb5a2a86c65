"""Tests of gradients of packed forests against separate sequences, without our batching."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from coded import raises_coded
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import REMAT_KINDS, RematKind
from lightning_jax.models.transformer import forward, unembed
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.microbatches import BUNDLE_ON, bundles, cut_pairs, measure
from lightning_jax.rl.config import BatchConfig, OptimizerConfig
from lightning_jax.rl.losses.objectives import policy_objective, supervised_objective
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.logprobs import response_logprobs
from lightning_jax.rl.update.train_state import init_state, make_optimizer
from lightning_jax.rl.update.train_step import (
    make_train_functions,
    update,
    with_old_logprobs,
    zero_accumulators,
)
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model()
SHALLOW = dataclasses.replace(  # compiles faster, for tests that do not need depth
    MODEL,
    config=MODEL.config.with_shape(blocks=MODEL.config.shape.blocks[:1]),
    params={name: value for name, value in MODEL.params.items() if name != "layers_1"},
)
SHAPE = BatchConfig(rows=2, row_len=32, max_targets=16, head_chunk=4)
MAX_LEN = 32
CLIP = 0.2
SGD = optax.sgd(1.0, momentum=0.9)  # a first update is the gradient itself
SYSTEM = [1, 2, 3, 4, 5, 6]


def compiles(jitted: Any) -> int:
    return jitted._cache_size()


def fresh_params(model=MODEL):
    """Copy the params, because an update donates its state."""
    return jax.tree.map(jnp.copy, model.params)


@functools.cache
def functions(kl_coef: float = 0.0, head_chunk: int = 4):
    objective = policy_objective(clip_low=CLIP, clip_high=CLIP, kl_coef=kl_coef)
    return make_train_functions(MODEL.config, SGD, objective, head_chunk=head_chunk)


def forest_gradient(sequences: Sequence[TrainingSequence], shape: BatchConfig = SHAPE):
    """Sum gradient and metrics over all microbatches."""
    made = functions(head_chunk=shape.head_chunk)
    batches, stats = make_batches(sequences, shape)
    grads, sums = zero_accumulators(made, MODEL.params)
    for bundle in bundles(batches):
        grads, sums = made.grads_fn(MODEL.params, grads, sums, *bundle, None)
    return grads, sums, stats


def plain_logprobs(params, tokens):
    """Return log-probabilities of all tokens but the first, by plain causal attention."""
    hidden, _ = forward(params, MODEL.config, tokens[None], jnp.arange(MAX_LEN)[None])
    logprobs = jax.nn.log_softmax(unembed(params, MODEL.config, hidden)[0])
    return jnp.take_along_axis(logprobs[:-1], tokens[1:, None], axis=1)[:, 0]


jitted_logprobs = jax.jit(plain_logprobs)


@jax.jit
def plain_loss_and_grad(params, tokens, first, size, behavior, advantage, weight):
    """Return the clipped loss of one sequence, and its gradient."""

    def loss_fn(params):
        index = jnp.arange(MAX_LEN - 1)
        sampled = (index >= first) & (index < first + size)
        ratio = jnp.exp(jnp.where(sampled, plain_logprobs(params, tokens) - behavior, 0.0))
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        return -jnp.sum(jnp.where(sampled, weight * gain, 0.0))

    return jax.value_and_grad(loss_fn)(params)


def padded(s: TrainingSequence):
    """Return (tokens, index of the first sampled token's log-prob, number of sampled tokens)."""
    tokens = np.zeros(MAX_LEN, np.int32)
    ids = s.prompt_token_ids + s.response_token_ids
    tokens[: len(ids)] = ids
    return tokens, len(s.prompt_token_ids) - 1, len(s.response_token_ids)


def separate_gradient(
    sequences: Sequence[TrainingSequence], loss_and_grad: Any = plain_loss_and_grad
):
    """Sum (loss, gradient) over sequences run one at a time."""
    total = (np.zeros(()), jax.tree.map(np.zeros_like, MODEL.params))
    for s in sequences:
        tokens, first, size = padded(s)
        behavior = np.zeros(MAX_LEN - 1, np.float32)
        behavior[first : first + size] = s.behavior_logprobs
        one = loss_and_grad(MODEL.params, tokens, first, size, behavior, s.advantage, s.weight)
        total = jax.tree.map(np.add, total, one)
    return total


def assert_same_gradient(sequences: Sequence[TrainingSequence], shape: BatchConfig = SHAPE):
    grads, sums, stats = forest_gradient(sequences, shape)
    loss, expected = separate_gradient(sequences)
    assert float(sums["train/num_tokens"]) == sum(len(s.response_token_ids) for s in sequences)
    np.testing.assert_allclose(sums["train/loss"], loss, atol=1e-5)
    assert optax.tree.norm(expected) > 1e-3  # comparing zeros would prove nothing
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    return stats


def on_policy(sequences: Sequence[TrainingSequence], noise: float = 0.05):
    """Give the sequences log-probs near the model's, so that few tokens are clipped."""
    rng, near = np.random.default_rng(0), []
    for s in sequences:
        tokens, first, size = padded(s)
        exact = np.asarray(jitted_logprobs(MODEL.params, tokens))[first : first + size]
        logprobs = tuple((exact + noise * rng.normal(size=size)).tolist())
        near.append(dataclasses.replace(s, behavior_logprobs=logprobs))
    return near


def conversation(seed: int, turns: int = 3) -> list[TrainingSequence]:
    """Build calls whose prompts extend one another after a shared system prompt."""
    rng = np.random.default_rng(seed)
    prompt, calls = [*SYSTEM, *rng.integers(10, 250, 2).tolist()], []
    for _ in range(turns):
        response = rng.integers(10, 250, 3).tolist()
        calls.append(sequence(prompt, response, advantage=float(rng.normal()), weight=0.3))
        prompt = [*prompt, *response, *rng.integers(10, 250, 2).tolist()]
    return calls


def test_multi_turn_conversation_equals_its_calls_run_apart():
    stats = assert_same_gradient(on_policy(conversation(0)))
    assert stats["train/num_rows"] == 1
    assert stats["train/tokens_forest"] == 20  # instead of 10 + 15 + 20


def test_branching_rollouts_with_equal_and_different_tokens():
    """Check a group with equal first tokens that then diverge, and one repeated sample."""
    group = [
        sequence([*SYSTEM, 9], [50, 60 + k, 70], advantage=a, weight=0.2)
        for k, a in enumerate((1.0, -0.5, 2.0))
    ]
    stats = assert_same_gradient(on_policy([*group, group[0], sequence(SYSTEM, [9, 50, 80])]))
    assert stats["train/num_rows"] == 1


def test_unrelated_sequences_packed_in_one_row():
    packed = [sequence([k, k + 1, k + 2], [k + 3, k + 4], advantage=k / 50) for k in (10, 60, 120)]
    stats = assert_same_gradient(on_policy(packed))
    assert stats["train/num_rows"] == 1


def test_a_trie_split_over_rows_and_microbatches():
    calls = [call for seed in range(5) for call in conversation(seed)]
    stats = assert_same_gradient(on_policy(calls))
    assert stats["train/num_rows"] > 2
    assert stats["train/tokens_forest"] > 5 * 14 + 6  # the shared prefix is repeated


def test_a_row_long_enough_for_blockwise_attention():
    calls = [call for seed in range(13) for call in conversation(seed)]
    shape = BatchConfig(rows=1, row_len=256, max_targets=128, head_chunk=64)
    stats = assert_same_gradient(on_policy(calls), shape)
    assert stats["train/num_rows"] == 1
    assert stats["train/tokens_forest"] == 13 * 14 + 6


def test_clipped_tokens_too():
    assert_same_gradient(on_policy(conversation(1), noise=1.0))


tokens = st.integers(0, 2)
pairs = st.tuples(
    st.lists(tokens, min_size=1, max_size=9),
    st.lists(tokens, min_size=1, max_size=7),
    st.sampled_from([-1.0, 0.5, 2.0]),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(pairs, min_size=1, max_size=8))
def test_any_forest_equals_its_sequences(drawn):
    forest = [sequence(p, r, advantage=a, weight=0.2) for p, r, a in drawn]
    assert_same_gradient(on_policy(forest))


@jax.jit
def plain_gspo_and_grad(params, tokens, first, size, behavior, advantage, weight):
    """Return GSPO's loss of one sequence minus a tenth of its entropies, and its gradient."""

    def loss_fn(params):
        index = jnp.arange(MAX_LEN - 1)
        sampled = (index >= first) & (index < first + size)
        hidden, _ = forward(params, MODEL.config, tokens[None], jnp.arange(MAX_LEN)[None])
        whole = jax.nn.log_softmax(unembed(params, MODEL.config, hidden)[0])[:-1]
        logprobs = jnp.take_along_axis(whole, tokens[1:, None], axis=1)[:, 0]
        ratio = jnp.exp(jnp.sum(jnp.where(sampled, logprobs - behavior, 0.0)) / size)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        entropies = -(jnp.exp(whole) * whole).sum(axis=1)
        return -weight * jnp.sum(jnp.where(sampled, gain + 0.1 * entropies, 0.0))

    return jax.value_and_grad(loss_fn)(params)


def test_gspo_with_an_entropy_bonus_equals_its_calls_run_apart():
    """Check calls that share prefixes, over several rows and microbatches."""
    calls = on_policy([call for seed in range(4) for call in conversation(seed)], noise=0.1)
    objective = policy_objective(loss="gspo", clip_low=CLIP, clip_high=CLIP, entropy_coef=0.1)
    made = make_train_functions(MODEL.config, SGD, objective, head_chunk=4, entropy_gradient=True)
    batches, _ = make_batches(calls, SHAPE)
    assert len(batches) > 1
    grads, sums = zero_accumulators(made, MODEL.params)
    for bundle in bundles(batches):
        grads, sums = made.grads_fn(MODEL.params, grads, sums, *bundle, None)
    loss, expected = separate_gradient(calls, plain_gspo_and_grad)
    np.testing.assert_allclose(sums["train/loss"], loss, atol=1e-5)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    # A maximum over microbatches is a maximum, not a sum.
    assert 1.0 < float(sums["train/ratio_max"]) < 1.3
    known = with_old_logprobs(made, MODEL.params, batches)
    assert [batch.old_logprobs.shape for batch in known] == [(2, 16)] * len(batches)
    for before, after in zip(batches, known, strict=True):
        near = np.abs(before.behavior_logprobs - after.old_logprobs)[before.target_mask]
        assert 0.0 < near.max() < 0.5
        (alone,) = measure(made.logprobs_fn, [before], MODEL.params)
        np.testing.assert_array_equal(after.old_logprobs, alone)
    assert measure(made.logprobs_fn, [], MODEL.params) == []


def test_more_padding_and_other_rows_change_nothing():
    calls = on_policy([*conversation(0), *conversation(1)])
    expected, sums, _ = forest_gradient(calls)
    padded_shape = BatchConfig(rows=3, row_len=48, max_targets=32, head_chunk=16)
    grads, padded_sums, _ = forest_gradient(calls[::-1], padded_shape)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    for name, value in sums.items():
        np.testing.assert_allclose(padded_sums[name], value, rtol=1e-4, atol=1e-6)


def test_fewer_places_for_pairs_change_nothing():
    calls = on_policy([*conversation(0), *conversation(1)])
    expected, sums, _ = forest_gradient(calls)
    made, (batch,) = functions(), make_batches(calls, SHAPE)[0]
    cut = cut_pairs(batch, 3 * SHAPE.largest_chunk)
    num_pairs = (batch.distinct.ids >= 0).sum(axis=1).max()
    assert num_pairs <= cut.distinct.ids.shape[1] < batch.distinct.ids.shape[1]
    start = zero_accumulators(made, MODEL.params)
    grads, cut_sums = made.grads_fn(MODEL.params, *start, *bundles([cut])[0], None)
    for got, want in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    for name, value in sums.items():
        np.testing.assert_allclose(cut_sums[name], value, rtol=1e-5, atol=1e-6)


def test_logprobs_and_entropy_against_a_whole_softmax():
    (batch,), _ = make_batches(conversation(0), dataclasses.replace(SHAPE, rows=1))
    batch = jax.tree.map(jnp.asarray, batch)
    run = functools.partial(response_logprobs, config=MODEL.config, remat="none", head_chunk=4)
    logprobs, entropy = jax.jit(run)(MODEL.params, batch=batch)
    plain = jax.jit(forward, static_argnums=1)
    hidden, _ = plain(MODEL.params, MODEL.config, batch.tokens, batch.positions, ends=batch.ends)
    whole = jax.nn.log_softmax(unembed(MODEL.params, MODEL.config, hidden)[0])
    count = int(batch.target_mask.sum())
    nodes, ids = batch.target_nodes[0, :count], batch.target_ids[0, :count]
    np.testing.assert_allclose(logprobs[0, :count], whole[nodes, ids], atol=1e-5)
    wanted = -(jnp.exp(whole) * whole).sum(axis=-1)[nodes]
    np.testing.assert_allclose(entropy[0, :count], wanted, atol=1e-5)
    assert not logprobs[0, count:].any()
    assert not entropy[0, count:].any()


@pytest.mark.parametrize("remat", REMAT_KINDS)
def test_remat_gives_the_same_gradient(remat: RematKind):
    calls = on_policy(conversation(0))
    objective = policy_objective(clip_low=CLIP, clip_high=CLIP)
    made = make_train_functions(MODEL.config, SGD, objective, head_chunk=4, remat=remat)
    (batch,), _ = make_batches(calls, SHAPE)
    start = zero_accumulators(made, MODEL.params)
    grads, _ = made.grads_fn(MODEL.params, *start, *bundles([batch])[0], None)
    for got, want in zip(*map(jax.tree.leaves, (grads, forest_gradient(calls)[0])), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_sgd_update_subtracts_the_gradient():
    calls = on_policy(conversation(0))
    batches, _ = make_batches(calls, SHAPE)
    state, metrics = update(functions(), init_state(fresh_params(), SGD), batches)
    _, expected = separate_gradient(calls)
    assert int(state.step) == 1
    for new, old, grad in zip(
        *map(jax.tree.leaves, (state.params, MODEL.params, expected)), strict=True
    ):
        np.testing.assert_allclose(new, old - grad, atol=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(float(optax.tree.norm(expected)), rel=1e-4)
    assert metrics["train/num_tokens"] == 9
    assert metrics["train/mismatch_kl"] < 0.01
    assert 0.0 < metrics["train/entropy"] <= np.log(MODEL.config.shape.vocab_size) + 1e-5
    assert metrics["train/skipped_updates"] == 0.0


def test_reference_policy_pulls_back():
    """Check that the KL and its gradient are 0 at the reference, and above 0 away from it."""
    calls = [dataclasses.replace(s, advantage=0.0) for s in on_policy(conversation(0))]
    batches, _ = make_batches(calls, SHAPE)
    made = functions(kl_coef=1.0)
    _, at_home = update(made, init_state(fresh_params(), SGD), batches, ref_params=fresh_params())
    assert at_home["train/kl_to_reference"] == pytest.approx(0.0, abs=1e-9)
    assert at_home["train/grad_norm"] == pytest.approx(0.0, abs=1e-6)
    other = jax.tree.map(lambda leaf: 1.5 * leaf, MODEL.params)
    _, away = update(made, init_state(fresh_params(), SGD), batches, other)
    assert away["train/kl_to_reference"] > 1e-4
    assert away["train/grad_norm"] > 1e-3


def test_a_gradient_that_is_not_finite_changes_no_weight():
    broken = dataclasses.replace(conversation(0)[0], advantage=float("inf"))
    batches, _ = make_batches([broken], SHAPE)
    state, metrics = update(functions(), init_state(fresh_params(), SGD), batches)
    assert metrics["train/skipped_updates"] == 1.0
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, MODEL.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.opt_state))


def test_supervised_steps_learn_a_response():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=2))
    made = make_train_functions(SHALLOW.config, optimizer, supervised_objective(), head_chunk=4)
    batches, _ = make_batches(conversation(0), SHAPE)
    state = init_state(fresh_params(SHALLOW), optimizer)
    history = []
    for _ in range(25):
        state, metrics = update(made, state, batches)
        history.append(metrics["train/nll"])
    assert history[0] == pytest.approx(np.log(SHALLOW.config.shape.vocab_size), abs=0.5)
    assert history[-1] < 0.5
    assert compiles(made.grads_fn) == compiles(made.apply_fn) == 1


def test_one_compile_per_batch_shape():
    made, state = functions(), init_state(fresh_params(), SGD)
    state, _ = update(made, state, make_batches(conversation(0), SHAPE)[0])
    before = compiles(made.grads_fn), compiles(made.apply_fn)
    for num_conversations in (5, 2):
        calls = [call for k in range(num_conversations) for call in conversation(k)]
        state, _ = update(made, state, make_batches(calls, SHAPE)[0])
    assert (compiles(made.grads_fn), compiles(made.apply_fn)) == before
    wider = dataclasses.replace(SHAPE, row_len=40)
    update(made, state, make_batches(conversation(0), wider)[0])
    assert (compiles(made.grads_fn), compiles(made.apply_fn)) == (before[0] + 1, before[1])


def test_microbatches_one_by_one_have_the_gradient_of_a_bundle(monkeypatch: pytest.MonkeyPatch):
    batches, _ = make_batches([c for k in range(5) for c in conversation(k)], SHAPE)
    assert 1 < len(batches) < BUNDLE_ON["cpu"]
    bundled, wanted = update(functions(), init_state(fresh_params(), SGD), batches)
    monkeypatch.delitem(BUNDLE_ON, "cpu")
    made = make_train_functions(MODEL.config, SGD, functions().objective, head_chunk=4)
    state, metrics = update(made, init_state(fresh_params(), SGD), batches)
    for one, other in zip(*map(jax.tree.leaves, (state.params, bundled.params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert metrics == pytest.approx(wanted, rel=1e-5)
    update(made, state, [*batches, *batches])
    assert compiles(made.grads_fn) == 1


def test_metrics_come_in_one_transfer(monkeypatch: pytest.MonkeyPatch):
    batches, _ = make_batches([c for k in range(5) for c in conversation(k)], SHAPE)
    assert len(batches) > 1
    transfers = []
    fetch = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: transfers.append(1) or fetch(tree))
    update(functions(), init_state(fresh_params(), SGD), batches)
    assert len(transfers) == 1


def test_no_microbatch_is_refused():
    with raises_coded(InvalidValue, "empty", "batches"):
        update(functions(), init_state(fresh_params(), SGD), [])


def shard(tree, mesh: Mesh):
    """Split each array over all devices along its first axis that divides."""

    def split(leaf):
        at = next((i for i, size in enumerate(leaf.shape) if size % mesh.size == 0), None)
        spec = [None] * leaf.ndim if at is None else [None] * at + ["fsdp"]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(split, tree)


def test_sharded_weights_and_rows_agree_with_one_device():
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",))
    calls = on_policy([call for k in range(9) for call in conversation(k)])
    grads, _, _ = forest_gradient(calls)
    made = functions()
    batches, _ = make_batches(calls, dataclasses.replace(SHAPE, rows=8))
    sharded = [shard(batch, mesh) for batch in batches]
    state, metrics = update(made, init_state(shard(MODEL.params, mesh), SGD), sharded)
    for new, old, grad in zip(
        *map(jax.tree.leaves, (state.params, MODEL.params, grads)), strict=True
    ):
        np.testing.assert_allclose(new, old - grad, atol=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    compiled = compiles(made.grads_fn), compiles(made.apply_fn)
    update(made, state, [*sharded, *sharded])
    assert (compiles(made.grads_fn), compiles(made.apply_fn)) == compiled


def test_bfloat16_compute_keeps_float32_weights():
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6))
    made = make_train_functions(
        SHALLOW.config,
        optimizer,
        supervised_objective(),
        head_chunk=4,
        compute_dtype=jnp.bfloat16,
    )
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), SHALLOW.params)
    before = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), half)
    batches: list[Batch] = make_batches(conversation(0), SHAPE)[0]
    state, _ = update(made, init_state(half, optimizer), batches)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    # An update of 1e-6 would vanish in bfloat16 weights.
    kernel = state.params["layers_0"]["q"]["kernel"]
    assert (np.asarray(kernel) != before["layers_0"]["q"]["kernel"]).mean() > 0.9
