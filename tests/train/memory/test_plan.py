"""Tests of the memory plan, by hand and as compiled."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from coded import raises_coded

from lightning_jax.cli.main import main
from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import (
    REMAT_KINDS,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    PolicyConfig,
    RematKind,
)
from lightning_jax.models.families.table import SHAPES
from lightning_jax.models.formats.load import load_shape, save_hf
from lightning_jax.models.lora import adapted_shape
from lightning_jax.models.memory import saved_numbers
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.sharding import param_shapes
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, DistillConfig, OptimizerConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.settings import ConfigError, load_config, save_config
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces.config import RoleConfig
from lightning_jax.train.config import Config, WarmupConfig
from lightning_jax.train.memory import plan
from lightning_jax.train.memory.host import process_items
from lightning_jax.train.memory.lowering import lower_step
from lightning_jax.train.state.updaters import phase_updater

CONFIGS = Path(__file__).parents[3] / "experiments" / "configs"
MODEL = tiny_model(num_layers=1)
DEEP = tiny_model(num_layers=4).config
EMBEDDING = 259 * 32
MATRICES = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64  # q, k, v, o; gate, up, down
NORMS = 3 * 32
CONFIG = Config(
    serve=ServeConfig(slots=2, max_len=64, prefill_buckets=(32,), prefix_cache_mib=0.0),
    batch=BatchConfig(rows=8, row_len=64, max_targets=8, head_chunk=4),
    mesh=MeshConfig(fsdp=1),
)


def num_params(config: DecoderConfig) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))


def sizes(made: plan.Plan) -> dict[str, int]:
    return {item.name: item.num_bytes for item in made.items}


def test_one_device_by_hand() -> None:
    made = plan.make_plan(MODEL.config, CONFIG)
    weights = 4 * (EMBEDDING + MATRICES + NORMS)
    assert weights == 4 * num_params(MODEL.config)
    found = sizes(made)
    assert made.during == "an update"
    assert found["weights in float32"] == found["serving weights"] == weights
    assert found["gradients"] == weights and found["optimizer moments"] == 2 * weights
    assert found["KV cache of the slots"] == 4 * 2 * 64 * 2 * (2 * 8)  # keys and values, 2 heads
    assert found["logits"] == 3 * 4 * 8 * 4 * 259  # 8 rows of 4 targets
    assert found["prefix cache"] == 0 and "reference policy" not in found
    assert made.total == sum(found.values())


def test_float32_activations_beside_bfloat16_weights_by_hand() -> None:
    def found(model: ModelConfig) -> dict[str, int]:
        return sizes(plan.make_plan(MODEL.config, dataclasses.replace(CONFIG, model=model)))

    wide = found(ModelConfig(dtype="bfloat16", activation_dtype="float32"))
    narrow, full = found(ModelConfig(dtype="bfloat16")), found(ModelConfig())
    for name in ("serving weights", "KV cache of the slots"):
        assert 2 * wide[name] == 2 * narrow[name] == full[name]
    assert wide["activations"] == 2 * narrow["activations"] == full["activations"]


def test_frozen_roles_of_the_initial_weights_are_served_beside_the_policy() -> None:
    roles = {"checker": RoleConfig(agent="checker", trains=False, served_by="initial")}
    found = sizes(plan.make_plan(MODEL.config, dataclasses.replace(CONFIG, roles=roles)))
    policys = found["serving weights"] + found["KV cache of the slots"]
    assert found["initial weights and their KV cache"] == policys


def test_eight_devices_by_hand() -> None:
    config = dataclasses.replace(
        CONFIG,
        mesh=MeshConfig(data=1, fsdp=4, tensor=2),
        algorithm=AlgorithmConfig(kl_coef=0.1),
        model=ModelConfig(dtype="bfloat16"),
    )
    found = sizes(plan.make_plan(MODEL.config, config))
    # 259 tokens are not divisible by two, and each device holds whole norms.
    numbers = EMBEDDING // 4 + MATRICES // 8 + NORMS
    assert found["weights in float32"] == found["reference policy"] == 4 * numbers
    assert found["serving weights"] == 2 * numbers
    assert found["KV cache of the slots"] == 2 * 2 * 64 * 2 * 8  # one head per device
    assert found["logits"] == 3 * 4 * 2 * 4 * 259  # 2 rows


def test_dpo_keeps_a_reference() -> None:
    config = dataclasses.replace(CONFIG, algorithm=AlgorithmConfig(loss="dpo"))
    found = sizes(plan.make_plan(MODEL.config, config))
    assert found["reference policy"] == found["weights in float32"]


def test_tokens_that_a_teacher_names_by_hand() -> None:
    """An id and a log-probability of 4 bytes each, for 16 rollouts of 8 targets."""

    def found(**distill: Any) -> dict[str, int]:
        rollout = RolloutConfig(tasks_per_step=4, group_size=4)
        settings = DistillConfig(**distill)
        config = dataclasses.replace(CONFIG, rollout=rollout, distill=settings)
        return sizes(plan.make_plan(MODEL.config, config))

    size = 16 * 8 * 5 * (4 + 4)
    sharded = found(teacher="tiny", top_k=5)["the teacher's likeliest tokens"]
    assert sharded == found(hint="f:g", top_k=5)["the teacher's likeliest tokens"] == size
    for none in ({}, {"teacher": "tiny", "kl": "sampled"}):
        assert "the teacher's likeliest tokens" not in found(**none)
    config = dataclasses.replace(
        CONFIG,
        rollout=RolloutConfig(tasks_per_step=4, group_size=4),
        distill=DistillConfig(hint="f:g", top_k=5),
        mesh=MeshConfig(data=2, fsdp=4),
    )
    assert (
        sizes(plan.make_plan(MODEL.config, config))["the teacher's likeliest tokens"] == size // 8
    )
    (copies,) = (
        item for item in process_items(MODEL.config, config) if item.name.startswith("copies")
    )
    assert copies.num_bytes == 2 * size // jax.local_device_count()


def test_a_taught_step_compiles_like_the_run_does() -> None:
    config = dataclasses.replace(CONFIG, distill=DistillConfig(hint="f:g", top_k=5))
    updater = phase_updater(MODEL.config, config, supervised=False)
    for kl, named in (("forward", True), ("sampled", False)):
        distill = dataclasses.replace(config.distill, kl=kl)
        gradients, _ = lower_step(updater, config.model.dtype, distill)
        assert ("8x5xi32" in gradients.as_text()) is named


def test_first_moments_in_bfloat16_take_half() -> None:
    """A warm-up that keeps them in float32 needs the full size."""
    narrow = OptimizerConfig(mu_dtype="bfloat16")
    shares = []
    for warmup in (WarmupConfig(), WarmupConfig(num_steps=1, demonstrations="f:g")):
        config = dataclasses.replace(CONFIG, optimizer=narrow, warmup=warmup)
        found = sizes(plan.make_plan(MODEL.config, config))
        shares.append(found["optimizer moments"] / found["weights in float32"])
    assert shares == [1.5, 2.0]


def test_of_a_model_with_adapters_they_alone_have_gradients_and_moments() -> None:
    lora = LoraConfig(rank=4)
    config = dataclasses.replace(
        CONFIG,
        model=ModelConfig(dtype="bfloat16", lora=lora),
        algorithm=AlgorithmConfig(kl_coef=0.1),
    )
    model = adapted_shape(MODEL.config, lora)
    found = sizes(plan.make_plan(model, config))
    # q, o: 32 to 32; k, v: 32 to 16; gate, up, down: 32 and 64
    adapters = 4 * (2 * 64 + 2 * 48 + 3 * 96)
    base = EMBEDDING + MATRICES + NORMS
    assert found["weights in float32"] == found["gradients"] == 4 * adapters
    assert found["optimizer moments"] == 8 * adapters
    assert found["reference policy"] == 4 * adapters
    assert found["frozen weights, shared with serving"] == 2 * base
    assert found["serving weights"] == 2 * adapters
    # Only the adapters are cast for a microbatch.
    assert found["microbatch gradients and gathered weights"] == (4 + 2) * adapters


@dataclasses.dataclass(frozen=True)
class _Gpu:
    id: int
    platform: str = "gpu"
    process_index: int = 0
    device_kind: str = "NVIDIA H100"


def adapters_of_8b(number: int, **mesh: int) -> dict[str, int]:
    """Return the plan of Qwen3-8B with adapters on `number` GPUs."""
    lora = LoraConfig(rank=16)
    config = Config(
        model=ModelConfig(name="Qwen/Qwen3-8B", dtype="bfloat16", remat="full", lora=lora),
        batch=BatchConfig(rows=number, row_len=4096, max_targets=2048, head_chunk=128),
        serve=ServeConfig(slots=32, max_len=4096),
        mesh=MeshConfig(**mesh),
    )
    gpus = [_Gpu(i) for i in range(number)]
    model = adapted_shape(DecoderConfig(load_shape(config.model.name)), lora)
    return sizes(plan.make_plan(model, config, devices=gpus))


def test_a_mixture_of_experts_of_30b_fits_one_h200() -> None:
    """141 GB are 131 GiB. Weights are counted by hand, the rest as the plan says today."""
    lora = LoraConfig(rank=16, targets=("q", "k", "v", "o"))
    config = Config(
        model=ModelConfig(name="Qwen/Qwen3-30B-A3B", dtype="bfloat16", remat="full", lora=lora),
        batch=BatchConfig(rows=1, row_len=4096, max_targets=2048, head_chunk=128),
        serve=ServeConfig(slots=32, max_len=4096),
    )
    model = adapted_shape(DecoderConfig(load_shape(config.model.name)), lora)
    made = plan.make_plan(model, config, devices=[_Gpu(0)])
    found = sizes(made)
    experts, router = 128 * 3 * 2048 * 768, 2048 * 128
    attention = 2048 * 128 * (32 + 4 + 4 + 32)
    norms = 2 * 2048 + 2 * 128
    base = 48 * (experts + router + attention + norms) + 2 * 151936 * 2048 + 2048
    assert base == 30_532_122_624
    assert found["frozen weights, shared with serving"] == 2 * base
    assert found["KV cache of the slots"] == 2 * 48 * 32 * 4096 * 2 * 4 * 128
    assert made.total == 76_910_915_584 < 131 * 2**30


def test_one_copy_of_frozen_weights_serves_and_trains() -> None:
    found = adapters_of_8b(1, fsdp=1)
    base = 2 * num_params(DecoderConfig(SHAPES["Qwen/Qwen3-8B"]))
    assert found["frozen weights, shared with serving"] == base
    assert found["serving weights"] < 0.01 * base
    assert found["microbatch gradients and gathered weights"] < 0.02 * base
    assert base < sum(found.values()) - found["KV cache of the slots"] < 1.3 * base


def test_frozen_weights_of_another_layout_are_counted_twice() -> None:
    base = 2 * num_params(DecoderConfig(SHAPES["Qwen/Qwen3-8B"]))
    split = adapters_of_8b(4, fsdp=4)
    assert split["frozen weights for training"] == pytest.approx(base / 4, rel=0.01)
    assert split["serving weights"] > base
    for mesh in ({"data": 4, "fsdp": 1}, {"data": 2, "fsdp": 1, "tensor": 2}):
        assert adapters_of_8b(4, **mesh)["serving weights"] < 0.01 * base


def test_policies_with_weights_of_their_own_are_counted_each() -> None:
    policies = {"a": PolicyConfig(), "b": PolicyConfig(), "c": PolicyConfig(trains=False)}
    algorithm = AlgorithmConfig(kl_coef=0.1)
    serve = dataclasses.replace(CONFIG.serve, prefix_cache_mib=1.0)
    alone = dataclasses.replace(CONFIG, algorithm=algorithm, serve=serve)
    three = dataclasses.replace(alone, policies=policies)
    one, found = (sizes(plan.make_plan(MODEL.config, settings)) for settings in (alone, three))
    for name in (
        "weights in float32", "serving weights", "KV cache of the slots", "prefix cache"
    ):  # fmt: skip
        assert found[f"{name}, of 3 policies"] == 3 * one[name] > 0
    # The frozen policy needs neither. Only one policy's gradients exist at a time.
    for name in ("optimizer moments", "reference policy"):
        assert found[f"{name}, of 2 policies"] == 2 * one[name]
    assert found["gradients"] == one["gradients"]
    shown = WarmupConfig(num_steps=1, demonstrations="f:g")  # a warm-up trains all three
    found = sizes(plan.make_plan(MODEL.config, dataclasses.replace(three, warmup=shown)))
    assert found["optimizer moments, of 3 policies"] == 3 * one["optimizer moments"]


def test_gathered_weights_become_the_engines() -> None:
    gpus = [_Gpu(i) for i in range(8)]
    model = ModelConfig(dtype="bfloat16")
    whole = 2 * (EMBEDDING + MATRICES + NORMS)
    alone = dataclasses.replace(CONFIG.serve, mesh=MeshConfig(1, 1, 1, first_device=6))

    def publishing(devices: int, serve: ServeConfig) -> dict[str, int]:
        config = dataclasses.replace(
            CONFIG, model=model, mesh=MeshConfig(fsdp=devices), serve=serve,
            batch=BatchConfig(rows=24, row_len=64, head_chunk=1, max_targets=1),
        )  # fmt: skip
        training = plan.make_mesh(config.mesh, gpus)
        serving = plan.serving_mesh(config.serve.mesh, config.mesh, gpus)
        return {
            item.name: item.num_bytes
            for item in plan.publish_items(MODEL.config, jnp.dtype("bfloat16"), training, serving)
        }

    found = publishing(8, CONFIG.serve)
    assert found["new serving weights beside the old"] == whole
    assert found["weights cast for serving"] < whole / 4  # the shards, before they are gathered
    # If serving has its own devices, the trainer briefly holds all weights of an engine's device.
    found = publishing(4, alone)
    assert found["weights cast for serving"] == pytest.approx(1.25 * whole, rel=0.05)


def test_devices_of_their_own_hold_no_weights_that_serve() -> None:
    serve = dataclasses.replace(CONFIG.serve, mesh=MeshConfig(fsdp=1, first_device=1))
    made = plan.make_plan(MODEL.config, dataclasses.replace(CONFIG, serve=serve))
    assert made.during == "an update" and "serving weights" not in sizes(made)
    serve = dataclasses.replace(serve, slots=4096)
    made = plan.make_plan(MODEL.config, dataclasses.replace(CONFIG, serve=serve))
    assert made.during == "publishing, on the serving devices"


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        (
            {"serve": ServeConfig(slots=2048, max_len=16, prefix_cache_mib=0.0)},
            "serve.slots=2048",
        ),
        ({"serve": ServeConfig(slots=2048, max_len=16)}, "serve.prefix_cache_mib=32"),
        (
            {"batch": BatchConfig(rows=512, row_len=2048), "model": ModelConfig(remat="none")},
            "model.remat",
        ),
        (
            {"batch": BatchConfig(rows=512, row_len=2048), "model": ModelConfig(remat="full")},
            "batch.rows=512",
        ),
        ({"batch": BatchConfig(rows=64, row_len=64, head_chunk=1024)}, "batch.head_chunk=1024"),
        ({}, "mesh.fsdp"),
        ({}, "model.lora.rank=32"),
    ],
)
def test_too_large_names_the_setting(changes: dict, setting: str) -> None:
    serve = dataclasses.replace(CONFIG.serve, max_len=16)
    batch = BatchConfig(rows=1, row_len=16, head_chunk=1)
    config = dataclasses.replace(CONFIG, serve=serve, batch=batch)
    made = plan.make_plan(MODEL.config, dataclasses.replace(config, **changes), 1000)
    with raises_coded(ConfigError, "too_large") as caught:
        plan.check_plan(made)
    assert setting in str(caught.value)
    plan.check_plan(dataclasses.replace(made, capacity=made.total))
    plan.check_plan(dataclasses.replace(made, capacity=None))


def test_activations_by_hand() -> None:
    """Layers of width 32 with 4 heads of 8, of which 2 for keys, and an MLP of 64, for 64 rows."""

    def found(remat: RematKind, model: ModelConfig = CONFIG.model) -> int:
        config = plan.with_remat(dataclasses.replace(CONFIG, model=model), remat)
        return sizes(plan.make_plan(DEEP, config))["activations"] // (8 * 64)

    layer = 4 * 32 + 3 * 32 + 3 * 16 + 3 * 64
    # Eight results as wide as the embedding (input, norms and their parts), three as the queries,
    # two as the keys, and six of the MLP: its products, and parts of the activation function.
    saved = saved_numbers(DEEP, DEEP.shape.blocks[0])
    assert 0 <= saved - (8 * 32 + 3 * 32 + 2 * 16 + 6 * 64) < 32
    assert found("none") == 4 * (layer + 4 * saved)
    assert found("full") == 4 * (4 * 32 + 2 * layer)
    results = 32 + 4  # of attention, with the log-sums of 4 heads
    assert found("attention") == 4 * (4 * (32 + results) + 2 * layer)
    assert found("mlp") == 4 * (4 * (32 + results + 32 + 2 * 16 + 2 * 64) + 2 * layer)
    narrow = found("attention", ModelConfig(dtype="bfloat16"))
    assert narrow == found("attention") // 2 + 4 * 2 * 4  # log-sums stay float32


def test_the_plan_recomputes_as_little_as_fits() -> None:
    totals = {
        kind: plan.make_plan(DEEP, plan.with_remat(CONFIG, kind)).total for kind in REMAT_KINDS
    }
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    for kind, total in totals.items():
        made = plan.make_plan(DEEP, CONFIG, int(total / plan.TIGHT) + 1)
        assert made.remat == kind and made.total == total
        assert dict(made.larger) == {k: n for k, n in totals.items() if n > total}
        for name in (kind, *dict(made.larger)):
            assert name in plan.as_table(made) and name in plan.one_line(made)
    # Without a capacity nothing is recomputed. If nothing fits, what needs least is refused.
    assert plan.make_plan(DEEP, CONFIG).remat == "none"
    assert plan.make_plan(DEEP, CONFIG, 1000).remat == "full"
    # A setting that was given stays.
    given = plan.make_plan(DEEP, plan.with_remat(CONFIG, "mlp"), 10**12)
    assert given.remat == "mlp" and given.larger == ()


@pytest.mark.parametrize(
    ("text", "kind"), [("true", "full"), ("false", "none"), ("mlp", "mlp"), ("none", "none")]
)
def test_configs_of_older_runs_load(tmp_path: Path, text: str, kind: RematKind) -> None:
    """Before 0.2, `model.remat` was true or false."""
    (tmp_path / "config.yaml").write_text(f"model:\n  remat: {text}\n")
    assert load_config(Config, [str(tmp_path / "config.yaml")]).model.remat == kind
    assert load_config(Config, [f"model.remat={text}"]).model.remat == kind
    assert Config().model.remat == "auto"
    with raises_coded(ConfigError, "unknown", "model.remat"):
        load_config(Config, ["model.remat=half"])


def test_the_command_compiles_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_hf(tmp_path / "tiny", MODEL)
    model = ModelConfig(name=str(tmp_path / "tiny"), remat="full")
    config = dataclasses.replace(CONFIG, model=model, mesh=MeshConfig(fsdp=8))
    save_config(config, tmp_path / "config.yaml")
    arguments = ["plan", "--config", str(tmp_path / "config.yaml"), "--device-gib"]
    assert main([*arguments, "1"]) == 0
    assert "1.000 GiB" in capsys.readouterr().out.splitlines()[-1]
    assert main([*arguments, "1e-5", "--quick"]) == 1
    assert "GiB" in capsys.readouterr().err
    assert main([*arguments, "-1"]) == 2
    # The compiler's figure is its allocation on one device: at least the new gradients.
    made = plan.compile_plan(MODEL.config, config)
    others = sizes(made)["activations and other temporaries (compiled)"] + sizes(made)["logits"]
    assert others >= sizes(made)["gradients"]


def test_the_tpu_settings_fit_their_chips() -> None:
    assert jax.device_count() == 8
    for name in ("spider", "calcx", "musique"):
        config = load_config(Config, [str(CONFIGS / f"{name}_tpu.yaml")])
        model = DecoderConfig(load_shape(config.model.name))
        plan.check_plan(plan.make_plan(model, config, 16 * plan.GIB))
    # Sixteen simulated devices need a separate process.
    command = [sys.executable, "-m", "lightning_jax", "plan", "--quick", "--devices", "16"]
    command += ["--config", str(CONFIGS / "spider_8b_tpu.yaml"), "--device-gib", "16"]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "16 x cpu, data=1 fsdp=4 expert=1 tensor=4" in done.stdout
    needed, has, *_ = (float(number) for number in re.findall(r"([\d.]+) GiB", done.stderr))
    assert has == 16.0 < needed < 31.25  # a chip of 32 GB has so much


def test_the_gpu_settings_fit_a_gpu() -> None:
    capacity = int(59.3 * plan.GIB)  # what JAX takes of 80 GB
    for name in ("spider", "calcx", "musique"):
        config = load_config(Config, [str(CONFIGS / f"{name}.yaml")])
        model = DecoderConfig(load_shape(config.model.name))
        made = plan.make_plan(model, config, capacity, jax.devices()[:1])
        plan.check_plan(made)


def test_known_shapes_have_as_many_parameters_as_published() -> None:
    for name, number in (("Qwen/Qwen2.5-1.5B-Instruct", 1.54e9), ("Qwen/Qwen3-8B", 8.2e9)):
        assert num_params(DecoderConfig(SHAPES[name])) == pytest.approx(number, rel=0.01)


def test_a_run_without_steps_plans_no_update() -> None:
    whole = Config(num_steps=1)
    model = DecoderConfig(load_shape("smollm2-135m-instruct"))
    for algorithm in (AlgorithmConfig(), AlgorithmConfig(kl_coef=0.1)):
        config = Config(num_steps=0, algorithm=algorithm)
        names = {item.name for item in plan.make_plan(model, config).items}
        assert not names & {"optimizer moments", "gradients", "activations", "reference policy"}
        assert plan.make_plan(model, config).total < plan.make_plan(model, whole).total
