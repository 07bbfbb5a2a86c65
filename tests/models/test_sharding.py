"""Tests that one device and eight simulated devices compute the same."""

import dataclasses
import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from coded import raises_coded
from jax.sharding import PartitionSpec

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig, RematKind
from lightning_jax.models.mesh import batch_sharding, make_mesh, serving_mesh
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Dense
from lightning_jax.models.sharding import cache_sharding, param_shardings
from lightning_jax.models.transformer import forward, init_params, unembed
from lightning_jax.rl.config import BatchConfig, DistillConfig, OptimizerConfig
from lightning_jax.rl.update.updater import Updater
from lightning_jax.settings import ConfigError
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.state.updaters import phase_updater


def _loss(params, config, tokens, positions, ends, remat):
    hidden, _ = forward(params, config, tokens, positions, ends=ends, remat=remat)
    logits = unembed(params, config, hidden)
    targets = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), config.shape.vocab_size)
    return -(jax.nn.log_softmax(logits) * targets).sum(axis=-1).mean()


def test_loss_and_gradient_agree_on_one_and_eight_devices():
    sizes, remat = (1, 4, 2), "full"
    model = tiny_model(num_layers=1)
    tokens = jax.random.randint(jax.random.key(1), (8, 160), 0, 259)
    positions = jnp.broadcast_to(jnp.arange(160), (8, 160))
    ends = jnp.where(positions < 90, 90, 160)
    mesh = make_mesh(MeshConfig(*sizes))
    params = jax.device_put(model.params, param_shardings(model.config, mesh))
    rows = jax.device_put((tokens, positions, ends), batch_sharding(mesh))
    step = jax.jit(jax.value_and_grad(_loss), static_argnums=(1, 5))
    loss, grads = step(model.params, model.config, tokens, positions, ends, remat)
    sharded_loss, sharded = step(params, model.config, *rows, remat)
    assert len(sharded["layers_0"]["q"]["kernel"].sharding.device_set) == 8
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-6)


def test_decode_agrees_on_one_and_eight_devices():
    model = tiny_model(num_layers=1)
    config = model.config
    mesh = make_mesh(MeshConfig(1, 4, 2))
    cache = init_cache(config.shape, 3, 32)
    tokens = jnp.array([[5], [6], [7]])
    positions = jnp.array([[0], [0], [32]])
    step = jax.jit(forward, static_argnums=1)
    hidden, _ = step(model.params, config, tokens, positions, cache=cache)
    params = jax.device_put(model.params, param_shardings(config, mesh))
    cache = jax.device_put(cache, cache_sharding(config.shape, mesh))
    sharded, cache = step(params, config, tokens, positions, cache=cache)
    np.testing.assert_allclose(sharded[:2], hidden[:2], atol=1e-5)
    assert np.abs(cache.layers[0].keys[0][0, :, :, 0]).min() > 0
    assert not np.any(cache.layers[0].keys[0][2])  # position 32 of a cache of 32 is padding


def test_an_axis_that_does_not_divide_stays_whole():
    mesh = make_mesh(MeshConfig(1, 1, 8))
    shardings = param_shardings(tiny_model().config, mesh)
    assert shardings["embed"]["embedding"].spec == jax.P(None, ("fsdp",))  # 259 tokens, 8 devices
    assert shardings["layers_0"]["k"]["kernel"].spec == jax.P(("fsdp",), None)  # 2 heads
    assert shardings["layers_0"]["up"]["kernel"].spec == jax.P(("fsdp",), ("tensor",))


def test_minus_one_takes_what_is_left_and_wrong_sizes_are_refused():
    assert dict(make_mesh(MeshConfig(2, -1, 2)).shape) == {
        "data": 2,
        "fsdp": 2,
        "expert": 1,
        "tensor": 2,
    }
    assert make_mesh(MeshConfig(), jax.devices()[:1]).size == 1
    with raises_coded(ConfigError, "mismatch", "mesh"):
        make_mesh(MeshConfig(3, -1, 1))
    with raises_coded(ConfigError, "mismatch", "mesh"):
        make_mesh(MeshConfig(-1, -1, 1))


