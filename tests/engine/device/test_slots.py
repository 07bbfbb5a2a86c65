"""Tests that slots compute the same as one full forward pass, regardless of other slots."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_bench import Slots, full_logprobs, full_pass
from jax.experimental.compilation_cache import compilation_cache
from window.shapes import shape_of

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device import programs
from lightning_jax.engine.device import slots as slots_module
from lightning_jax.engine.device.slots import Fill, SlotPrograms
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.types import SamplingParams
from lightning_jax.errors import InvalidValue
from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.sharding import param_shardings
from lightning_jax.models.transformer import init_params
from lightning_jax.settings import ConfigError
from lightning_jax.testing.tiny import tiny_model, with_mixers
from lightning_jax.train.memory.targets import target_devices

LENGTHS = (270, 41, 9, 60, 2)
GREEDY = SamplingParams(temperature=0.0)


def row_of(slots: Slots, slot: int, length: int) -> Any:
    """Return copies of the keys and values of a slot's first `length` tokens."""
    layers = slots.state.cache.layers
    keys = [np.concatenate(layer.keys, 3)[slot, :, :, :length] for layer in layers]
    return keys, [np.concatenate(layer.values, 2)[slot, :, :length] for layer in layers]


@pytest.mark.parametrize("length", [1, 2, 9, 33, 70])  # none, one and several chunks
def test_prefill_and_decode_equal_one_full_pass(model, engine, length):
    params = engine.put_on_mesh(model.params)
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    sampling = SamplingParams(temperature=1.0)
    slots = Slots(engine, params)
    slots.begin(2, ids, sampling)
    tokens, logprobs = slots.decode([2], 12)
    response = tokens[:, 0].tolist()
    expected = full_logprobs(model, ids + response)[length - 1 : -1]
    np.testing.assert_allclose(logprobs[:, 0], expected[np.arange(12), response], atol=1e-5)


def test_beside_bfloat16_weights_activations_may_be_float32():
    model = tiny_model(0)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    config = model.config.with_execution(activation_dtype="float32")
    engine = SlotPrograms(config, ServeConfig(slots=4, max_len=96), dtype="bfloat16")
    slots = Slots(engine, engine.put_on_mesh(model.params))
    assert {leaf.dtype for leaf in jax.tree.leaves((slots.state.cache, slots.params))} == {
        jnp.dtype("bfloat16")
    }
    ids = list(range(30, 70))
    slots.begin(2, ids)
    tokens, logprobs = slots.decode([2], 12)
    response = tokens[:, 0].tolist()
    padded = np.pad(ids + response, (0, 128 - len(ids) - 12))
    expected = full_pass(params, config, padded)[len(ids) - 1 : len(ids) + 11]
    # Keys and values are rounded in the cache, and sums in another order may round differently.
    np.testing.assert_allclose(logprobs[:, 0], expected[np.arange(12), response], atol=5e-3)


def test_one_cpu_writes_to_a_bfloat16_cache_where_it_lies(model):
    """XLA in JAX 0.10 would first convert the whole cache to float32."""

    def float32_of_the_cache(options):
        write = jax.jit(programs.prefill, static_argnames="config", compiler_options=options)
        cache = init_cache(model.config.shape, 4, 96, jnp.bfloat16)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
        prompts = np.arange(8 + len(programs.PromptColumn), dtype=np.int32)[None]
        text = write.lower(params, cache, prompts, config=model.config)
        shape = ",".join(map(str, cache.layers[0].keys[0].shape))
        return f"f32[{shape}]" in str(text.compile().as_text())

    engine = SlotPrograms(model.config, ServeConfig(slots=4, max_len=96), dtype="bfloat16")
    assert not float32_of_the_cache(engine.compiler_options)
    assert float32_of_the_cache(None) or jax.__version_info__ >= (0, 11)  # hence the option
    assert SlotPrograms(model.config, ServeConfig(slots=4, max_len=96)).compiler_options is None


def test_one_cpu_serves_turned_kernels(model, engine):
    query = engine.put_on_mesh(model.params)["layers_0"]["q"]
    np.testing.assert_array_equal(query["kernel_t"], model.params["layers_0"]["q"]["kernel"].T)
    assert engine.config.execution.turned and "kernel" not in query


