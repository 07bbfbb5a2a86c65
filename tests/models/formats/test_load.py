"""Tests of loading and saving models by name, file and format, and of one-sentence errors."""

import dataclasses
import json
import weakref
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers
from coded import raises_coded
from gguf_models import REAL, TEXT, TINY, assert_equal, variant, write_gguf

from lightning_jax.models.chat_template import render_template
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.families.table import FAMILIES
from lightning_jax.models.formats import find
from lightning_jax.models.formats.find import find_model, load_tokenizer
from lightning_jax.models.formats.gguf_file import open_file
from lightning_jax.models.formats.load import (
    load_like,
    load_model,
    load_shape,
    open_model,
    save_hf,
)
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.model_files import SMOLLM2, ModelError
from lightning_jax.models.shape import DecoderConfig, Execution, LinearScaling, Rope
from lightning_jax.models.sharding import param_shardings
from lightning_jax.models.transformer import init_params
from lightning_jax.testing.tiny import tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_loads_again(family, tmp_path):
    model = variant(family)
    save_hf(tmp_path / "model", model)
    save_hf(tmp_path / "model", model)  # overwrites the first
    loaded = load_model(str(tmp_path / "model"))
    assert_equal(loaded, model)
    assert loaded.tokenizer.eos_ids == model.tokenizer.eos_ids
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert (theirs.model_type, theirs.head_dim, theirs.dtype) == (family, 6, "float32")
    assert theirs.tie_word_embeddings == model.config.shape.tie_embeddings
    assert not getattr(theirs, "use_sliding_window", False)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_weights_are_read_straight_to_their_shards(family, kind, tmp_path):
    model = variant(family)
    if kind == "gguf":
        write_gguf(tmp_path / "model", model)
    else:
        save_hf(tmp_path / "model", model)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    shardings = param_shardings(model.config, mesh)
    loaded = open_model(str(tmp_path / "model")).load(shardings)
    assert_equal(loaded, model)
    expected = flatten(shardings)
    leaves = flatten(loaded.params)
    assert all(
        leaves[path].sharding.is_equivalent_to(expected[path], leaves[path].ndim)
        for path in expected
    )
    split = sum(not leaf.sharding.is_fully_replicated for leaf in leaves.values())
    assert split > len(leaves) / 3


def test_the_host_holds_few_weights_while_they_are_read(tmp_path):
    model = variant("qwen3_moe")  # whose experts are tensors of their own
    save_hf(tmp_path / "model", model)
    read, most = [], 0

    def put(path, leaf):
        nonlocal most
        read.append(weakref.ref(leaf))
        most = max(most, sum(one() is not None for one in read))
        return jnp.zeros(0)

    open_model(str(tmp_path / "model")).params(put)
    assert most <= 3 < len(read) == len(flatten(model.params))


def test_a_family_names_the_format_of_its_tool_calls_unless_the_settings_do(tmp_path):
    for family, expected in (
        ("mistral", "mistral"),
        ("smollm3", "hermes"),
        ("granitemoehybrid", "hermes"),
        ("phi3", "phi"),
        ("olmo2", ""),
    ):
        path = str(tmp_path / family)
        save_hf(path, variant(family))
        assert load_model(path).tokenizer.tool_format == expected
        assert load_model(path, tool_format="hermes").tokenizer.tool_format == "hermes"


def test_bfloat16_is_kept_and_converted(tmp_path):
    model = dataclasses.replace(
        TINY, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), TINY.params)
    )
    save_hf(tmp_path / "model", model)
    assert_equal(load_model(str(tmp_path / "model"), "bfloat16"), model)
    wide = load_model(str(tmp_path / "model"))
    assert wide.params["final_norm"]["scale"].dtype == jnp.float32


