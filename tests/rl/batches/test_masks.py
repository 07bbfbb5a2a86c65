"""Tests of grammar masks in training: counts, replay, tables and steps."""

import asyncio
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.grammar.compiler import GrammarCompiler, grammar, json_schema
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.batches.masks import mask_metrics, with_masks
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rl.losses.objectives import policy_objective
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.train_step import make_train_functions
from lightning_jax.rl.update.updater import Updater
from lightning_jax.testing.records import sequence, trajectory, transition
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.types import Transition

STRICT_PROMOTION = False  # optax mixes dtypes
MODEL = tiny_model(num_layers=1)
VOCAB = MODEL.config.shape.vocab_size
COMPILER = GrammarCompiler(MODEL.tokenizer, VOCAB)
A, B, C = MODEL.tokenizer.encode("abc", special=False)
SHAPE = BatchConfig(rows=8, row_len=128, max_targets=128, head_chunk=16)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 30, 45]}, "yes": {"type": "boolean"}},
    "required": ["n", "yes"],
}


def test_tokens_whose_distribution_lost_a_tenth_of_its_mass_are_counted() -> None:
    """A mask took 0, 5, 20 and 60 % of the mass of four trained tokens; a fifth was forced."""
    call = transition([1], [2, 3, 4, 5, 6], forced=(False,) * 4 + (True,))
    sampling = tuple(
        logprob - math.log(1.0 - lost)
        for logprob, lost in zip(call.behavior_logprobs, (0.0, 0.05, 0.2, 0.6, 0.9), strict=True)
    )
    adjusted = trajectory(dataclasses.replace(call, sampling_logprobs=sampling), reward=1.0)
    sequences, _ = prepare_step([adjusted], AlgorithmConfig(), policy_version=0)
    assert mask_metrics(sequences) == {"train/masked_share": 0.0, "train/adjusted_share": 0.5}
    warm = dataclasses.replace(adjusted.transitions[0], temperature=0.7, tempered_logprobs=sampling)
    tempered = dataclasses.replace(adjusted, transitions=(warm,))
    sequences, _ = prepare_step([tempered], AlgorithmConfig(), policy_version=0)
    assert mask_metrics(sequences)["train/adjusted_share"] == 0.0


def test_what_nobody_sampled_has_no_share() -> None:
    assert mask_metrics([]) == {} == mask_metrics([sequence([1], [2])])


def of_grammar(response: list[int], text: str, loss_mask: tuple[bool, ...] = ()):
    """Return a response that was sampled under a grammar with log-probs of 0."""
    return dataclasses.replace(
        sequence([1], response, loss_mask=loss_mask),
        sampling_logprobs=(0.0,) * len(response),
        grammar=text,
    )


