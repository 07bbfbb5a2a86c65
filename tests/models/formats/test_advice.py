"""Tests that an error about a model's files names what is wrong, not the model's address."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.numpy
from coded import raises_coded

from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.model_files import ModelError
from lightning_jax.testing.tiny import tiny_model

HEAD, POINTER = (
    "lm_head.weight",
    "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a model without tied weights."""
    save_hf(tmp_path / "model", tiny_model(num_layers=1))
    path = tmp_path / "model" / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    _save(path, arrays | {HEAD: arrays["model.embed_tokens.weight"] + 1})
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    load_model(str(tmp_path / "model"))
    return tmp_path / "model"


def _save(path: Path, arrays: dict) -> None:
    safetensors.numpy.save_file(arrays, path)


def _refused(name: Path, reason: str, key: str, *words: str) -> None:
    with raises_coded(ModelError, reason, key) as caught:
        load_model(str(name))
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "flax_model.msgpack"])
def test_weights_in_another_format_are_to_be_converted(name: str, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / name)
    (directory / "training_args.bin").write_bytes(b"")
    _refused(directory, "missing", "*.safetensors", name, "save_pretrained")


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"],
)
def test_a_pointer_of_git_lfs_is_named(name: str, directory: Path) -> None:
    (directory / name).write_text(POINTER)
    _refused(directory, "malformed", str(directory / name), "git lfs pull")


def test_a_gguf_file_may_be_a_pointer_too(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text(POINTER)
    _refused(tmp_path / "a.gguf", "malformed", str(tmp_path / "a.gguf"), "git lfs pull")


@pytest.mark.parametrize(
    ("rename", "key", "words"),
    [
        (lambda n: None if n == HEAD else n.removeprefix("model."), HEAD, ["ForCausalLM", "head"]),
        (lambda n: None if n == HEAD else n, HEAD, ["tie_word_embeddings"]),
        (lambda n: "score.weight" if n == HEAD else n, HEAD, ["tie_word", "score.weight"]),
        (lambda n: f"_orig_mod.{n}", "model.embed_tokens.weight", ["'_orig_mod.'"]),
        (lambda n: n.replace("layers.0", "layers.7"), "model.layers.0.input_layernorm.weight", []),
    ],
)
def test_missing_weights_are_explained(rename, key: str, words: list, directory: Path) -> None:
    path = directory / "model.safetensors"
    arrays = safetensors.numpy.load_file(path)
    _save(path, {new: array for name, array in arrays.items() if (new := rename(name))})
    with raises_coded(ModelError, "missing") as caught:
        load_model(str(directory))
    found = str(caught.value)
    assert key in found and not [word for word in words if word not in found], found


def test_a_file_or_a_folder_beside_the_model_leads_to_it(directory: Path) -> None:
    weights = directory / "model.safetensors"
    _refused(weights, "not_a_directory", str(weights), str(directory))
    run = directory.parent / "run"
    shutil.copytree(directory, run / "policy")
    _refused(run, "missing", str(run / "config.json"), str(run / "policy"))
    cached = directory.parent / "models--x--y"
    shutil.copytree(directory, cached / "snapshots" / "0a1b")
    _refused(cached, "missing", str(cached / "config.json"), str(cached / "snapshots" / "0a1b"))
    folder = directory.parent / "ggufs"
    folder.mkdir()
    (folder / "q4.gguf").write_bytes(b"GGUF")
    _refused(folder, "missing", str(folder / "config.json"), str(folder / "q4.gguf"))


def test_an_adapter_is_no_model(directory: Path) -> None:
    run = directory.parent / "run"
    adapter = run / "policy_adapter" / "planner"
    adapter.mkdir(parents=True)
    fields = {"peft_type": "LORA", "base_model_name_or_path": "x/y"}
    (adapter / "adapter_config.json").write_text(json.dumps(fields))
    _refused(adapter, "missing", str(adapter / "config.json"), "adapter", "x/y", "merge")
    shutil.copytree(directory, run / "policy" / "planner")
    _refused(adapter, "missing", str(adapter / "config.json"), str(run / "policy" / "planner"))
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    _refused(directory, "missing", "*.safetensors", "adapter", "x/y")


def test_a_mixture_of_experts_is_named(directory: Path) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"model_type": "qwen2_moe", "num_experts": 8}))
    _refused(directory, "unsupported", "num_experts", "experts")