def test_a_save_that_fails_leaves_the_old_model(tmp_path):
    save_hf(tmp_path / "model", TINY)
    broken = dataclasses.replace(TINY, params=init_params(TINY.config, jax.random.key(9)))
    del broken.params["layers_1"]["down"]
    with pytest.raises(KeyError):
        save_hf(tmp_path / "model", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_equal(load_model(str(tmp_path / "model")), TINY)


def _repeat_embedding(tmp_path, output):
    """Write a model with tied weights whose file has output weights as well, and load it."""
    model = variant("qwen2")
    path = tmp_path / "model.gguf"
    write_gguf(path, model, tensors={"output.weight": output(model)})
    return model, load_model(str(path))


def test_output_weights_that_repeat_the_embedding_are_not_kept_twice(tmp_path):
    def rounded(model):
        return np.asarray(model.params["embed"]["embedding"]).astype(np.float16)

    model, loaded = _repeat_embedding(tmp_path, rounded)
    assert loaded.config.shape.tie_embeddings
    assert_equal(loaded, model)


def test_output_weights_of_their_own_are_kept(tmp_path):
    def other(model):
        return np.asarray(model.params["embed"]["embedding"])[::-1].copy()

    model, loaded = _repeat_embedding(tmp_path, other)
    assert not loaded.config.shape.tie_embeddings
    assert len(flatten(loaded.params)) == len(flatten(model.params)) + 1


# In GGUF, models of granitemoehybrid without Mamba layers are of the architecture granite.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"granitemoehybrid"}))
def test_a_gguf_file_loads(family, tmp_path):
    model = variant(family)
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    loaded = load_model(str(path))
    assert_equal(loaded, model)
    assert loaded.tokenizer.eos_ids == {258}
    text = "<|im_start|>user\nhey<|im_end|>"
    assert loaded.tokenizer.encode(text) == model.tokenizer.encode(text)


def test_a_gguf_file_with_other_scaled_positions_is_refused(tmp_path):
    path, key = tmp_path / "long.gguf", "rope.scaling.type"
    write_gguf(path, variant("qwen3"), {f"qwen3.{key}": ("yarn", TEXT)})
    with raises_coded(ModelError, "unsupported", key):
        load_model(str(path))
    write_gguf(path, variant("llama"), {"llama.rope.scale_linear": (4.0, REAL)})
    with raises_coded(ModelError, "unsupported", key):  # beside Llama 3's factors
        load_model(str(path))


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"scale_linear": (4.0, REAL)}, LinearScaling(4.0)),
        ({"scaling.type": ("linear", TEXT), "scaling.factor": (0.1, REAL)}, LinearScaling(0.1)),
        ({"scaling.type": ("none", TEXT), "scaling.factor": (4.0, REAL)}, None),
        ({"scaling.type": ("linear", TEXT)}, None),
        ({"scaling.factor": (0.0, REAL)}, None),
    ],
)
def test_a_gguf_file_may_scale_positions_by_a_factor(fields, scaling, tmp_path):
    path = tmp_path / "a.gguf"
    write_gguf(path, variant("qwen3"), {f"qwen3.rope.{name}": one for name, one in fields.items()})
    assert load_shape(str(path)).blocks[0].mixer.rope == Rope(500000.0, scaling)


def test_wrong_gguf_files_are_refused(tmp_path):
    with raises_coded(ModelError, "not_found", str(tmp_path / "none.gguf")):
        load_model(str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"not a model, only some bytes of text")
    with raises_coded(ModelError, "malformed", str(tmp_path / "bad.gguf")):
        load_model(str(tmp_path / "bad.gguf"))
    write_gguf(tmp_path / "mamba.gguf", TINY, architecture="mamba")
    with raises_coded(ModelError, "unsupported", "general.architecture"):
        load_model(str(tmp_path / "mamba.gguf"))


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 100}, 100),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral"}, 4096),  # as in transformers
        ({"model_type": "phi3", "sliding_window": 100}, 100),
        ({"model_type": "phi3", "sliding_window": 2048}, None),  # as long as the longest text
        ({"model_type": "phi3"}, None),
        ({"model_type": "llama", "sliding_window": 100}, None),
    ],
)
def test_every_layer_has_the_window_of_the_config(fields, window, tmp_path):
    save_hf(tmp_path, TINY)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    blocks = load_shape(str(tmp_path)).blocks
    assert [block.mixer.window for block in blocks] == [window, window]


LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}


@pytest.mark.parametrize(
    ("change", "reason", "key"),
    [
        ({"model_type": "gpt_oss"}, "unsupported", "model_type"),
        ({"hidden_size": None}, "missing", "hidden_size"),
        ({"attention_bias": True}, "unsupported", "attention_bias"),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "unsupported",
            "use_sliding_window",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "malformed", "sliding_window"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "unsupported",
            "quantization_config",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "malformed", "no_rope_layers"),
        (
            {"model_type": "smollm3", "no_rope_layer_interval": 0},
            *("malformed", "no_rope_layer_interval"),
        ),
        ({"model_type": "granite"}, "missing", "attention_multiplier"),
        (
            {"model_type": "granite", "attention_multiplier": 0.1, "logits_scaling": 0},
            *("malformed", "logits_scaling"),
        ),
        ({"model_type": "granitemoehybrid"}, "unsupported", "num_local_experts"),
        (
            {"model_type": "granitemoehybrid", "num_local_experts": 0},
            *("unsupported", "layer_types"),
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 2}, "malformed", "partial_rotary_factor"),
        ({"model_type": "phi3", "rope_scaling": LONG}, "malformed", "short_factor"),
        (
            {"model_type": "phi3", "rope_scaling": LONG | {"short_factor": 16 * [0]}},
            *("malformed", "short_factor"),
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "unsupported", "rope_type"),
        ({"intermediate_size": 65}, "mismatch", "model.layers.0.mlp.down_proj.weight"),
        ({"num_hidden_layers": 3}, "missing", "model.layers.2.input_layernorm.weight"),
    ],
)
def test_wrong_configs_are_refused(change, reason, key, tmp_path):
    save_hf(tmp_path / "model", TINY)
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with raises_coded(ModelError, reason, key):
        load_model(str(tmp_path / "model"))