def test_prompts_filled_together_while_another_decodes_are_as_if_alone(model):
    engine = SlotPrograms(model.config, ServeConfig(slots=6, max_len=300, prefill_buckets=(8, 32)))
    params, rng = engine.put_on_mesh(model.params), np.random.default_rng(0)
    rows = (4, 0, 5, 2, 3)  # five: one batch of four chunks and single ones
    prompts = {row: rng.integers(0, 256, n).tolist() for row, n in zip(rows, LENGTHS, strict=True)}
    slots = Slots(engine, params)
    slots.begin(1, [7, 8, 9])
    first, _ = slots.decode([1], 4)
    half = {row: len(ids) // 2 for row, ids in prompts.items()}
    slots.fill(*(Fill(row, 0, prompts[row][: half[row]]) for row in rows))
    slots.fill(*(Fill(row, half[row], prompts[row][half[row] : -1]) for row in reversed(rows)))
    for row, ids in prompts.items():
        slots.activate(row, ids, GREEDY)
    tokens, logprobs = slots.decode([*rows, 1], 5)
    for i, ids in enumerate(prompts.values()):
        response = tokens[:, i].tolist()
        expected = full_logprobs(model, ids + response)[len(ids) - 1 : -1]
        np.testing.assert_allclose(logprobs[:, i], expected[np.arange(5), response], atol=1e-5)
    # The running slot continues undisturbed.
    alone = Slots(engine, params)
    alone.begin(1, [7, 8, 9])
    undisturbed, _ = alone.decode([1], 9)
    assert undisturbed[:, 0].tolist() == [*first[:, 0], *tokens[:, len(rows)]]


def test_a_row_that_has_ended_stays_readable_while_others_decode(model, engine):
    slots = Slots(engine, engine.put_on_mesh(model.params))
    slots.begin(1, list(range(20)))
    slots.begin(0, [5, 6, 7])
    slots.step()
    before = row_of(slots, 1, 20)
    for _ in range(6):
        slots.step([0])
    jax.tree.map(np.testing.assert_array_equal, before, row_of(slots, 1, 20))


def test_greedy_tokens_do_not_depend_on_batch_mates(model, engine):
    params = engine.put_on_mesh(model.params)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 256, n).tolist() for n in (5, 17, 40, 62)]
    joint = Slots(engine, params)
    for slot, ids in enumerate(prompts):
        joint.begin(slot, ids)
    batch, _ = joint.decode([0, 1, 2, 3], 16)
    for slot, ids in enumerate(prompts):
        alone = Slots(engine, params)
        alone.begin(3 - slot, ids)
        tokens, _ = alone.decode([3 - slot], 16)
        assert tokens[:, 0].tolist() == batch[:, slot].tolist()


def test_one_token_has_one_key_whatever_the_slot_and_the_step(model, engine):
    params = engine.put_on_mesh(model.params)
    sampling = SamplingParams(temperature=1.0)
    first, late = Slots(engine, params), Slots(engine, params)
    first.begin(0, [1, 2, 3], sampling)
    tokens, _ = first.decode([0], 8)
    late.begin(1, [9, 9], sampling)
    late.decode([1], 3)
    late.begin(2, [1, 2, 3], sampling)
    again, _ = late.decode([2], 8)
    assert again[:, 0].tolist() == tokens[:, 0].tolist()


def test_reading_less_of_the_cache_changes_nothing():
    model = tiny_model(0, num_layers=1)
    engine = SlotPrograms(model.config, ServeConfig(slots=2, max_len=600, prefill_buckets=(64,)))
    assert engine.capacities == (256, 512, 600)
    params = engine.put_on_mesh(model.params)
    sampled = []
    for others in ([], list(range(300)), list(range(550))):
        slots = Slots(engine, params)
        slots.begin(0, list(range(100)))
        if others:
            slots.begin(1, others)
        sampled.append(slots.step().behavior_logprobs[0])
    assert engine._generate.ready == {(1, 1), (2, 2), (3, 2)}
    np.testing.assert_allclose(sampled, sampled[0], atol=1e-6)


