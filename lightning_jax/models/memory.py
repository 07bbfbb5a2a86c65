"""Memory of a model on one device in bytes, computed from shapes alone.

It is exact for weights and caches, and an estimate for the rest of a training step.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.blocks.layer import Layer, activations_of
from lightning_jax.models.blocks.parts import Hidden, Width
from lightning_jax.models.config import RematKind
from lightning_jax.models.lora import frozen_part, overlay, pick, trained_part
from lightning_jax.models.mesh import MESH_AXES, platform_of
from lightning_jax.models.reshard import layout, lies_at
from lightning_jax.models.shape import Block, DecoderConfig
from lightning_jax.models.sharding import param_shardings
from lightning_jax.models.transformer import (
    KEPT,
    Params,
    layer_inputs,
    layer_of,
    param_shapes,
)


def weight_bytes(
    model: DecoderConfig, mesh: Mesh, dtype: Any, part: Callable[[Any], Any] = lambda tree: tree
) -> int:
    """Return the bytes of all weights, or of a part of them, on one device."""
    shapes = jax.tree.leaves(part(param_shapes(model)))
    shardings = jax.tree.leaves(part(param_shardings(model, mesh)))
    sizes = (
        math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(shapes, shardings, strict=True)
    )
    return sum(sizes) * jnp.dtype(dtype).itemsize


def shares_frozen(
    model: DecoderConfig, training: Mesh, engines: Sequence[Mesh], dtype: Any
) -> bool:
    """Return whether all engines can read the trainer's own copy of frozen weights in `dtype`.

    An engine that transposes kernels has its own copy.
    """
    shapes = frozen_part(param_shapes(model))
    turned = turns_kernels(engines[0], dtype)
    if shapes is None or turned or jax.process_count() > 1:
        return False
    source, *targets_by_engine = (
        jax.tree.leaves(pick(param_shardings(model, mesh), shapes)) for mesh in (training, *engines)
    )
    return all(
        lies_at(sharding, target, leaf.shape)
        for targets in targets_by_engine
        for leaf, sharding, target in zip(jax.tree.leaves(shapes), source, targets, strict=True)
    )


def turns_kernels(engine: Mesh, dtype: Any) -> bool:
    """Return whether an engine transposes its kernels, as it does with float32 on one CPU device.

    See `matmul.turn_kernels`.
    """
    is_one_cpu = engine.size == 1 and engine.devices.flat[0].platform == "cpu"
    return is_one_cpu and jnp.dtype(dtype) == jnp.float32


def copy_bytes(model: DecoderConfig, training: Mesh, engine: Mesh, dtype: Any) -> int:
    """Return the bytes of `prepare_copy` of trained weights, less those the engine keeps."""
    shapes = trained_part(param_shapes(model))
    sources, targets = (
        jax.tree.leaves(pick(param_shardings(model, mesh), shapes)) for mesh in (training, engine)
    )
    number = 0
    for leaf, sharding, target in zip(jax.tree.leaves(shapes), sources, targets, strict=True):
        cast = layout(sharding, target)
        if not cast.is_equivalent_to(sharding, len(leaf.shape)):  # cast shards, before gathering
            number += math.prod(sharding.shard_shape(leaf.shape))
        if not lies_at(cast, target, leaf.shape):
            number += math.prod(cast.shard_shape(leaf.shape))
    return number * jnp.dtype(dtype).itemsize


def used_weight_bytes(model: DecoderConfig, mesh: Mesh, *, remat: RematKind, dtype: Any) -> int:
    """Return the bytes of the copy in the computation's dtype and of its gathered part."""
    dtype = jnp.dtype(dtype)
    # With `remat` a CPU stacks the layers. Otherwise frozen weights are used in place.
    if remat != "none" and mesh.devices.flat[0].platform == "cpu":
        copy = weight_bytes(model, mesh, dtype)
    else:
        copy = 0 if dtype == jnp.float32 else weight_bytes(model, mesh, dtype, trained_part)
    if mesh.shape["fsdp"] == 1:
        return copy
    gathered = Mesh(mesh.devices[:1, :1], mesh.axis_names)  # over `fsdp`
    whole = weight_bytes(model, gathered, dtype)
    shape = model.shape
    numbers = shape.vocab_size * shape.embed_dim // _split("vocab", shape.vocab_size, mesh)
    outside = numbers * dtype.itemsize * (1 if shape.tie_embeddings else 2)
    # The gradients of gathered weights are also whole until they are reduced.
    at_once = outside + max(
        weight_bytes(model, gathered, dtype, partial(layer_of, layer=shape.blocks.index(block)))
        for block in shape.distinct_blocks
    )
    return copy + (whole + at_once if remat == "none" else 2 * at_once)