def test_wrong_directories_and_names_are_refused(tmp_path, monkeypatch):
    with raises_coded(ModelError, "missing", str(tmp_path / "config.json")):
        load_model(str(tmp_path))
    save_hf(tmp_path / "model", TINY)
    weights = tmp_path / "model" / "model.safetensors"
    assert weights.stat().st_mode == (tmp_path / "model" / "config.json").stat().st_mode
    weights.write_bytes(weights.read_bytes()[:1000])
    with raises_coded(ModelError, "malformed", str(weights)):
        load_model(str(tmp_path / "model"))
    weights.unlink()
    with raises_coded(ModelError, "missing", "*.safetensors"):
        load_model(str(tmp_path / "model"))
    with raises_coded(ModelError, "not_found", "no-such-model"):
        load_model("no-such-model")
    with raises_coded(ModelError, "not_found", "./no/such"):
        load_model("./no/such")

    def offline(*args, **options):
        raise OSError("the network is down")

    monkeypatch.setattr(find.huggingface_hub, "snapshot_download", offline)
    with raises_coded(ModelError, "unreachable", "someone/something") as caught:
        load_model("someone/something")
    assert "the network is down" in str(caught.value)


def test_the_known_name_falls_back_to_the_hub_without_the_package(tmp_path, monkeypatch):
    save_hf(tmp_path / "hub", TINY)
    asked = []

    def download(hub_id, **options):
        asked.append(hub_id)
        return str(tmp_path / "hub")

    monkeypatch.setattr(find.huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(find.importlib.util, "find_spec", lambda name: None)
    assert_equal(load_model(SMOLLM2), TINY)
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_weights_are_read_from_multiple_files_and_others_are_ignored(tmp_path):
    save_hf(tmp_path / "model", TINY)
    path = tmp_path / "model" / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    path.unlink()
    items = sorted((arrays | {"model.rotary.inv_freq": np.zeros(3, np.float32)}).items())
    for part in range(3):
        shard = dict(items[part::3])
        safetensors.numpy.save_file(shard, path.with_name(f"model-{part}.safetensors"))
    assert_equal(load_model(str(tmp_path / "model")), TINY)


def test_a_model_like_another_has_its_shape_and_vocabulary(tmp_path):
    other = tiny_model(1)
    save_hf(tmp_path / "same", other)
    assert_equal(load_like(TINY, str(tmp_path / "same")), other)
    half = load_model(str(tmp_path / "same"), "bfloat16")
    assert_equal(load_like(half, str(tmp_path / "same")), half)
    dry = dataclasses.replace(TINY, tokenizer=TINY.tokenizer.with_chat(template="dry"))
    assert load_like(dry, str(tmp_path / "same")).tokenizer.template == "dry"
    save_hf(tmp_path / "shape", tiny_model(num_layers=1))
    with raises_coded(ModelError, "mismatch", "shape"):
        load_like(TINY, str(tmp_path / "shape"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = tmp_path / "same" / name
        file.write_text(file.read_text().replace("<|im_end|>", "<|im_over|>"))
    with raises_coded(ModelError, "mismatch", "vocabulary"):
        load_like(TINY, str(tmp_path / "same"))


def test_a_tokenizer_needs_no_weights(tmp_path):
    save_hf(tmp_path, TINY)
    (tmp_path / "model.safetensors").unlink()
    text = "<|im_end|>é"
    assert load_tokenizer(str(tmp_path)).encode(text) == TINY.tokenizer.encode(text)
    (tmp_path / "tokenizer.json").unlink()
    with raises_coded(ModelError, "missing", str(tmp_path / "tokenizer.json")):
        load_tokenizer(str(tmp_path))


def test_the_name_tiny_is_a_random_model() -> None:
    model = load_model("tiny", "bfloat16", "float32")
    assert model.config == DecoderConfig(load_shape("tiny"), Execution(activation_dtype="float32"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert model.tokenizer.vocabulary == load_tokenizer("tiny").vocabulary


def test_a_template_and_its_variables_come_from_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ tone }}: {{ messages[0].content }}")
    model = load_model("tiny", chat_template=file, chat_template_kwargs={"tone": "dry"})
    messages = [{"role": "user", "content": "hi"}]
    assert model.tokenizer.render_chat(messages) == "dry: hi"
    assert model.tokenizer.render_chat(messages, kwargs={"tone": "warm"}) == "warm: hi"
    model.tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").rename(tmp_path / "saved.json")
    saved = json.loads((tmp_path / "saved.json").read_text())["chat_template"]
    assert render_template(saved, messages) == "dry: hi"
    with raises_coded(ModelError, "unreadable", "model.chat_template"):
        load_model("tiny", chat_template=tmp_path / "none.jinja")
    with raises_coded(ModelError, "unread", "model.chat_template_kwargs"):
        load_model("tiny", chat_template_kwargs={"tone": "dry"})
    file.write_text("{% if %}")
    with raises_coded(ModelError, "malformed", "model.chat_template"):
        load_model("tiny", chat_template=file)


def test_gguf_metadata_reads_as_the_library_reads_it() -> None:
    path = find_model("smollm2-135m-instruct")
    ours, theirs = open_file(path), gguf.GGUFReader(path)
    assert ours.fields.keys() == theirs.fields.keys()
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
    places = [[(t.name, t.data_offset) for t in reader.tensors] for reader in (ours, theirs)]
    assert places[0] == places[1]