# One layer with sizes that all differ, so that a shape in a compiled program identifies its array.
MESHES = {"data": (8, 1, 1), "fsdp": (1, 8, 1), "tensor": (1, 4, 2), "all": (2, 2, 2)}
SIZES = [
    pytest.param(sizes, id=name, marks=[pytest.mark.slow] if name in ("data", "tensor") else [])
    for name, sizes in MESHES.items()
]
SHAPED = DecoderConfig(
    DecoderShape(
        vocab_size=272,
        embed_dim=48,
        blocks=(Block(Attention(4, 2, 24), Dense(112)),),
        tie_embeddings=False,
    )
)
ROW_LEN, TARGETS, CHUNK = 40, 20, 10
STEPS = [
    [
        sequence([1, k, s], [k + 3, s + 1, k, 2], advantage=(-1.0) ** k, weight=0.01)
        for k in range(64)
    ]
    for s in range(5)
]


def settings(sizes: tuple[int, int, int], *, remat: RematKind = "none") -> Config:
    return Config(
        serve=ServeConfig(max_len=ROW_LEN),
        batch=BatchConfig(rows=8, row_len=ROW_LEN, max_targets=TARGETS, head_chunk=CHUNK),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        mesh=MeshConfig(*sizes),
        model=ModelConfig(remat=remat),
    )


@functools.cache
def five_steps(sizes: tuple[int, int, int]) -> tuple[list[float], Any, Updater, str, str]:
    """Return (losses, state, learner, gradient and optimizer programs) of five updates."""
    config = settings(sizes)
    learner = phase_updater(SHAPED, config, supervised=False)
    grads_fn, apply_fn = (
        program.compile() for program in lower_step(learner, config.model.dtype, config.distill)
    )
    functions = dataclasses.replace(learner.functions, grads_fn=grads_fn, apply_fn=apply_fn)
    learner = dataclasses.replace(learner, functions=functions)
    state = learner.init(init_params(SHAPED, jax.random.key(0)))
    losses = []
    for step in STEPS:
        state, metrics = learner.update(state, step, None)
        losses.append(metrics["train/loss"])
    return losses, state, learner, grads_fn.as_text(), apply_fn.as_text()


