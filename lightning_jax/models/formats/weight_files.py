"""Weight files of a Hugging Face directory, chosen as transformers chooses them."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from lightning_jax.models.formats.advice import on_no_safetensors
from lightning_jax.models.model_files import ModelError, malformed, read_object

NAMED, INDEX = "model.safetensors", "model.safetensors.index.json"
_CHOSEN = "transformers_weights"  # field of config.json with the name of the file to read
_ADAPTERS = "adapter_*.safetensors"


class Head(NamedTuple):
    """Description of a weight, which is read without its numbers."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


@dataclass(frozen=True)
class Weights:
    """Names of the weights in the files of one directory, and the file that has each."""

    files: Mapping[str, Path]
    heads: Mapping[str, Head]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the weights of these names. Each file is opened once."""
        requested = set(names)
        for path in dict.fromkeys(self.files.values()):
            with _opened(path) as opened:
                for name in sorted(name for name in requested if self.files.get(name) == path):
                    yield name, np.asarray(opened.get_tensor(name))

    def rows(self, name: str, step: int) -> np.ndarray:
        """Return every `step`-th row of a weight."""
        with _opened(self.files[name]) as opened:
            part = opened.get_slice(name)
            if len(shape := part.get_shape()) != 2 or not shape[0]:
                raise ModelError.mismatch(
                    name,
                    f"weight {name} of {self.files[name]} has shape {shape}; expected rows of "
                    "tokens. Check that the weights and the config belong to the same model.",
                )
            starts = range(0, shape[0], step)
            return np.concatenate([np.asarray(part[start : start + 1]) for start in starts])


def find_weights(directory: Path) -> Weights:
    """Return the weights of the files that count.

    These are the file that config.json names as `transformers_weights`, else `model.safetensors`,
    else the files that the index names. Without any of them, all loose files are read, which must
    not repeat a weight. Raises ModelError.
    """
    paths, are_loose = _chosen_files(directory)
    files: dict[str, Path] = {}
    heads: dict[str, Head] = {}
    for path in paths:
        with _opened(path) as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                if are_loose and name in files:
                    raise ModelError(
                        f"both {files[name]} and {path} have the weight {name}, and no {INDEX} "
                        "says which file counts; move one of them to another folder",
                        reason="ambiguous",
                        key=name,
                    )
                part = opened.get_slice(name)
                heads[name] = Head(tuple(part.get_shape()), part.get_dtype())
                files[name] = path  # of two files in the index, transformers takes the last
    return Weights(files, heads)


def _chosen_files(directory: Path) -> tuple[list[Path], bool]:
    """Return the files to read, and True if nothing names them."""
    config = directory / "config.json"
    named = read_object(config).get(_CHOSEN)
    if named is not None:
        path = _named_file(config, named)
        return (_shards(path) if path.suffix == ".json" else [path]), False
    if (directory / NAMED).is_file():
        return [directory / NAMED], False
    if (directory / INDEX).is_file():
        return _shards(directory / INDEX), False
    adapters = set(directory.glob(_ADAPTERS))
    loose = sorted(set(directory.glob("*.safetensors")) - adapters)
    if not loose:
        raise ModelError.missing(
            "*.safetensors", f"{directory} has no {NAMED}; {on_no_safetensors(directory)}"
        )
    return loose, True


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names, in the order of transformers."""
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ModelError.malformed(
            str(index),
            f"{index} has no weight_map from weights to files; write it again with save_pretrained",
        )
    return [_named_file(index, name) for name in sorted(set(named.values()))]


def _named_file(source: Path, name: Any) -> Path:
    """Return a file of its folder that `source` names. Raise ModelError if there is none."""
    path = source.parent / str(name)
    if not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(source.parent)):
        raise ModelError.malformed(
            str(source), f"{source} names {name!r}, which is outside its folder; correct it"
        )
    if not path.is_file():
        raise ModelError.missing(
            str(path),
            f"{path.parent} lacks {path.name}, which {source.name} names; copy or download that "
            "file too",
        )
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file. Raise ModelError if it cannot be opened or read in the context."""
    try:
        with safetensors.safe_open(path, framework="flax") as opened:  # numpy lacks bfloat16
            yield opened
    except ModelError:
        raise
    except Exception as error:  # the libraries raise nothing narrower
        raise malformed(path, "a readable safetensors file", error) from error
