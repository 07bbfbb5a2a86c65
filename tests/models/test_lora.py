"""Tests that adapters compute the same as merged weights, and initially change nothing."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from coded import raises_coded
from gguf_models import variant
from random_adapters import LORA, export_small_adapters, with_random_adapters

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.config import KERNELS, LoraConfig, MeshConfig, ModelConfig
from lightning_jax.models.formats.huggingface import write_model
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import (
    adapted,
    adapters_beside,
    frozen_part,
    merged,
    open_policy,
    overlay,
    pick,
    trained_part,
    write_peft,
)
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.sharding import param_shardings
from lightning_jax.models.transformer import Linear, forward, init_params
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.tiny import tiny_model, with_mixers
from lightning_jax.train.config import Config

MODEL = tiny_model(num_layers=1)
run = jax.jit(forward, static_argnums=1, static_argnames="remat")


def tokens_and_positions():
    tokens = jax.random.randint(jax.random.key(2), (2, 20), 0, 259)
    return tokens, jnp.broadcast_to(jnp.arange(20), (2, 20))


def test_adapters_compute_what_merged_weights_compute():
    config = with_mixers(MODEL.config, bias=True, qk_norm="head")
    biased = dataclasses.replace(
        MODEL, config=config, params=init_params(config, jax.random.key(1))
    )
    model = with_random_adapters(biased)
    whole, arrays = merged(model), tokens_and_positions()
    assert jax.tree.structure(whole.params) == jax.tree.structure(biased.params)
    expected, _ = run(whole.params, whole.config, *arrays)
    got, _ = run(model.params, model.config, *arrays)
    base, _ = run(biased.params, whole.config, *arrays)
    assert np.abs(expected - base).max() > 0.1
    np.testing.assert_allclose(got, expected, atol=1e-5)
    recomputed, _ = run(model.params, model.config, *arrays, remat="full")
    np.testing.assert_allclose(recomputed, expected, atol=1e-5)


def test_prefill_and_decode_use_the_adapters():
    model = with_random_adapters(MODEL)
    tokens, positions = tokens_and_positions()
    expected, _ = run(merged(model).params, MODEL.config, tokens, positions)
    cache = init_cache(model.config.shape, 2, 32)
    for chunk in (slice(0, 16), *(slice(i, i + 1) for i in range(16, 20))):
        hidden, cache = run(
            model.params, model.config, tokens[:, chunk], positions[:, chunk], cache=cache
        )
        np.testing.assert_allclose(hidden, expected[:, chunk], atol=1e-5)


def test_fresh_adapters_change_nothing_and_follow_the_seed():
    model = adapted(MODEL, LORA, seed=7)
    arrays = tokens_and_positions()
    got, _ = run(model.params, model.config, *arrays)
    base, _ = run(MODEL.params, MODEL.config, *arrays)
    np.testing.assert_array_equal(got, base)
    first, again, other = (
        flatten(trained_part(adapted(MODEL, LoraConfig(rank=64), seed).params))
        for seed in (7, 7, 8)
    )
    down = ("layers_0", "down", "lora_a")
    assert first[down].shape == (64, 64) and first[(*down[:2], "lora_b")].shape == (64, 32)
    assert np.std(first[down]) == pytest.approx(1 / 8, rel=0.05)  # 64 inputs
    np.testing.assert_array_equal(first[down], again[down])
    assert not np.allclose(first[down], other[down])
    assert not any(np.any(leaf) for path, leaf in first.items() if path[-1] == "lora_b")


def test_rank_0_is_the_model_as_it_is():
    assert adapted(MODEL, LoraConfig(), seed=0) is MODEL
    assert frozen_part(MODEL.params) is None and trained_part(MODEL.params) is MODEL.params
    assert merged(MODEL) is MODEL
    assert {path[-1] for path in flatten(MODEL.params)} == {"embedding", "kernel", "scale"}


def test_only_the_targets_have_adapters():
    model = adapted(MODEL, LoraConfig(rank=2, targets=("v", "down")), seed=0)
    adapters = trained_part(model.params)
    assert {path[:2] for path in flatten(adapters)} == {("layers_0", "v"), ("layers_0", "down")}
    base = frozen_part(model.params)
    assert base is not None and jax.tree.structure(base) == jax.tree.structure(MODEL.params)
    back = overlay(base, adapters)
    assert jax.tree.structure(back) == jax.tree.structure(model.params)
    picked = pick(model.params, adapters)
    assert all(x is y for x, y in zip(*map(jax.tree.leaves, (picked, adapters)), strict=True))


@pytest.mark.parametrize(
    "setting", ["targets=[q,head]", "targets=[]", "targets=[q,q]", "rank=-1", "alpha=0"]
)
def test_wrong_settings_are_refused(setting):
    reason = "invalid" if setting.startswith("targets") else "out_of_range"
    with raises_coded(ConfigError, reason, f"model.lora.{setting.partition('=')[0]}"):
        load_config(Config, [f"model.lora.{setting}"])
    made = load_config(Config, ["model.lora.rank=4", "model.lora.targets=[q,v]"]).model.lora
    assert made == LoraConfig(rank=4, targets=("q", "v")) and hash(made)


def test_the_gradient_is_that_of_the_chain_rule():
    layer = Linear(5, lora=LoraConfig(rank=2, alpha=3.0))
    x = jax.random.normal(jax.random.key(0), (2, 7, 4))
    shapes = {"kernel": (4, 5), "lora_a": (4, 2), "lora_b": (2, 5)}
    params = {
        name: jax.random.normal(jax.random.key(i), shape)
        for i, (name, shape) in enumerate(shapes.items(), start=1)
    }
    wanted = jax.random.normal(jax.random.key(9), (2, 7, 5))

    def loss(params):
        return (layer.apply({"params": params}, x) * wanted).sum()  # type: ignore[operator]

    grads = jax.grad(loss)(params)
    rows, out, a, b = x.reshape(14, 4), wanted.reshape(14, 5), params["lora_a"], params["lora_b"]
    # y = x W + 1.5 (x A) B
    np.testing.assert_allclose(grads["kernel"], rows.T @ out, atol=1e-5)
    np.testing.assert_allclose(grads["lora_b"], 1.5 * (rows @ a).T @ out, atol=1e-5)
    np.testing.assert_allclose(grads["lora_a"], 1.5 * rows.T @ (out @ b.T), atol=1e-5)


def test_an_adapter_lies_as_its_kernel_does_and_its_rank_is_whole():
    config = MODEL.config.with_execution(lora=LORA)
    shardings = flatten(param_shardings(config, make_mesh(MeshConfig(1, 4, 2))))
    for name in KERNELS:
        spec = partial(lambda name, leaf: shardings[("layers_0", name, leaf)].spec, name)
        rows, columns = spec("kernel")
        assert spec("lora_a") == jax.P(rows, None) and spec("lora_b") == jax.P(None, columns)
    assert shardings[("layers_0", "q", "lora_b")].spec == jax.P(None, ("tensor",))


@pytest.mark.parametrize(
    ("family", "targets", "patterns"),
    [
        ("phi3", KERNELS, {"qkv_proj": 9, "gate_up_proj": 6}),
        ("granitemoehybrid", ("k", "up"), {}),
    ],
)
def test_adapters_of_a_shared_module_are_exported_as_one(family, targets, patterns, tmp_path):
    base = variant(family)
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets)
    model = with_random_adapters(base, lora)
    write_peft(tmp_path, model.config, model.params, "base")
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert fields["rank_pattern"] == patterns
    written = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    tensors = []
    for whole in (base, merged(model)):
        path = tmp_path / str(len(tensors))
        path.mkdir()
        write_model(path, whole.config.shape, whole.params, frozenset())
        tensors.append(safetensors.numpy.load_file(path / "model.safetensors"))
    before, after = tensors
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert len(written) == 2 * len(changed) and changed
    for name in changed:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (written[f"{stem}.{leaf}.weight"] for leaf in ("lora_A", "lora_B"))
        module = name.split(".")[-2]
        rank = fields["rank_pattern"].get(module, fields["r"])
        assert module in fields["target_modules"] and len(a) == rank
        scale = fields["alpha_pattern"].get(module, fields["lora_alpha"]) / rank
        np.testing.assert_allclose(before[name] + scale * b @ a, after[name], atol=1e-5)


@pytest.mark.parametrize(
    ("family", "targets"),
    [("phi3", KERNELS), ("granitemoehybrid", ("k", "up")), ("llama", ("down", "q"))],
)
def test_an_exported_policy_in_bfloat16_keeps_its_adapters_apart(family, targets, tmp_path):
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets)
    model = export_small_adapters(tmp_path, variant(family), lora)
    settings = ModelConfig(str(tmp_path / "policy"), dtype="bfloat16")
    opened = open_policy(settings)
    read = opened.config.execution.lora
    assert read == dataclasses.replace(lora, targets=tuple(sorted(targets)))
    expected, got = flatten(model.params), flatten(opened.load().params)
    assert expected.keys() == got.keys()
    for path, leaf in expected.items():
        assert got[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(got[path], leaf, str(path))
    # Merged and rounded, a kernel loses much of what its adapter learned.
    kernel = (*next(path for path in expected if path[-1] == "lora_a")[:-1], "kernel")
    whole = flatten(merged(model).params)[kernel]
    change = np.asarray(whole) - np.asarray(expected[kernel], np.float32)
    lost = np.asarray(jnp.asarray(whole, jnp.bfloat16), np.float32) - whole
    assert np.linalg.norm(lost) > 0.3 * np.linalg.norm(change)
    # In float32 nothing is rounded, and the export has them merged.
    exact = open_policy(dataclasses.replace(settings, dtype="float32"))
    assert exact.config.execution.lora is None
    np.testing.assert_array_equal(flatten(exact.load().params)[kernel], whole)


def test_adapters_lie_beside_the_policy_that_has_them_merged(tmp_path):
    export_small_adapters(tmp_path, MODEL, name="writer")
    assert adapters_beside(str(tmp_path / "policy/writer")) == tmp_path / "policy_adapter/writer"
    (tmp_path / "policy_adapter/writer").rename(tmp_path / "policy_adapter/other")
    assert adapters_beside(str(tmp_path / "policy/writer")) is None
    assert adapters_beside(str(tmp_path / "policy")) is None


@pytest.mark.parametrize("kind", ["cut", "no weights", "another model", "no rank"])
def test_adapters_that_cannot_be_read_are_refused(kind, tmp_path):
    export_small_adapters(tmp_path, MODEL)
    folder = tmp_path / "policy_adapter"
    weights, fields = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    if kind == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "no rank":
        fields.write_text("{}")
    else:
        model = with_random_adapters(tiny_model(num_layers=2))
        write_peft(folder, model.config, model.params, "base")
        arrays = safetensors.numpy.load_file(weights)
        safetensors.numpy.save_file({n: a for n, a in arrays.items() if "layers.1" in n}, weights)
    with raises_coded(ModelError, "malformed", str(folder)):
        open_policy(ModelConfig(str(tmp_path / "policy"), dtype="bfloat16"))
