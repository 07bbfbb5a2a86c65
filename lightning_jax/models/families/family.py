"""Record of a model family: how its files name what our blocks have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_jax.models.families.fields import Fields
from lightning_jax.models.shape import Block, DecoderShape


@dataclass(frozen=True)
class Weight:
    """Names of a module's weights in files, without .weight or .bias. {layer} is its layer.

    {expert} is the index of one of the layer's experts, each with a tensor of its own. In GGUF, and
    in some safetensors files, one tensor has those of all experts.

    Files store a kernel as [out, in], we as [in, out]. Modules of a layer with one name in a kind
    of file have their rows after one another in one tensor there, in the order of the table.
    """

    config: str  # in Hugging Face's safetensors
    gguf: str
    # Changes rows as GGUF stores them to rows as Hugging Face does. The block is None outside
    # layers.
    from_gguf: Callable[[np.ndarray, Block | None], np.ndarray] | None = None
    stacked: str | None = None  # whole name of the tensor of all experts in safetensors


@dataclass(frozen=True)
class Family:
    """Models with one `model_type` in config.json, or one `general.architecture` in GGUF."""

    name: str
    architecture: str  # name of the model's class in transformers
    read: Callable[[Fields], DecoderShape]
    write: Callable[[DecoderShape], dict[str, Any]]  # fields of config.json
    weights: Mapping[str, Weight]  # by the module's name in our tree, whatever its layer
    tool_format: str | None = None  # None: the chat template's signs tell it
    shapes: Mapping[str, DecoderShape] = field(default_factory=dict)  # by hub id
    gguf: str | None = None  # `general.architecture`, if it is not the name
    # `model_type` of models whose text_config is of this family. Their other parts are not read.
    wrapper: str | None = None
    has_experts: bool = False