def activation_bytes(model: DecoderConfig, mesh: Mesh, *, remat: RematKind, dtype: Any) -> int:
    """Return the activation bytes of one token.

    A layer keeps its input, two normed inputs, queries, keys, values, the attention output and
    three arrays of the MLP. With norms around, it also keeps two results that are normed. With
    `remat` only one layer at a time does so. The others keep their input and what
    `transformer.KEPT` names, of which the log-sums are float32. Without `remat` a CPU keeps all
    that JAX saves of a layer, also parts of norms and activation functions. Other compilers compute
    them again.
    """
    shape, size = model.shape, jnp.dtype(dtype).itemsize

    def numbers(width: Width) -> int:
        here = width.units * width.size // _split(width.axis, width.units, mesh)
        return here * math.prod(mesh.shape[name] for name in MESH_AXES[width.gathers])

    def layer(block: Block, numbers: Callable[[Width], int] = numbers) -> int:
        widths = activations_of(block, shape.embed_dim).values()
        around = 6 if block.norms == "around" else 4
        return around * shape.embed_dim + sum(numbers(w) for w in widths if not w.is_statistic)

    def saved(block: Block) -> int:
        """Return what one device has of all that JAX saves: the share it has of a layer."""
        whole = layer(block, lambda width: width.units * width.size)
        return saved_numbers(model, block) * layer(block) // whole

    def kept(block: Block) -> int:
        widths = ((name, width) for name, width in activations_of(block, shape.embed_dim).items())
        named = [width for name, width in widths if remat != "none" and name in KEPT[remat]]
        sizes = (numbers(width) * (4 if width.is_statistic else size) for width in named)
        return shape.embed_dim * size + sum(sizes)

    layers = {block: layer(block) * size for block in shape.distinct_blocks}
    largest = max(layers.values())
    if remat != "none":
        return sum(kept(block) for block in shape.blocks) + 2 * largest
    if mesh.devices.flat[0].platform == "cpu":
        layers = {block: saved(block) * size for block in layers}
    return largest + sum(layers[block] for block in shape.blocks)


@cache
def saved_numbers(model: DecoderConfig, block: Block) -> int:
    """Return how many numbers of one token JAX saves of a layer for its backward pass.

    The layer is whole, on one device. Weights are left out: they are saved once for all tokens.
    """
    model = model.with_shape(blocks=(block,))
    params = param_shapes(model)
    frozen, layer = frozen_part(params), Layer(block, model.shape.norm, model.execution)

    def sizes(length: int) -> int:
        positions = jnp.zeros((1, length), jnp.int32)
        chosen = None if model.execution.num_adapters is None else jnp.zeros(1, jnp.int32)

        def save(trained: Params, frozen: Params | None, x: Hidden) -> Any:
            (inputs,) = layer_inputs(model.shape, positions, positions, None, None, chosen)

            def run(trained: Params, x: Hidden) -> Hidden:
                weights = layer_of(overlay(frozen, trained), 0)
                return layer.apply({"params": weights}, x, inputs, None)[0]

            return jax.vjp(run, trained, x)[1]

        x = jax.ShapeDtypeStruct((1, length, model.shape.embed_dim), jnp.float32)
        saved = jax.eval_shape(save, trained_part(params), frozen, x)
        return sum(leaf.size for leaf in jax.tree.leaves(saved))

    length = 4096  # attention to few tokens is computed at once
    return (sizes(2 * length) - sizes(length)) // length


def logit_bytes(model: DecoderConfig, mesh: Mesh) -> int:
    """Return the bytes of one token's float32 logits."""
    vocab_size = model.shape.vocab_size
    return 4 * vocab_size // _split("vocab", vocab_size, mesh)


def cache_bytes(
    model: DecoderConfig, rows: int, length: int, sharding: NamedSharding, dtype: Any
) -> int:
    """Return the bytes of the keys and values of `rows` rows of `length` tokens."""
    platform = platform_of(sharding)
    cache = jax.eval_shape(lambda: init_cache(model.shape, rows, length, dtype, platform))
    sizes = (math.prod(sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(cache))
    return sum(sizes) * jnp.dtype(dtype).itemsize


def decode_bytes(model: DecoderConfig, mesh: Mesh, dtype: Any) -> tuple[int, dict[int | None, int]]:
    """Return what one device reads in a decode step: (bytes of weights, bytes per cached token).

    The second is that of the layers with each window. Each row of the step reads the tokens of its
    context, or those in the window. If the head has weights of its own, a step
    reads so little of the embeddings that they are left out.
    """

    def read(tree: Any) -> Any:
        tied = model.shape.tie_embeddings
        return tree if tied else {key: leaf for key, leaf in tree.items() if key != "embed"}

    token: dict[int | None, int] = {}
    for block in model.shape.blocks:
        mixer = block.mixer
        numbers = 2 * mixer.kv_heads * mixer.head_dim
        share = numbers // _split("kv_heads", mixer.kv_heads, mesh) * jnp.dtype(dtype).itemsize
        token[mixer.window] = token.get(mixer.window, 0) + share
    return weight_bytes(model, mesh, dtype, read), token


def _split(axis: str | None, size: int, mesh: Mesh) -> int:
    """Return the number of parts into which the mesh splits a logical axis."""
    parts = math.prod(mesh.shape[name] for name in MESH_AXES[axis])
    return parts if size % parts == 0 else 1
