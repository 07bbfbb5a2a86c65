"""Tests of which files of a directory hold the weights, in the order of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from coded import raises_coded

from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.formats.weight_files import INDEX, NAMED, find_weights
from lightning_jax.models.model_files import ModelError
from lightning_jax.testing.tiny import tiny_model

TINY = tiny_model(num_layers=1)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Arrays = dict[str, np.ndarray]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_hf(tmp_path / "model", TINY)
    return tmp_path / "model"


def _arrays(directory: Path) -> Arrays:
    return safetensors.numpy.load_file(directory / NAMED)


def _write(path: Path, arrays: Arrays, factor: float = 1.0) -> None:
    safetensors.numpy.save_file({name: array * factor for name, array in arrays.items()}, path)


def _configure(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def _index(directory: Path, files: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _split(directory: Path, stem: str = "model") -> tuple[str, str]:
    """Replace the file by two shards with an index. Return the shards' names."""
    arrays = _arrays(directory)
    names = sorted(arrays)
    parts = (names[::2], names[1::2])
    files = (f"{stem}-00001-of-00002.safetensors", f"{stem}-00002-of-00002.safetensors")
    for file, part in zip(files, parts, strict=True):
        _write(directory / file, {name: arrays[name] for name in part})
    _index(directory, {n: f for f, part in zip(files, parts, strict=True) for n in part})
    (directory / NAMED).unlink()
    return files


def _embedding(directory: Path) -> np.ndarray:
    return np.asarray(load_model(str(directory)).params["embed"]["embedding"])


def _stale_shards(directory: Path) -> None:
    _write(directory / "model-00001-of-00001.safetensors", _arrays(directory), 3.0)


def _stale_single(directory: Path) -> None:
    arrays = _arrays(directory)
    _split(directory)
    _write(directory / "old.safetensors", arrays, 3.0)


def _index_of_others(directory: Path) -> None:
    arrays = _arrays(directory)
    for file in _split(directory, "zz"):
        (directory / file).rename(directory / file.replace("zz", "aa"))
    _index(directory, {n: f"aa-0000{1 + i % 2}-of-00002.safetensors"
                       for i, n in enumerate(sorted(arrays))})  # fmt: skip
    _write(directory / "model-00001-of-00003.safetensors", arrays, 3.0)


def _named_in_config(directory: Path) -> None:
    arrays = _arrays(directory)
    _write(directory / NAMED, arrays, 3.0)
    _write(directory / "best.safetensors", arrays)
    _configure(directory, transformers_weights="best.safetensors")


def _single_and_index(directory: Path) -> None:
    arrays = _arrays(directory)
    _write(directory / "model-00001-of-00001.safetensors", arrays, 3.0)
    _index(directory, dict.fromkeys(arrays, "model-00001-of-00001.safetensors"))


@pytest.mark.parametrize(
    ("arrange", "files"),
    [
        (_stale_shards, [NAMED]),
        (_single_and_index, [NAMED]),
        (_stale_single, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (_index_of_others, ["aa-00001-of-00002.safetensors", "aa-00002-of-00002.safetensors"]),
        (_named_in_config, ["best.safetensors"]),
    ],
)
def test_the_files_that_transformers_reads_count(
    arrange: Any, files: list, directory: Path
) -> None:
    expected = np.asarray(TINY.params["embed"]["embedding"])
    arrange(directory)
    read = {path.name for path in find_weights(directory).files.values()}
    assert sorted(read) == files
    np.testing.assert_array_equal(_embedding(directory), expected)


def test_a_shard_that_the_index_names_must_be_there(directory: Path) -> None:
    first, second = _split(directory)
    (directory / second).unlink()
    with raises_coded(ModelError, "missing", str(directory / second)):
        load_model(str(directory))
    (directory / INDEX).unlink()  # the numbers in the name say so too
    with raises_coded(ModelError, "missing") as caught:
        load_model(str(directory))
    assert second in str(caught.value) and first not in str(caught.value)


def test_loose_files_that_repeat_a_weight_are_refused(directory: Path) -> None:
    arrays = _arrays(directory)
    (directory / NAMED).rename(directory / "a.safetensors")
    _write(directory / "b.safetensors", {HEAD: arrays[EMBEDDING], EMBEDDING: arrays[EMBEDDING]})
    with raises_coded(ModelError, "ambiguous", EMBEDDING):
        load_model(str(directory))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{", INDEX),
        ("{}", INDEX),
        ('{"weight_map": {"a": "../model/x.safetensors/../../y"}}', INDEX),
    ],
)
def test_a_malformed_index_is_refused(text: str, key: str, directory: Path) -> None:
    (directory / NAMED).unlink()
    (directory / INDEX).write_text(text)
    with raises_coded(ModelError, "malformed", str(directory / key)):
        load_model(str(directory))


def test_a_model_without_its_head_loads_if_the_weights_are_tied(directory: Path) -> None:
    arrays = _arrays(directory)
    _write(directory / NAMED, {name.removeprefix("model."): a for name, a in arrays.items()})
    np.testing.assert_array_equal(_embedding(directory), arrays[EMBEDDING])
    arrays[HEAD] = arrays.pop(EMBEDDING)
    _write(directory / NAMED, arrays)
    np.testing.assert_array_equal(_embedding(directory), arrays[HEAD])


def test_output_weights_of_their_own_count_more_than_the_config(directory: Path) -> None:
    arrays = _arrays(directory)
    _write(directory / NAMED, arrays | {HEAD: arrays[EMBEDDING].copy()})
    assert load_model(str(directory)).config.shape.tie_embeddings
    _write(directory / NAMED, arrays | {HEAD: arrays[EMBEDDING] + 1.0})
    loaded = load_model(str(directory))
    assert not loaded.config.shape.tie_embeddings
    head = np.asarray(loaded.params["head"]["kernel"])
    np.testing.assert_array_equal(head.T, arrays[EMBEDDING] + 1.0)