@pytest.mark.parametrize("sizes", SIZES)
def test_five_updates_agree_on_one_and_eight_devices(sizes):
    one_losses, one, *_ = five_steps((1, 1, 1))
    losses, state, learner, _, _ = five_steps(sizes)
    assert learner.mesh.size == 8 and len(set(one_losses)) == 5
    np.testing.assert_allclose(losses, one_losses, atol=1e-5)
    for got, want in zip(*map(jax.tree.leaves, (state.params, one.params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(MESHES["fsdp"], id="fsdp", marks=pytest.mark.slow),
        pytest.param(MESHES["all"], id="all"),
    ],
)
def test_an_update_in_bfloat16_agrees_on_one_and_eight_devices(sizes):
    """Check an update in bfloat16, because XLA on a CPU aborts on some bfloat16 all-reduces."""
    norms = []
    for shape in ((1, 1, 1), sizes):
        config = settings(shape)
        config = dataclasses.replace(config, model=ModelConfig(dtype="bfloat16"))
        learner = phase_updater(SHAPED, config, supervised=False)
        state = learner.init(init_params(SHAPED, jax.random.key(0)))
        norms.append(learner.update(state, STEPS[0], None)[1]["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.slow
def test_rematerialised_layers_are_gathered_one_by_one():
    config, model = (
        settings((1, 8, 1), remat="full"),
        SHAPED.with_shape(blocks=2 * SHAPED.shape.blocks),
    )
    grads_fn, _ = lower_step(
        phase_updater(model, config, supervised=False), config.model.dtype, config.distill
    )
    moved = collectives(grads_fn.compile().as_text())
    gathered = {shape for op, shape in moved if op == "all-gather"}
    # A layer of the stack is [1, 48, 112]. The whole stack would be [2, 48, 112].
    assert {shape[-2:] for shape in gathered} == set(matrices((1, 8, 1)))
    assert {shape[:-2] for shape in gathered} <= {(), (1,)}


def collectives(program: str) -> list[tuple[str, tuple[int, ...]]]:
    """List (collective, shape) of each array that a compiled program moves between devices."""
    found = []
    ops = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for line in program.splitlines():
        if moved := re.search(rf"= (.*?) ({ops})(?:-start)?\(", line):
            for shape in re.findall(r"\w+\[([\d,]*)\]", moved[1]):
                found.append((moved[2], tuple(int(n) for n in shape.split(",") if n)))
    return found


def loops_around(program: str) -> dict[str, int]:
    """Return the loop depth of each computation of a compiled program, by name."""
    called: dict[str, list[tuple[str, int]]] = {}
    name = entry = ""
    for line in program.splitlines():
        if begun := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            name = begun[2]
            entry = name if begun[1] else entry
        repeated = " while(" in line
        names = r"(?:\w+_computations?|body|calls|to_apply)=(%[\w.-]+|\{[^}]*\})"
        called.setdefault(name, []).extend(
            (callee, int(repeated))
            for group in re.findall(names, line)
            for callee in re.findall(r"%([\w.-]+)", group)
        )
    depths, waiting = {}, [(entry, 0)]
    while waiting:
        name, depth = waiting.pop()
        depths[name] = max(depth, depths.get(name, 0))
        waiting += [(callee, depth + more) for callee, more in called.get(name, [])]
    return depths


def matrices(sizes: tuple[int, int, int]) -> Counter[tuple[int, ...]]:
    """Count the matrices on one device by shape: the model's weights, split over "tensor"."""
    tensor = sizes[2]
    embed, head, mlp = (272 // tensor, 48), (48, 272 // tensor), (48, 112 // tensor)
    queries, keys = (48, 96 // tensor), (48, 48 // tensor)
    return Counter([embed, head, queries, queries[::-1], keys, keys, mlp, mlp, mlp[::-1]])


@pytest.mark.parametrize("sizes", SIZES)
def test_a_program_moves_what_its_mesh_asks_for_and_no_more(sizes):
    used, (_, fsdp, tensor) = matrices(sizes), sizes
    _, _, _, program, optimizer = five_steps(sizes)
    moved = collectives(program)
    gathered, summed, scattered = (
        Counter(shape for op, shape in moved if op == wanted)
        for wanted in ("all-gather", "all-reduce", "reduce-scatter")
    )
    # "fsdp" gathers each matrix for the forward pass, and at most once more for the backward pass.
    # Splits over "tensor" stay, and no activation is gathered.
    assert set(gathered) == (set(used) if fsdp > 1 else set())
    assert all(count <= 2 * used[shape] for shape, count in gathered.items())
    # Each gradient is summed over the rows once, transposed or not. (Compilers for accelerators
    # use a reduce-scatter for this.)
    if not scattered:
        lying = Counter(tuple(sorted(shape)) for shape in used.elements())
        added = Counter(tuple(sorted(shape)) for shape in summed.elements())
        assert {shape: added[shape] for shape in lying} == lying
    # "tensor" sums activations: `rows` rows of 40 nodes or 10 targets on a device.
    rows = 8 // (sizes[0] * fsdp)
    activations = {shape for shape in summed if len(shape) > 1} - set(used)
    assert activations == ({(rows, 40, 48), (rows, 10, 48), (rows, 10)} if tensor > 1 else set())
    assert not {op for op, _ in moved} & {"all-to-all", "collective-permute"}
    # The optimizer runs where the weights are. Only the gradient norm crosses devices.
    assert {shape for _, shape in collectives(optimizer)} <= {()}


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_are_added_up_over_devices_once_a_microbatch(sizes):
    """Check that the head's gradients are not summed once for each chunk of targets."""
    _, _, _, program, _ = five_steps(sizes)
    depths, used, found = loops_around(program), matrices(sizes), []
    for part in re.split(r"\n(?=(?:ENTRY )?%?[\w.-]+ \()", program):
        moved = {tuple(sorted(shape)) for op, shape in collectives(part) if op != "all-gather"}
        if moved & {tuple(sorted(shape)) for shape in used}:
            found.append(depths[re.match(r"(?:ENTRY )?%?([\w.-]+)", part)[1]])  # pyright: ignore
    assert set(found) == {1}  # the loop over microbatches
    assert max(depths.values()) == 2  # the loop over chunks exists


def test_frozen_weights_have_no_gradient_to_add_up():
    """Check that frozen weights are still gathered, and only adapter gradients are reduced."""
    lora, rank = LoraConfig(rank=5), 5
    learner = phase_updater(
        SHAPED.with_execution(lora=lora), settings(MESHES["fsdp"]), supervised=False
    )
    grads_fn, _ = lower_step(learner, "float32", DistillConfig())
    moved = collectives(grads_fn.compile().as_text())
    used = matrices(MESHES["fsdp"])
    gathered = Counter(shape for op, shape in moved if op == "all-gather" and rank not in shape)
    assert set(gathered) == set(used)
    assert all(count <= 2 * used[shape] for shape, count in gathered.items())
    back = {
        shape for op, shape in moved if op in ("all-reduce", "reduce-scatter") if len(shape) > 1
    }
    assert back and all(rank in shape for shape in back)
    assert not {op for op, _ in moved} & {"all-to-all", "collective-permute"}


def test_everything_lies_where_the_table_says():
    _, state, learner, _, _ = five_steps(MESHES["all"])
    shardings = jax.tree.leaves(param_shardings(SHAPED, learner.mesh))
    adam = next(
        s
        for s in jax.tree.leaves(state.opt_state, is_leaf=lambda s: hasattr(s, "mu"))
        if hasattr(s, "mu")
    )
    for tree in (state.params, adam.mu, adam.nu):
        leaves = jax.tree.leaves(tree)
        assert all(
            leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        )
    engine = SlotPrograms(SHAPED, ServeConfig(slots=2, max_len=32), mesh=learner.mesh)
    cache = engine.init_state().cache
    want = cache_sharding(SHAPED.shape, learner.mesh)
    assert want.spec == PartitionSpec(None, "tensor", None, None)
    assert all(leaf.sharding.is_equivalent_to(want, 4) for leaf in jax.tree.leaves(cache))
    served = engine.put_on_mesh(state.params)
    assert [leaf.sharding for leaf in jax.tree.leaves(served)] == shardings


@dataclasses.dataclass(frozen=True)
class _Gpu:
    id: int
    platform: str = "gpu"
    process_index: int = 0
    device_kind: str = "NVIDIA H100"


def test_the_trainers_devices_serve_as_copies_but_on_a_cpu() -> None:
    gpus = [_Gpu(i) for i in range(8)]
    trainer = MeshConfig(data=1, fsdp=-1, tensor=2)
    serving = serving_mesh(None, trainer, gpus)
    assert serving.devices.shape == (4, 1, 1, 2) and list(serving.devices.flat) == gpus
    assert serving_mesh(None, trainer) == make_mesh(trainer)
    split = MeshConfig(fsdp=1, tensor=2, first_device=6)
    assert list(serving_mesh(split, trainer, gpus).devices.flat) == gpus[6:]
    with raises_coded(ConfigError, "mismatch", "serve.mesh"):
        serving_mesh(MeshConfig(data=9, fsdp=1), trainer, gpus)