@pytest.mark.parametrize(("platform", "slot_counts"), [("gpu", (1, 4, 8, 9)), ("tpu", (8, 9))])
def test_rows_of_an_accelerator_lie_in_one_piece_and_serve_the_same(
    model, monkeypatch, platform, slot_counts
):
    monkeypatch.setattr(slots_module, "platform_of", lambda _: platform)
    engine = SlotPrograms(model.config, ServeConfig(slots=9, max_len=380, prefill_buckets=(64,)))
    assert engine.capacities == (380,) and engine.slot_counts == slot_counts
    assert engine.init_state().cache.length == 384
    ids = np.random.default_rng(3).integers(0, 256, 300).tolist()
    slots = Slots(engine, engine.put_on_mesh(model.params))
    assert ("layers" in slots.params) == (platform == "gpu")
    slots.begin(2, ids)
    tokens, logprobs = slots.decode([2], 4)
    response = tokens[:, 0].tolist()
    expected = full_logprobs(model, ids + response)[299:-1]
    np.testing.assert_allclose(logprobs[:, 0], expected[np.arange(4), response], atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "name", "steps"),
    [
        *(("gpu", "135m", 4), ("gpu", "0.5b", 4), ("tpu", "0.5b", 4)),
        *(("gpu", "1.5b", 2), ("tpu", "1.5b", 2), ("gpu", "8b", 1)),
        *(("cpu", "tiny", 1), ("cpu", "1.5b", 1)),
    ],
)
def test_small_models_take_several_steps_per_dispatch_on_an_accelerator(
    platform: str, name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "platform_of", lambda _: platform)
    serve = ServeConfig(slots=4, max_len=96)
    config = shape_of(name)
    assert SlotPrograms(config, serve).steps_per_dispatch == steps
    for number in (1, 3):
        programs = SlotPrograms(config, replace(serve, steps_per_dispatch=number))
        assert programs.steps_per_dispatch == number


def test_stepping_fewer_slots_changes_nothing(model, engine):
    params = engine.put_on_mesh(model.params)
    assert engine.slot_counts == (1, 4)
    results = []
    for chosen in ([0], [0, 1], [0, 1, 2, 3]):
        slots = Slots(engine, params)
        slots.begin(0, [1, 2, 3, 4], SamplingParams())
        steps = []
        for _ in range(5):
            sampled = slots.step(chosen)
            steps.append((int(sampled.tokens[0]), float(sampled.behavior_logprobs[0])))
        results.append(steps)
        assert slots.table.positions([0]).tolist() == [8]
        assert slots.table.counts()[0] == 5
    for steps in results[:2]:
        assert [token for token, _ in steps] == [token for token, _ in results[2]]
        np.testing.assert_allclose(
            [logprob for _, logprob in steps], [logprob for _, logprob in results[2]], atol=1e-5
        )


def test_a_bias_of_one_slot_does_not_reach_the_others(model, engine):
    params = engine.put_on_mesh(model.params)
    plain = SamplingParams(temperature=1.0, top_p=0.9)
    results = []
    for biased in (False, True):
        slots = Slots(engine, params)
        slots.begin(0, [1, 2, 3], plain)
        slots.begin(2, [7, 8, 9], plain)
        adjustment = engine.adjustment(has_bias=True)
        adjustment.bias[2] = np.where(np.arange(model.config.shape.vocab_size) < 5, 0.0, -np.inf)
        tokens, logprobs = [], []
        for _ in range(12):
            sampled = slots.step(adjustment=adjustment if biased else None)
            tokens.append(sampled.tokens[:3].tolist())
            logprobs.append([sampled.behavior_logprobs[0], sampled.sampling_logprobs[0]])
        results.append((np.array(tokens), np.array(logprobs)))
    (alone, alone_logprobs), (shared, shared_logprobs) = results
    assert shared[:, 0].tolist() == alone[:, 0].tolist()
    np.testing.assert_allclose(shared_logprobs, alone_logprobs, atol=1e-5)
    assert shared[:, 2].max() < 5 <= alone[:, 2].max()


def test_the_likeliest_tokens_are_the_policys_own_whatever_the_bias(model, engine):
    params = engine.put_on_mesh(model.params)
    ids = [3, 1, 4, 1, 5]
    slots = Slots(engine, params)
    slots.begin(1, ids)
    adjustment = engine.adjustment(has_bias=True, has_likeliest=True)
    adjustment.bias[1, 17] = 100.0
    sampled = slots.step(adjustment=adjustment)
    assert sampled.likeliest is not None
    assert sampled.tokens[1] == 17  # greedy follows the bias
    expected = full_logprobs(model, ids)[-1]
    best = np.argsort(-expected)[:20]
    assert sampled.likeliest.ids[1].tolist() == best.tolist()
    np.testing.assert_allclose(sampled.likeliest.logprobs[1], expected[best], atol=1e-5)
    np.testing.assert_allclose(sampled.behavior_logprobs[1], expected[17], atol=1e-5)


