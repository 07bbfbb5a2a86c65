"""Table of each parameter's name in our tree, in a Hugging Face file and in a GGUF file."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.models.model_files import ModelError
from lightning_jax.models.shape import DecoderConfig, DecoderShape
from lightning_jax.models.transformer import Params, param_shapes

ParamPath = tuple[str, ...]


@dataclass(frozen=True)
class NamedParam:
    """One parameter with its three names. Files store matrices as [out, in], we as [in, out]."""

    path: ParamPath
    hf: str
    gguf: str
    shape: tuple[int, ...]  # ours
    transpose: bool

    def checked(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the array of a file. Raise ModelError if its shape is not the parameter's."""
        if (array.T if self.transpose else array).shape != self.shape:
            raise ModelError.mismatch(
                name,
                f"weight {name} has shape {array.shape}; the config needs {self.shape} "
                f"({'transposed' if self.transpose else 'not transposed'}). Check that the "
                "weights and the config belong to the same model.",
            )
        return array

    def from_rows(self, name: str, array: np.ndarray, dtype: Any) -> jax.Array:
        """Convert an array from a file to our parameter. Raises ModelError if its shape differs."""
        rows = self.checked(name, array)
        return jnp.asarray(np.ascontiguousarray(rows.T if self.transpose else rows), dtype)


_OUTSIDE: dict[ParamPath, tuple[str, str]] = {
    ("embed", "embedding"): ("model.embed_tokens.weight", "token_embd.weight"),
    ("final_norm", "scale"): ("model.norm.weight", "output_norm.weight"),
    ("head", "kernel"): ("lm_head.weight", "output.weight"),
}
_IN_LAYER = {
    "attn_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}


def named_params(shape: DecoderShape) -> list[NamedParam]:
    """List every parameter of a model with this shape. Adapters are in separate files."""
    shapes = flatten(param_shapes(DecoderConfig(shape)))
    return [_named_param(path, leaf.shape) for path, leaf in shapes.items()]


def _named_param(path: ParamPath, shape: tuple[int, ...]) -> NamedParam:
    if path in _OUTSIDE:
        hf, gguf = _OUTSIDE[path]
    else:
        layer, part, leaf = path
        number, suffix = layer.removeprefix("layers_"), "bias" if leaf == "bias" else "weight"
        _, in_gguf = _IN_LAYER[part]
        hf = f"{hf_module(layer, part)}.{suffix}"
        gguf = f"blk.{number}.{in_gguf}.{suffix}"
    return NamedParam(path, hf, gguf, shape, transpose=path[-1] == "kernel")


def hf_module(layer: str, part: str) -> str:
    """Return Hugging Face's name for a part of a layer.

    For example, layers_0 and q give model.layers.0.self_attn.q_proj.
    """
    return f"model.layers.{layer.removeprefix('layers_')}.{_IN_LAYER[part][0]}"


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
