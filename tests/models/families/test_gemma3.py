"""Tests of Gemma 3's files: fields that are left out, models of images too, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from coded import raises_coded
from gguf_models import NUMBER, REAL, assert_equal, variant, write_gguf

from lightning_jax.models.families.table import FAMILIES, SHAPES
from lightning_jax.models.formats.huggingface import ConfigFields
from lightning_jax.models.formats.load import load_model, load_shape, save_hf
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.shape import Dense, LinearScaling, Norm, Rope

MODEL = variant("gemma3_text")
LAYER = "model.layers.5"
LARGE = "vision_tower.vision_model.embeddings.position_embedding.weight"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", MODEL)
    return tmp_path / "model"


def _change(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(change(fields)))


def _rename(path: Path, change: Callable[[str], str], **others: np.ndarray) -> None:
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(renamed | others, path / "model.safetensors")


def _inside(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "gemma3", "vision_config": {"hidden_size": 8}, "text_config": fields}


def test_layers_alternate_in_window_and_rope() -> None:
    shape = MODEL.config.shape
    assert [block.mixer.window for block in shape.blocks] == [5, 5, 5, 5, 5, None, 5]
    ropes = [block.mixer.rope for block in shape.blocks]
    assert ropes == [*5 * [Rope(1e4)], Rope(1e6, LinearScaling(8.0)), Rope(1e4)]
    assert {(block.mlp, block.norms) for block in shape.blocks} == {
        (Dense(24, "gelu_tanh"), "around")
    }
    assert shape.norm == Norm(1e-5, is_wide=True, offset=1.0) and shape.embed_scale == 4.0
    assert shape.period == 6


@pytest.mark.parametrize("hub_id", [name for name in SHAPES if "gemma" in name])
def test_published_shapes_are_exported_and_read_again(hub_id: str, tmp_path: Path) -> None:
    shape = SHAPES[hub_id]
    fields = FAMILIES["gemma3_text"].write(shape) | {"model_type": "gemma3_text"}
    assert FAMILIES["gemma3_text"].read(ConfigFields(tmp_path, fields)) == shape


def test_fields_that_published_files_leave_out_are_those_of_transformers(tmp_path: Path) -> None:
    """The 4B model's text_config has these alone."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(_inside(text)))
    assert load_shape(str(tmp_path)) == SHAPES["google/gemma-3-4b-it"]
    text |= {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    }
    (tmp_path / "config.json").write_text(json.dumps(_inside(text)))
    assert load_shape(str(tmp_path)) == SHAPES["google/gemma-3-27b-it"]


def test_older_files_have_a_period_and_thetas(saved: Path) -> None:
    def older(fields: dict[str, Any]) -> dict[str, Any]:
        types = fields.pop("layer_types")
        assert types[4:6] == ["sliding_attention", "full_attention"]
        return fields | {"sliding_window_pattern": 3, "rope_theta": 500.0}

    _change(saved, older)
    blocks = load_shape(str(saved)).blocks
    assert [block.mixer.window is None for block in blocks] == 2 * [False, False, True] + [False]
    assert blocks[2].mixer.rope == Rope(500.0, LinearScaling(8.0))


def test_newer_files_have_a_rope_for_each_kind_of_layer(saved: Path) -> None:
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    names = ("rope_theta", "rope_local_base_freq", "rope_scaling")
    _change(
        saved,
        lambda fields: (
            {n: v for n, v in fields.items() if n not in names} | {"rope_parameters": ropes}
        ),
    )
    blocks = load_shape(str(saved)).blocks
    assert blocks[5].mixer.rope == Rope(500.0, LinearScaling(4.0))
    assert blocks[6].mixer.rope == Rope(50.0)
    del ropes["full_attention"]["rope_theta"], ropes["sliding_attention"]["rope_theta"]
    _change(saved, lambda fields: fields | {"rope_parameters": ropes})
    thetas = [
        block.mixer.rope and block.mixer.rope.theta for block in load_shape(str(saved)).blocks
    ]
    assert thetas == [*5 * [1e4], 1e6, 1e4]