def test_nothing_compiles_after_warmup():
    model = tiny_model(0, num_layers=1)
    engine = SlotPrograms(
        model.config, ServeConfig(slots=4, max_len=300, prefill_buckets=(32, 512))
    )
    params = engine.put_on_mesh(model.params)
    engine.warmup(params, engine.init_state())
    slots = Slots(engine, params)
    compiled = engine.compiles
    slots.params = engine.put_on_mesh(jax.tree.map(lambda leaf: leaf * 1.1, model.params))
    for slot, length in ((0, 1), (1, 7), (0, 30), (3, 290)):
        slots.fill(*(Fill(row, slot, [1] * (length - row)) for row in range(min(4, length))))
        slots.begin(slot, [1] * length)
        slots.step()
        slots.step([0])
        for has_bias in (False, True):
            slots.step(adjustment=engine.adjustment(has_bias, has_likeliest=length > 7))
    assert engine.compiles == compiled
    # One for each number of cache segments that a step may read, and one with a bias.
    sizes = (len(engine._generate_adjusted.ready), len(engine._generate_biased.ready))
    assert sizes == (len(engine.capacities), 1) == (2, 1)


@pytest.mark.parametrize(("num_requests", "sizes"), [(1, {(1, 1), (2, 8)}), (90, {(1, 8), (2, 8)})])
def test_the_first_programs_fit_the_first_requests(
    num_requests: int, sizes: set[tuple[int, int]]
) -> None:
    model = tiny_model(0, num_layers=1)
    programs = SlotPrograms(
        model.config, ServeConfig(slots=8, max_len=300, prefill_buckets=(16, 128))
    )
    state = programs.init_state()
    programs.compile_first(programs.put_on_mesh(model.params), state, num_requests)
    while not sizes <= programs._generate.ready:
        time.sleep(0.01)
    programs.compiler.close()
    assert programs._generate.ready == sizes and programs._prefill.ready == {(16, 1)}


def test_a_prompt_runs_in_small_chunks_until_its_program_is_compiled() -> None:
    model = tiny_model(0, num_layers=1)
    programs = SlotPrograms(
        model.config, ServeConfig(slots=4, max_len=300, prefill_buckets=(16, 128))
    )
    params = programs.put_on_mesh(model.params)
    prompts = [Fill(row, 0, list(range(1, 100))) for row in range(4)]
    first = programs.prefill(params, programs.init_state().cache, prompts)
    assert (16, 1) in programs._prefill.ready
    programs.compiler.close()
    assert (128, 4) not in programs._prefill.ready  # does not pay back yet
    programs._prefill._compile_s = 0.0  # as if the cache on disk had it
    programs.prefill(params, programs.init_state().cache, prompts)  # 28 calls of the smallest
    while (128, 4) not in programs._prefill.ready:
        time.sleep(0.01)
    second = programs.prefill(params, programs.init_state().cache, prompts)
    for before, after in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(before[:, :99], after[:, :99], atol=1e-5)


def test_a_slot_left_out_of_steps_samples_the_same_later(model, engine):
    params = engine.put_on_mesh(model.params)
    sampling = SamplingParams(temperature=1.0)

    def both() -> Slots:
        slots = Slots(engine, params)
        slots.begin(0, [1, 2, 3], sampling)
        slots.begin(1, [1, 2, 3, 4, 5], sampling)
        return slots

    expected, logprobs = both().decode([0, 1], 4)
    found, slots = {0: [], 1: []}, both()
    for chosen in ([0], [0, 1], [1], [0], [1], [0, 1]):
        sampled = slots.step(chosen)
        for slot in chosen:
            pair = sampled.tokens[slot], sampled.behavior_logprobs[slot]
            found[slot].append([float(value) for value in pair])
    for slot, pairs in found.items():
        tokens, given = zip(*pairs, strict=True)
        assert list(tokens) == expected[:, slot].tolist()
        np.testing.assert_allclose(given, logprobs[:, slot], atol=1e-5)
    assert slots.table.counts()[:2].tolist() == [4, 4]