def allowed_ids(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def test_a_replay_gives_each_trained_token_what_was_allowed_there() -> None:
    """The last two tokens are not trained, so nothing is replayed for them."""
    plain = sequence([1], [A])
    item = of_grammar([A, B, C, C], 'start: ("a" | "b") /[bc]/ "cc"', (True, True, False, False))
    (masked, kept), metrics = with_masks([item, plain], COMPILER)
    assert [allowed_ids(mask) for mask in masked.masks] == [[A, B], [B, C], [], []]
    assert masked.behavior_logprobs == (0.0,) * 4
    assert kept == plain and metrics["train/calls_without_mask"] == 0.0
    assert with_masks([plain], COMPILER) == ([plain], {})
    (again,), _ = with_masks([masked], COMPILER)
    assert again is masked


@pytest.mark.parametrize("text", ['start: "a" "a"', "start: /[/", 'start: "a"'])
def test_a_response_that_its_grammar_does_not_give_is_counted(text: str) -> None:
    item = of_grammar([A, B], text)
    assert with_masks([item], COMPILER)[0] == [item]
    assert with_masks([item], COMPILER)[1]["train/calls_without_mask"] == 1.0


def test_a_row_has_each_mask_once_and_pairs_with_other_masks_apart() -> None:
    shape = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)
    two, any_letter = 'start: ("a" | "b") /[ab]/', "start: /[a-z]{2}/"
    items = [of_grammar([A, A], two), of_grammar([A, B], two), of_grammar([A, A], any_letter)]
    items, _ = with_masks([*items, dataclasses.replace(items[0], grammar=None)], COMPILER)
    (batch,), stats = make_batches(items, shape)
    masks = batch.distinct.masks
    assert masks.table.shape == (1, 64, (VOCAB + 7) // 8)
    used = [allowed_ids(row) for row in masks.table[0]]
    assert used[1] == [A, B] and len(used[2]) == 26
    assert all(row == list(range(8 * masks.table.shape[2])) for row in (used[0], *used[3:]))
    # The first letter has three masks, and so has the second letter if it is an a.
    assert stats["train/num_distinct_targets"] == 3 + 3 + 1
    of_targets = np.take(masks.of_pairs[0], batch.distinct.of_targets[0])[batch.target_mask[0]]
    by_call = dict(zip(batch.target_calls[0][batch.target_mask[0]], of_targets, strict=False))
    assert [by_call[call] for call in range(4)] == [1, 1, 2, 0]
    (plain,), _ = make_batches(items[3:], shape)
    assert plain.distinct.masks is None


@functools.cache
def sampled_step() -> tuple[TrainingSequence, ...]:
    """Sample calls with and without a schema at two temperatures, and prepare them."""
    serve = ServeConfig(slots=8, max_len=96, prefill_buckets=(8,))
    loop = EngineLoop(SlotPrograms(MODEL.config, serve), MODEL.params, 0, MODEL.tokenizer, serve)

    async def sample() -> list[Transition]:
        prompt, calls = tuple(MODEL.tokenizer.encode("json:")), []
        for seed in range(8):
            text = grammar(json_schema(SCHEMA)) if seed % 4 else None
            params = SamplingParams(
                max_tokens=30, grammar=text, seed=seed, temperature=0.7 if seed > 4 else 1.0
            )
            calls.append((params, loop.submit(prompt, params).result()))
        return [as_transition(prompt, params, await done) for params, done in calls]

    loop.start()
    try:
        calls = asyncio.run(sample())
    finally:
        loop.close()
    rollouts = [trajectory(c, reward=float(i % 3), rollout=str(i)) for i, c in enumerate(calls)]
    return tuple(prepare_step(rollouts, AlgorithmConfig(), policy_version=0)[0])


def as_transition(prompt: tuple[int, ...], params: SamplingParams, done: Any) -> Transition:
    return Transition(
        call_id="c",
        rollout_id="r",
        prompt_token_ids=prompt,
        response_token_ids=done.token_ids,
        behavior_logprobs=done.behavior_logprobs,
        sampling_logprobs=done.sampling_logprobs,
        policy_versions=done.policy_versions,
        finish_reason=done.finish_reason,
        forced=done.forced,
        temperature=params.temperature,
        tempered_logprobs=done.tempered_logprobs,
        grammar=params.grammar,
    )


@functools.cache
def learner(devices: int, shape: BatchConfig = SHAPE) -> Updater:
    """Build an updater whose update subtracts the gradient."""
    mesh, sgd = make_mesh(MeshConfig(), jax.devices()[:devices]), optax.sgd(1.0)
    functions = make_train_functions(
        MODEL.config, sgd, policy_objective(AlgorithmConfig()), head_chunk=shape.largest_chunk
    )
    return Updater(MODEL.config, mesh, sgd, functions, shape, skip_zero_advantage=True)


def updated(made: Updater, sequences: Any) -> tuple[Any, dict[str, float]]:
    state = made.init(jax.tree.map(jnp.copy, MODEL.params))
    state, metrics = made.update(state, sequences, None)
    return jax.device_get(state.params), metrics


def test_a_first_update_has_ratio_1_under_a_schema_wherever_calls_lie() -> None:
    sequences, metrics = with_masks(sampled_step(), COMPILER)
    assert metrics["train/calls_without_mask"] == 0.0
    small = BatchConfig(rows=8, row_len=64, max_targets=64, head_chunk=8)
    results = [updated(learner(1), sequences), updated(learner(8, small), sequences[::-1])]
    for params, found in results:
        assert found["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert found["train/mismatch_kl"] < 1e-9
        assert found["train/adjusted_share"] == 0.0 < found["train/masked_share"] < 1.0
        for leaf, wanted in zip(*map(jax.tree.leaves, (params, results[0][0])), strict=True):
            np.testing.assert_allclose(leaf, wanted, atol=1e-6)
    assert mask_metrics(sampled_step())["train/adjusted_share"] > 0.2


def test_other_grammars_compile_nothing_new() -> None:
    made = learner(1)
    count = made.functions.grads_fn._cache_size  # pyright: ignore[reportFunctionMemberAccess]
    free = [item for item in sampled_step() if item.grammar is None]
    masked, _ = with_masks(sampled_step(), COMPILER)
    item = dataclasses.replace(of_grammar([A, B], "start: /[a-z]{2}/"), temperature=0.7)
    other, _ = with_masks([item], COMPILER)
    updated(made, masked)
    before = count()
    updated(made, other)
    assert count() == before
    for _ in range(2):
        updated(made, free)
    assert count() <= before + 1
