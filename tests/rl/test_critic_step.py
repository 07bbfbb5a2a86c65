"""Tests of a critic in the training step, with gradients of packed against separate sequences."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lightning_jax.models.transformer import forward, unembed
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.microbatches import bundles, measure
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.critic import Critic, CriticState, ValueHead
from lightning_jax.rl.losses.objectives import policy_objective
from lightning_jax.rl.sequence import StateValues, TrainingSequence
from lightning_jax.rl.update.train_state import init_state
from lightning_jax.rl.update.train_step import make_train_functions, update, zero_accumulators
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model(num_layers=1)
HEAD = ValueHead(jax.random.normal(jax.random.key(1), (32,)), jnp.float32(0.25))
SHAPE = BatchConfig(rows=2, row_len=32, max_targets=16, head_chunk=4)
SGD = optax.sgd(1.0)
TRUNK = 0.7
MAX_LEN = 24


def conversation(seed: int, *, per_token: bool) -> list[TrainingSequence]:
    """Build three calls with states, whose prompts extend one another."""
    rng = np.random.default_rng(seed)
    prompt, calls = [1, 2, 3, *rng.integers(10, 250, 2).tolist()], []
    for _ in range(3):
        response = rng.integers(10, 250, 3).tolist()
        positions = (0, 2) if per_token else (0,)
        states = StateValues(
            positions,
            tuple(rng.normal(size=len(positions)).tolist()),
            tuple(rng.normal(size=len(positions)).tolist()),
            weight=0.2,
        )
        call = sequence(
            prompt, response, advantage=float(rng.normal()), loss_mask=(True, False, True)
        )
        # Log-probs near those of random weights, so that few tokens are clipped.
        near = tuple((-np.log(259) + 0.05 * rng.normal(size=3)).tolist())
        calls.append(dataclasses.replace(call, states=states, behavior_logprobs=near))
        prompt = [*prompt, *response, *rng.integers(10, 250, 2).tolist()]
    return calls


@functools.cache
def functions(trunk_coef: float = TRUNK, clip: float = 0.0):
    critic = Critic(SGD, clip, trunk_coef)
    return make_train_functions(
        MODEL.config, SGD, policy_objective(), head_chunk=4, critic=critic
    )  # fmt: skip


def forest_gradient(calls, made=None, shape=SHAPE, head: ValueHead | None = HEAD):
    made = made or functions()
    batches, stats = make_batches(calls, shape)
    grads, sums = zero_accumulators(made, MODEL.params, head=head)
    for bundle in bundles(batches):
        grads, sums = made.grads_fn(MODEL.params, grads, sums, *bundle, None, head)
    return grads, sums, stats


@jax.jit
def plain_gradients(tokens, behavior, trained_at, advantage, weight, states_at, returns):
    """Return the (params, head) gradients of one sequence's clipped loss and of its value loss.

    They are computed with plain causal attention.
    """

    def losses(trained):
        params, head = trained
        hidden, _ = forward(params, MODEL.config, tokens[None], jnp.arange(MAX_LEN)[None])
        logprobs = jax.nn.log_softmax(unembed(params, MODEL.config, hidden)[0])
        chosen = jnp.take_along_axis(logprobs[trained_at], tokens[trained_at + 1][:, None], axis=1)
        ratio = jnp.exp(chosen[:, 0] - behavior)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        values = hidden[0, states_at] @ head.kernel / 32**0.5 + head.bias
        return jnp.stack([-weight * gain.sum(), 0.2 * 0.5 * jnp.square(values - returns).sum()])

    both = jax.jacrev(losses)((MODEL.params, HEAD))
    return tuple(jax.tree.map(lambda leaf, k=k: leaf[k], both) for k in range(2))


def separate_gradients(calls):
    """Sum `plain_gradients` over sequences run one at a time."""
    zeros = jax.tree.map(np.zeros_like, (MODEL.params, HEAD))
    total = (zeros, zeros)
    for call in calls:
        tokens = np.zeros(MAX_LEN, np.int32)
        ids = call.prompt_token_ids + call.response_token_ids
        tokens[: len(ids)] = ids
        first, picked = len(call.prompt_token_ids) - 1, np.flatnonzero(call.loss_mask)
        one = plain_gradients(
            tokens,
            np.asarray(call.behavior_logprobs, np.float32)[picked],
            first + picked,
            call.advantage,
            call.weight,
            first + np.asarray(call.states.positions),
            np.asarray(call.states.returns, np.float32),
        )
        total = jax.tree.map(np.add, total, one)
    return total


def assert_close(got, want, atol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=10 * atol, atol=atol)


@pytest.mark.parametrize("per_token", [False, True])
def test_packed_calls_equal_those_run_apart(per_token):
    """Check several rows and microbatches with common prefixes."""
    calls = [call for seed in range(6) for call in conversation(seed, per_token=per_token)]
    grads, sums, stats = forest_gradient([*calls, calls[0]])  # the first call occurs twice
    assert stats["train/num_rows"] > 2
    assert stats["train/tokens_forest"] < stats["train/tokens_naive"] / 2
    of_policy, of_values = separate_gradients([*calls, calls[0]])
    # Comparing zeros would prove nothing.
    assert min(map(optax.tree.norm, (of_policy[0], *of_values))) > 1e-2
    expected = jax.tree.map(lambda policy, value: policy + TRUNK * value, of_policy, of_values)[0]
    assert_close(grads, (expected, of_values[1]))
    assert sums["train/value_loss"] > 0.1


def test_without_a_coefficient_the_policys_gradient_is_its_own():
    calls = [call for seed in range(2) for call in conversation(seed, per_token=False)]
    (of_params, of_head), _, _ = forest_gradient(calls, functions(0.0))
    plain = make_train_functions(MODEL.config, SGD, policy_objective(), head_chunk=4)
    (alone, nothing), sums, _ = forest_gradient(calls, plain, head=None)
    assert nothing is None and "train/value_loss" not in sums
    assert_close(of_params, alone, atol=1e-7)
    assert_close(of_head, forest_gradient(calls)[0][1], atol=1e-7)


def test_more_padding_and_other_rows_change_nothing():
    calls = [call for seed in range(3) for call in conversation(seed, per_token=True)]
    expected, sums, _ = forest_gradient(calls)
    wider = BatchConfig(rows=3, row_len=48, max_targets=32, head_chunk=4)
    grads, padded, _ = forest_gradient(calls[::-1], shape=wider)
    assert_close(grads, expected, atol=1e-6)
    for name, value in sums.items():
        np.testing.assert_allclose(padded[name], value, rtol=1e-4, atol=1e-6)


def test_values_against_plain_attention():
    calls = conversation(0, per_token=False)
    (batch,), _ = make_batches(calls, SHAPE)
    (values,) = measure(functions().values_fn, [batch], MODEL.params, HEAD)
    longest = calls[-1].prompt_token_ids + calls[-1].response_token_ids
    tokens = jnp.asarray([longest])
    positions = jnp.arange(len(longest))[None]
    hidden, _ = jax.jit(forward, static_argnums=1)(MODEL.params, MODEL.config, tokens, positions)
    wanted = hidden[0] @ HEAD.kernel / 32**0.5 + HEAD.bias
    # Prompts have 5, 10 and 15 tokens. The first and third token of each response are trained.
    np.testing.assert_allclose(values[0, :6], wanted[jnp.asarray([4, 6, 9, 11, 14, 16])], atol=1e-5)
    assert not values[0, 6:].any() and not values[1].any()


def sharded(tree, mesh: Mesh, spec: tuple[str, ...] = ()):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), tree)


def test_one_and_eight_devices_take_the_same_steps():
    calls = [call for seed in range(8) for call in conversation(seed, per_token=False)]
    optimizer = optax.sgd(0.1, momentum=0.9)
    made = make_train_functions(
        MODEL.config,
        optimizer,
        policy_objective(),
        head_chunk=4,
        critic=Critic(optax.adam(1e-2), 0.1, TRUNK),
    )
    batches, _ = make_batches(calls, dataclasses.replace(SHAPE, rows=8))
    states = []
    for num in (1, 8):
        mesh = Mesh(np.asarray(jax.devices()[:num]), ("data",))
        params = sharded(jax.tree.map(jnp.copy, MODEL.params), mesh)
        state = init_state(params, optimizer, made.critic)
        metrics = {}
        for _ in range(3):
            state, metrics = update(made, state, sharded(batches, mesh, ("data",)))
        states.append(state)
        assert metrics["train/value_grad_norm"] > 0
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {mesh}
    apply_fn: Any = made.apply_fn
    assert apply_fn._cache_size() == 2  # once for each mesh, not once more in step two
    assert_close(states[0], states[1])
    assert np.abs(states[0].critic.head.kernel).max() > 1e-2


def test_a_gradient_that_is_not_finite_moves_neither():
    (call, *_) = conversation(0, per_token=False)
    assert call.states is not None
    broken = dataclasses.replace(
        call, states=dataclasses.replace(call.states, returns=(float("inf"),))
    )
    batches, _ = make_batches([broken], SHAPE)
    start = init_state(jax.tree.map(jnp.copy, MODEL.params), SGD, functions(0.0).critic)
    head = jax.tree.map(jnp.copy, HEAD)
    start = dataclasses.replace(start, critic=CriticState(head, start.critic.opt_state))
    state, metrics = update(functions(0.0), start, batches)
    assert metrics["train/skipped_updates"] == 1.0
    assert_close(state.params, MODEL.params, atol=0.0)
    assert_close(state.critic.head, HEAD, atol=0.0)


def test_the_head_learns_what_it_is_told():
    """Check returns that depend on the prompt's length: 1 for longer prompts, 0 for the first."""
    calls = [
        dataclasses.replace(
            call, states=StateValues((0,), (0.0,), (float(turn > 0),), 1 / 6), advantage=0.0
        )
        for seed in range(2)
        for turn, call in enumerate(conversation(seed, per_token=False))
    ]
    made = make_train_functions(
        MODEL.config, SGD, policy_objective(), head_chunk=4, critic=Critic(optax.adam(0.1))
    )
    batches, _ = make_batches(calls, SHAPE)
    state = init_state(jax.tree.map(jnp.copy, MODEL.params), SGD, made.critic)
    history = []
    for _ in range(60):
        state, metrics = update(made, state, batches)
        history.append(metrics["train/value_loss"])
    assert history[0] == pytest.approx(0.5 * 4 / 6)  # four of six returns are 1
    assert history[-1] < 0.02
    assert_close(state.params, MODEL.params, atol=0.0)
