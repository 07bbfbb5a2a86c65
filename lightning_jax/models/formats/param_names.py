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
# Puts a weight, which is on the host, where it is used: put(path, leaf).
Put = Callable[[ParamPath, jax.Array], jax.Array]


class Place(NamedTuple):
    """Rows of a tensor of a file that are one parameter. Mostly these are all of its rows.

    Of a tensor of several matrices, they are the rows of each.
    """

    name: str  # of the tensor
    start: int
    stop: int
    total: int  # rows of the tensor


@dataclass(frozen=True)
class NamedParam:
    """One parameter and its places in files. Files store matrices as [out, in], we as [in, out].

    If the name of `hf` has an {expert}, each expert has a tensor, whose place it is.
    """

    path: ParamPath
    shape: tuple[int, ...]  # ours
    hf: Place
    gguf: Place
    stacked: Place | None = None  # of all experts in safetensors, where they have one tensor
    # Change of a GGUF file's rows to those of Hugging Face, see families.family.Weight.
    from_gguf: Callable[[np.ndarray], np.ndarray] | None = None

    def rows(self, ours: np.ndarray) -> np.ndarray:
        """Return the parameter as files store it."""
        return np.ascontiguousarray(ours.swapaxes(-1, -2) if _is_transposed(self.path) else ours)

    @property
    def is_split(self) -> bool:
        """True if each expert has a tensor in safetensors."""
        return "{expert}" in self.hf.name

    @property
    def hf_places(self) -> list[Place]:
        """Its places in safetensors, one of each expert if it is split."""
        number = self.shape[0] if self.is_split else 1
        names = (self.hf.name.format(expert=index) for index in range(number))
        return [self.hf._replace(name=name) for name in names]

    def check(self, place: Place, shape: tuple[int, ...], *, is_expert: bool = False) -> None:
        """Raise ModelError if the tensor of the parameter has another shape than it needs."""
        expected, axis = self._rows(is_expert)
        expected = (*expected[:axis], place.total, *expected[axis + 1 :])
        if shape != expected:
            raise ModelError.mismatch(
                place.name,
                f"weight {place.name} has shape {shape}; the config needs {expected}. Check that "
                "the weights and the config belong to the same model.",
            )

    def cut(self, place: Place, array: np.ndarray, *, is_expert: bool = False) -> np.ndarray:
        """Return the parameter's rows of a tensor. Raise ModelError for one of another shape."""
        self.check(place, array.shape, is_expert=is_expert)
        _, axis = self._rows(is_expert)
        return array[(slice(None),) * axis + (slice(place.start, place.stop),)]

    def _rows(self, is_expert: bool) -> tuple[tuple[int, ...], int]:
        """Return (shape in files of the parameter or of an expert's part, axis of its rows)."""
        shape = _shape_in_files(self.path, self.shape)[1 if is_expert else 0 :]
        return shape, _rows_axis(shape)

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


def _rows_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of the rows of a tensor, or of each of its matrices."""
    return max(0, len(shape) - 2)


def named_params(shape: DecoderShape) -> list[NamedParam]:
    """List every parameter of a model with this shape. Adapters are in separate files."""
    leaves = flatten(param_shapes(DecoderConfig(shape)))
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    hf, gguf, stacked = (_places(shape, shapes, kind) for kind in ("config", "gguf", "stacked"))

    def change(path: ParamPath) -> Callable[[np.ndarray], np.ndarray] | None:
        from_gguf = FAMILIES[shape.family].weights[path[-2]].from_gguf
        return from_gguf and functools.partial(from_gguf, block=_block_of(shape, path))

    return [
        NamedParam(path, size, hf[path], gguf[path], stacked.get(path), change(path))
        for path, size in shapes.items()
    ]


def _places(
    shape: DecoderShape, shapes: dict[ParamPath, tuple[int, ...]], kind: str
) -> dict[ParamPath, Place]:
    """Return the place of each parameter. Those of one tensor are in the order of the table."""
    weights = FAMILIES[shape.family].weights
    order = list(weights)
    spans: dict[ParamPath, tuple[str, int, int]] = {}
    totals: dict[str, int] = {}
    for path in sorted(shapes, key=lambda path: order.index(path[-2])):
        if (pattern := getattr(weights[path[-2]], kind)) is None:
            continue
        suffix = ".bias" if path[-1] == "bias" else ".weight"
        layer = path[0].removeprefix(LAYER)
        name = pattern.format(layer=layer, expert="{expert}")
        name += "" if kind == "stacked" else suffix
        start, size = totals.get(name, 0), _shape_in_files(path, shapes[path])
        totals[name] = start + size[_rows_axis(size)]
        spans[path] = name, start, totals[name]
    return {path: Place(*span, totals[span[0]]) for path, span in spans.items()}


def _block_of(shape: DecoderShape, path: ParamPath) -> Block | None:
    is_inside = path[0].startswith(LAYER)
    return shape.blocks[int(path[0].removeprefix(LAYER))] if is_inside else None


def keep(path: ParamPath, leaf: jax.Array) -> jax.Array:
    """Leave a weight on the host. See `Put`."""
    return leaf


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
