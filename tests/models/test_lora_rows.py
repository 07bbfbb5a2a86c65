"""Tests that a batch whose rows choose among adapters equals each row alone with its adapter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from coded import raises_coded
from engine_bench import Slots

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import LoraConfig, MeshConfig, RematKind
from lightning_jax.models.formats.load import LoadedModel
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import one_of, trained_part
from lightning_jax.models.mesh import batch_sharding, make_mesh
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import make_gather, param_shardings
from lightning_jax.models.transformer import forward
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rl.losses.objectives import policy_objective
from lightning_jax.rl.update.train_state import init_state
from lightning_jax.rl.update.train_step import TrainFunctions, make_train_functions, update
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_policies

LORA = LoraConfig(rank=3, alpha=6.0)
run = jax.jit(forward, static_argnums=1, static_argnames="remat")


MODEL = tiny_policies(LORA)
ALONE = [one_of(MODEL, index) for index in (0, 1)]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_rows_are_read_with_the_chosen_adapter(remat: RematKind) -> None:
    tokens = jax.random.randint(jax.random.key(2), (3, 20), 0, 259)
    positions = jnp.broadcast_to(jnp.arange(20), (3, 20))
    chosen = jnp.array([1, 0, 1])
    mixed, _ = run(MODEL.params, MODEL.config, tokens, positions, adapters=chosen, remat=remat)
    both = [run(model.params, model.config, tokens, positions)[0] for model in ALONE]
    assert np.abs(both[0] - both[1]).max() > 0.1
    for row, index in enumerate([1, 0, 1]):
        np.testing.assert_allclose(mixed[row], both[index][row], atol=1e-5)
    with raises_coded(InvalidValue, "missing", "adapters"):
        forward(MODEL.params, MODEL.config, tokens, positions)
    with raises_coded(InvalidValue, "conflict", "adapters"):
        forward(ALONE[0].params, ALONE[0].config, tokens, positions, adapters=chosen)


SHAPE = BatchConfig(rows=8, row_len=16, max_targets=8, head_chunk=4)
SEQUENCES = [
    dataclasses.replace(
        sequence([1, 2, k], [9, k, 7], advantage=(-1.0) ** k, weight=0.1), adapter=k % 3 // 2
    )
    for k in range(2, 20)
]


SGD = optax.sgd(10.0)


@functools.cache
def functions_of(config: DecoderConfig, sizes: tuple[int, int, int]) -> TrainFunctions:
    gather = make_gather(config, make_mesh(MeshConfig(*sizes)))
    return make_train_functions(config, SGD, policy_objective(), head_chunk=4, gather=gather)


def trained(model: LoadedModel, sequences: list, sizes: tuple[int, int, int]) -> dict:
    """Return the change of the adapters in one step of gradient descent."""
    mesh, functions = make_mesh(MeshConfig(*sizes)), functions_of(model.config, sizes)
    params = jax.device_put(
        jax.tree.map(jnp.copy, model.params), param_shardings(model.config, mesh)
    )
    batches, stats = make_batches(sequences, SHAPE)
    assert stats["train/num_sequences"] == len(sequences)
    sharded = jax.device_put(batches, batch_sharding(mesh))
    state, _ = update(functions, init_state(params, SGD), sharded)
    before = flatten(trained_part(model.params))
    return {path: np.asarray(leaf - before[path]) for path, leaf in flatten(state.params).items()}


@pytest.mark.parametrize("sizes", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_a_step_on_both_adapters_equals_separate_steps(sizes) -> None:
    batches, _ = make_batches(SEQUENCES, SHAPE)
    chosen = np.concatenate([batch.adapters for batch in batches])
    assert {0, 1} == set(chosen.tolist())
    mixed = trained(MODEL, SEQUENCES, sizes)
    for index, alone in enumerate(ALONE):
        rows = [
            dataclasses.replace(sequence, adapter=None)
            for sequence in SEQUENCES
            if sequence.adapter == index
        ]
        assert 0 < len(rows) < len(SEQUENCES)
        for path, change in trained(alone, rows, (1, 1, 1)).items():
            assert np.abs(change).max() > 1e-3
            np.testing.assert_allclose(mixed[path][index], change, atol=1e-5)


def test_slots_decode_with_the_chosen_adapter() -> None:
    serve = ServeConfig(slots=4, max_len=64, prefill_buckets=(16,), prefix_cache_mib=0.0)
    engine = SlotPrograms(MODEL.config, serve)
    slots = Slots(engine, engine.put_on_mesh(MODEL.params))
    ids, greedy = list(range(40, 60)), SamplingParams(temperature=0.0)
    chosen = (1, 0, 0, 1)
    slots.fill(*(Fill(slot, 0, ids[:-1], adapter) for slot, adapter in enumerate(chosen)))
    for slot, adapter in enumerate(chosen):
        slots.activate(slot, ids, greedy, adapter=adapter)
    steps = [slots.step() for _ in range(5)]
    found = [(sampled.tokens, sampled.behavior_logprobs) for sampled in steps]
    single = SlotPrograms(ALONE[0].config, serve)
    assert ALONE[1].config == ALONE[0].config
    for adapter, rows in ((1, (0, 3)), (0, (1, 2))):
        alone = Slots(single, single.put_on_mesh(ALONE[adapter].params))
        alone.begin(0, ids, greedy)
        for tokens, logprobs in found:
            sampled = alone.step()
            for slot in rows:
                assert tokens[slot] == sampled.tokens[0]
                np.testing.assert_allclose(logprobs[slot], sampled.behavior_logprobs[0], atol=1e-5)
    assert not np.allclose(found[0][1][0], found[0][1][1])
