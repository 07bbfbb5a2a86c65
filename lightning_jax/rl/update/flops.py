"""Floating-point operations of an update, as its model needs them."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool

from lightning_jax.models.blocks.layer import kernels_of, share_of
from lightning_jax.models.shape import Block, DecoderConfig
from lightning_jax.models.transformer import layer_of, param_shapes
from lightning_jax.rl.batches.batch import Batch
from lightning_jax.system.accelerators import find_accelerator
from lightning_jax.types import Metrics

MFU = "train/mfu"


@dataclass(frozen=True)
class Work:
    """Size of microbatches, without padding."""

    tokens: int  # nodes of the forest
    pairs: int  # of a query and a key that it sees without a window
    targets: int  # pairs of a node and a token, for which the LM head runs
    windows: Mapping[int, int] = field(default_factory=dict)  # pairs in windows of these sizes

    def pairs_of(self, window: int | None) -> int:
        """Return the number of pairs in a window."""
        return self.pairs if window is None else self.windows[window]


def used_nodes(batch: Batch) -> Bool[np.ndarray, "B T"]:
    """Return which nodes of a host's batch are no padding."""
    # A padding node is a tree of its own at position 0; a prompt's root has descendants.
    return (batch.positions > 0) | (batch.ends - np.arange(batch.ends.shape[1]) > 1)


def work_of(batches: Sequence[Batch], windows: Collection[int] = ()) -> Work:
    """Return the size of microbatches on the host, as `make_batches` returns them.

    `windows` are the sizes of the model's windows.
    """
    seen = [batch.positions[used_nodes(batch)] + 1 for batch in batches]  # nodes, itself too
    return Work(
        tokens=sum(numbers.size for numbers in seen),
        pairs=sum(int(numbers.sum()) for numbers in seen),
        targets=sum(int((batch.distinct.ids >= 0).sum()) for batch in batches),
        windows={
            size: sum(int(np.minimum(numbers, size).sum()) for numbers in seen) for size in windows
        },
    )


def gradient_flops(model: DecoderConfig, work: Work) -> int:
    """Return the floating-point operations of a gradient, without recomputation.

    They are, for L layers of N weights in kernels, H heads of D, V tokens and width E,

        L (6 N tokens + 12 H D pairs) + 6 V E targets

    The pairs of a layer with a window are those in it. Of experts, N has those of one token. Each
    weight costs 2 per token forward, 2 for the gradient of its input and 2 for its own, which a
    weight that is frozen beside adapters has not. A pair costs 4 forward, in two products, and 8
    backward, in four. Norms, rotary positions and activation functions are left out.
    """
    shape, lora, shapes = model.shape, model.execution.lora, param_shapes(model)
    per_weight = 6 if lora is None else 4

    def layer_flops(layer: int, block: Block) -> int:
        weights = layer_of(shapes, layer)
        sizes = {name: weights[name]["kernel"].shape for name in kernels_of(block)}
        used = sum(round(math.prod(sizes[name]) * share_of(block, name)) for name in sizes)
        flops = per_weight * used
        if lora is not None:
            flops += 6 * lora.rank * sum(sum(sizes.get(name, ())) for name in lora.targets)
        mixer = block.mixer
        return flops * work.tokens + 12 * work.pairs_of(mixer.window) * mixer.heads * mixer.head_dim

    layers = itertools.starmap(layer_flops, enumerate(shape.blocks))
    head = per_weight * work.targets * shape.vocab_size * shape.embed_dim
    return sum(layers) + head


def mfu_metrics(
    model: DecoderConfig, batches: Sequence[Batch], seconds: float, devices: Sequence[Any]
) -> Metrics:
    """Return the share of the devices' peak that `gradient_flops` in so many seconds are.

    Empty if the peak is not known, as that of a CPU.
    """
    accelerator = find_accelerator(devices[0].device_kind)
    if accelerator is None:
        return {}
    mixers = [block.mixer for block in model.shape.blocks]
    windows = {mixer.window for mixer in mixers if mixer.window is not None}
    flops = gradient_flops(model, work_of(batches, windows))
    return {MFU: flops / seconds / (accelerator.flops * len(devices))}