def test_donated_weights_do_not_hurt_the_engine(model, engine):
    copy = jax.tree.map(jnp.array, model.params)
    served = engine.put_on_mesh(copy)
    jax.tree.map(lambda leaf: leaf.delete(), copy)
    assert np.isfinite(np.asarray(jax.tree.leaves(served)[0])).all()


def test_one_and_eight_devices_agree(model, engine):
    from lightning_jax.models.mesh import make_mesh

    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    wide = SlotPrograms(
        model.config, ServeConfig(slots=4, max_len=96, prefill_buckets=(8, 32)), mesh=mesh
    )
    ids = list(range(30, 70))
    results = []
    for one in (engine, wide):
        slots = Slots(one, one.put_on_mesh(model.params))
        slots.begin(1, ids)
        tokens, logprobs = slots.decode([1], 6)
        adjustment = one.adjustment(has_bias=True, has_likeliest=True)
        adjustment.bias[:] = np.arange(model.config.shape.vocab_size)
        biased = slots.step(adjustment=adjustment)
        assert biased.likeliest is not None
        results.append((tokens, logprobs, biased.likeliest.logprobs[1], int(biased.tokens[1])))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-5)
    np.testing.assert_allclose(results[0][2], results[1][2], atol=1e-5)
    assert results[0][3] == results[1][3] == model.config.shape.vocab_size - 1


def test_what_does_not_fit_is_refused(model, engine):
    params = engine.put_on_mesh(model.params)
    with pytest.raises(InvalidValue) as caught:
        engine.prefill(params, engine.init_state().cache, [Fill(0, 40, [1] * 57)])
    assert caught.value.reason == "too_long"
    assert {"97", "96"} <= set(re.findall(r"\d+", str(caught.value)))
    with pytest.raises(ConfigError) as refused:
        SlotPrograms(model.config, ServeConfig(max_len=4096))
    assert (refused.value.key, refused.value.reason) == ("serve.max_len", "out_of_range")
    assert "2048" in str(refused.value)


@pytest.fixture
def no_kept_programs() -> Iterator[None]:
    """Disable JAX's compilation cache, which cannot reload programs for absent devices."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def libtpu() -> None:
    pytest.importorskip("libtpu")


@pytest.mark.usefixtures("no_kept_programs")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("target", "compiler"),
    [
        pytest.param("v5e:2x2", "libtpu", marks=pytest.mark.slow),
        pytest.param("h100:4", "h100", marks=pytest.mark.gpu_compiler),
    ],
)
def test_no_accelerator_copies_the_cache(
    target: str, compiler: str, head_dim: int, request: pytest.FixtureRequest
) -> None:
    """The accelerators' compilers need no device."""
    request.getfixturevalue(compiler)
    config = with_mixers(tiny_model(0).config, head_dim=head_dim).with_shape(max_positions=8192)
    mesh = make_mesh(MeshConfig(1, 2, 2), target_devices(target)[0])
    serve = ServeConfig(slots=64, max_len=8192)  # too large for a TPU's core memory
    engine = SlotPrograms(config, serve, dtype="bfloat16", mesh=mesh)

    def with_shardings(tree: Any, shardings: Any) -> Any:
        def one(leaf: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(one, tree, shardings)

    params = jax.eval_shape(partial(init_params, config, dtype=jnp.bfloat16), jax.random.key(0))
    params = with_shardings(params, param_shardings(config, mesh))
    state = engine._init.lower().out_info
    state = with_shardings(state, jax.tree.map(lambda leaf: leaf.sharding, state))
    table = SlotTable(64).next_steps(())
    prompts = engine._prompts(128, 4)
    # From JAX 0.11 on, a kernel for an absent GPU is lowered only under a mesh that names the GPU.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        programs = [
            engine._generate.lower((1, 64), params, state, table),
            engine._prefill.lower((128, 4), params, state.cache, prompts),
        ]
    keys = state.cache.layers[0].keys[0]
    shape = "bf16[" + ",".join(map(str, keys.sharding.shard_shape(keys.shape))) + "]"
    for program in programs:
        compiled = program.compile()
        lines = str(compiled.as_text()).splitlines()
        copies = [line for line in lines if f"= {shape}" in line and " copy" in line]
        assert not copies, copies[0]
        memory = compiled.memory_analysis()
        assert memory is not None and memory.temp_size_in_bytes < 4 * keys.size