@pytest.mark.parametrize(
    "change",
    [
        lambda name: f"language_model.{name}",
        lambda name: f"model.language_model.{name.removeprefix('model.')}",
    ],
    ids=["before", "after"],
)
def test_the_text_part_of_a_model_of_images_loads(
    saved: Path, change: Callable[[str], str]
) -> None:
    _change(saved, _inside)
    tower = {LARGE: np.zeros((4, 8), np.float32), "multi_modal_projector.norm": np.zeros(8)}
    _rename(saved, change, **tower)
    loaded = load_model(str(saved))
    assert_equal(loaded, MODEL)
    save_hf(saved.parent / "again", loaded)
    fields = json.loads((saved.parent / "again/config.json").read_text())
    assert (fields["model_type"], fields["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    _change(saved, lambda fields: _inside(fields["text_config"] | {"num_hidden_layers": 6}))
    last = change("model.layers.6.input_layernorm.weight")
    with raises_coded(ModelError, "unsupported", last):
        load_model(str(saved))


@pytest.mark.parametrize(
    ("change", "reason", "key"),
    [
        ({"attn_logit_softcapping": 50.0}, "unsupported", "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "unsupported", "final_logit_softcapping"),
        ({"attention_bias": True}, "unsupported", "attention_bias"),
        ({"hidden_activation": "gelu"}, "unsupported", "hidden_activation"),
        ({"use_bidirectional_attention": True}, "unsupported", "use_bidirectional_attention"),
        ({"sliding_window": 0}, "malformed", "sliding_window"),
        ({"sliding_window": None}, "missing", "sliding_window"),
        ({"layer_types": ["full_attention"]}, "malformed", "layer_types"),
        ({"layer_types": 7 * ["chunked_attention"]}, "malformed", "layer_types"),
        ({"layer_types": None, "sliding_window_pattern": 0}, "malformed", "sliding_window_pattern"),
        ({"query_pre_attn_scalar": 0}, "malformed", "query_pre_attn_scalar"),
        ({"rope_local_base_freq": -1}, "malformed", "rope_local_base_freq"),
        ({"rope_scaling": {"rope_type": "linear"}}, "malformed", "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "unsupported", "rope_type"),
        ({"rope_parameters": {"full_attention": 1}}, "malformed", "full_attention"),
        ({"model_type": "gemma3"}, "malformed", "text_config"),
        ({"model_type": "gemma2"}, "unsupported", "model_type"),
        ({"model_type": "gemma"}, "unsupported", "model_type"),
        ({"model_type": "gemma3n"}, "unsupported", "model_type"),
    ],
)
def test_wrong_configs_are_refused(
    saved: Path, change: dict[str, Any], reason: str, key: str
) -> None:
    _change(saved, lambda fields: fields | change)
    with raises_coded(ModelError, reason, key) as caught:
        load_model(str(saved))
    assert change.get("model_type") not in ("gemma", "gemma2") or "Gemma 3" in str(caught.value)


def test_null_is_the_default_of_what_is_not_computed(saved: Path) -> None:
    _change(saved, lambda fields: fields | {"use_bidirectional_attention": None})
    assert load_shape(str(saved)) == MODEL.config.shape


def test_gguf_files_add_1_to_the_scales_of_norms(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, MODEL)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    norms = {name for name in tensors if "norm" in name}
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    names = (*names, "attn_q_norm", "attn_k_norm")
    inside = {f"blk.{layer}.{name}.weight" for layer in range(7) for name in names}
    assert norms == {"output_norm.weight"} | inside
    assert all((tensors[name] == 1.125).all() for name in norms)
    loaded = load_model(str(path))
    assert (np.asarray(loaded.params["layers_3"]["mlp_post_norm"]["scale"]) == 0.125).all()


def test_the_largest_model_is_known_by_its_layers_in_gguf(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, MODEL, {"gemma3.block_count": (62, NUMBER)})
    mixer = load_shape(str(path)).blocks[61].mixer
    assert mixer.scale == (16 / 4) ** -0.5 and mixer.head_dim == 6
    write_gguf(path, MODEL, {"gemma3.rope.freq_base_swa": (20.0, REAL)})
    mixers = [block.mixer for block in load_shape(str(path)).blocks]
    assert (mixers[0].rope, mixers[5].rope) == (Rope(20.0), Rope(1e6, LinearScaling(8.0)))
    assert mixers[0].scale is None


def test_gemma_2_in_gguf_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", MODEL, architecture="gemma2")
    with raises_coded(ModelError, "unsupported", "general.architecture") as caught:
        load_model(str(tmp_path / "a.gguf"))
    assert "Gemma 3" in str(caught.value)
