"""Each parameter's name in our tree, in a Hugging Face file and in a GGUF file, of any family."""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.models.families.table import FAMILIES
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.shape import Block, DecoderConfig, DecoderShape
from lightning_jax.models.transformer import LAYER, Params, param_shapes
from lightning_jax.system.text import in_one_line

ParamPath = tuple[str, ...]


class Place(NamedTuple):
    """Rows of a tensor of a file that are one parameter. Mostly these are all of its rows."""

    name: str  # of the tensor
    start: int
    stop: int
    total: int  # rows of the tensor


@dataclass(frozen=True)
class NamedParam:
    """One parameter and its places in files. Files store matrices as [out, in], we as [in, out]."""

    path: ParamPath
    shape: tuple[int, ...]  # ours
    hf: Place
    gguf: Place
    # Change of a GGUF file's rows to those of Hugging Face, see families.family.Weight.
    from_gguf: Callable[[np.ndarray], np.ndarray] | None = None

    def rows(self, ours: np.ndarray) -> np.ndarray:
        """Return the parameter as files store it."""
        return np.ascontiguousarray(ours.swapaxes(-1, -2) if _is_transposed(self.path) else ours)

    def check(self, place: Place, shape: tuple[int, ...]) -> None:
        """Raise ModelError if the tensor of the parameter has another shape than it needs."""
        expected = (place.total, *_shape_in_files(self.path, self.shape)[1:])
        if shape != expected:
            raise ModelError.mismatch(
                place.name,
                f"weight {place.name} has shape {shape}; the config needs {expected}. Check that "
                "the weights and the config belong to the same model.",
            )

    def cut(self, place: Place, array: np.ndarray) -> np.ndarray:
        """Return the parameter's rows of a tensor. Raise ModelError for one of another shape."""
        self.check(place, array.shape)
        return array[place.start : place.stop]

    def from_rows(self, rows: np.ndarray, dtype: Any) -> jax.Array:
        """Convert the rows of `cut` to our parameter."""
        return jnp.asarray(self.rows(rows), dtype)


def _is_transposed(path: ParamPath) -> bool:
    return path[-1] == "kernel"


def _shape_in_files(path: ParamPath, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if _is_transposed(path) else shape


def refuse_extra(where: object, names: Collection[str], fix: str) -> None:
    """Raise ModelError if a file has these weights, which the model's layers lack."""
    if names:
        first = min(names)
        raise ModelError.unsupported(
            first,
            f"{where} has {len(names)} weights that its config does not describe, among them "
            f"{in_one_line(first)}; {fix}",
        )


def named_params(shape: DecoderShape) -> list[NamedParam]:
    """List every parameter of a model with this shape. Adapters are in separate files."""
    leaves = flatten(param_shapes(DecoderConfig(shape)))
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    places = [_places(shape, shapes, kind) for kind in ("config", "gguf")]

    def change(path: ParamPath) -> Callable[[np.ndarray], np.ndarray] | None:
        from_gguf = FAMILIES[shape.family].weights[path[-2]].from_gguf
        return from_gguf and functools.partial(from_gguf, block=_block_of(shape, path))

    return [NamedParam(p, s, places[0][p], places[1][p], change(p)) for p, s in shapes.items()]


def _places(
    shape: DecoderShape, shapes: dict[ParamPath, tuple[int, ...]], kind: str
) -> dict[ParamPath, Place]:
    """Return the place of each parameter. Those of one tensor are in the order of the table."""
    weights = FAMILIES[shape.family].weights
    order = list(weights)
    spans: dict[ParamPath, tuple[str, int, int]] = {}
    totals: dict[str, int] = {}
    for path in sorted(shapes, key=lambda path: order.index(path[-2])):
        suffix = "bias" if path[-1] == "bias" else "weight"
        layer = path[0].removeprefix(LAYER)
        name = f"{getattr(weights[path[-2]], kind).format(layer=layer)}.{suffix}"
        start = totals.get(name, 0)
        totals[name] = start + _shape_in_files(path, shapes[path])[0]
        spans[path] = name, start, totals[name]
    return {path: Place(*span, totals[span[0]]) for path, span in spans.items()}


def _block_of(shape: DecoderShape, path: ParamPath) -> Block | None:
    is_inside = path[0].startswith(LAYER)
    return shape.blocks[int(path[0].removeprefix(LAYER))] if is_inside else None


def flatten(params: Params) -> dict[ParamPath, Any]:
    """Return the tree's leaves by their path of keys."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {tuple(str(key.key) for key in path): leaf for path, leaf in leaves}  # type: ignore[attr-defined]


def unflatten(leaves: dict[ParamPath, Any]) -> Params:
    """Build the tree with these leaves."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
