"""Settings of the model, its adapters and its devices."""

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BeforeValidator

from lightning_jax.models.template_limits import check_kwargs
from lightning_jax.settings.schema import (
    FinitePositive,
    Natural,
    PathOrName,
    Rule,
    Section,
    expect,
    section,
)

AUTO: Final = "auto"  # dtype: the fastest one on the devices here; remat: what their memory allows
# What a backward pass recomputes (transformer.py), from least to most.
RematKind = Literal["none", "mlp", "attention", "full"]
REMAT_KINDS: tuple[RematKind, ...] = get_args(RematKind)
KERNELS = ("q", "k", "v", "o", "gate", "up", "down")  # in each layer of a model
# Until 0.2 it was true or false.
Remat = Annotated[
    Literal["auto", "none", "mlp", "attention", "full"],
    BeforeValidator(lambda kind: ("none", "full")[kind] if isinstance(kind, bool) else kind),
]
Targets = Annotated[
    tuple[str, ...],
    expect(
        lambda names: 0 < len(names) == len(set(names) & set(KERNELS)),
        f"some of {', '.join(KERNELS)}, each once",
    ),
]


@section
class LoraConfig(Section):
    """Low-rank adapters, trained instead of the model's weights."""

    rank: Natural = 0
    """Rank of each adapter; 0: no adapters, all weights are trained."""
    alpha: FinitePositive = 16.0
    """An adapter's output is scaled by alpha / rank."""
    targets: Targets = KERNELS
    """Kernels of each layer that have an adapter."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@section
class ModelConfig(Section):
    """Settings of the model and its precision."""

    name: PathOrName = "smollm2-135m-instruct"
    """A known name, a Hugging Face directory or hub id, or a .gguf file."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Dtype of weights and activations. auto takes the fastest on the devices here; on a CPU it is
    measured (models/precision.py). A run keeps its first choice."""
    activation_dtype: Literal["float32"] | None = None
    """None: same as `dtype`. float32 with bfloat16 weights: activations are rounded only for
    products with weights and in the KV cache. On a CPU this is as fast as pure bfloat16."""
    remat: Remat = "auto"
    """Activations of a layer that the backward pass recomputes to save memory. none: none of them.
    mlp: all but queries, keys, values, attention's output and the gate and up products. attention:
    all but attention's output. full: all, which takes a third more time. auto: the first of these
    with which the memory plan fits."""
    chat_template: PathOrName | None = None
    """File with a Jinja template to use instead of the model's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking: false` of Qwen3. Requests may
    override them. They become part of the exported policy's template."""
    tool_format: Literal["hermes", "smollm", "mistral", "phi", "granite", "llama3"] | None = None
    """Format in which the model writes tool calls. None: that of its family, or of its chat
    template."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    train_router: bool = False
    """True: the routers of a mixture of experts are trained too. There is no loss that balances
    the experts."""

    def rules(self) -> Iterator[Rule]:
        check_kwargs(self.chat_template_kwargs)
        is_unset = self.dtype != AUTO or self.activation_dtype is None
        yield "activation_dtype", is_unset, "expected none, because dtype=auto chooses it as well"
        is_frozen = not (self.train_router and self.lora.rank)
        yield "train_router", is_frozen, "expected false, because only adapters are trained"


@section
class MeshConfig(Section):
    """Number of devices along each mesh axis; -1 takes the remaining devices."""

    data: int = 1
    """Each device holds all weights and a share of the rows."""
    fsdp: int = -1
    """Each device holds a share of the weights and of the rows."""
    tensor: int = 1
    """Each device computes a share of every layer."""
    first_device: int = 0
    """Earlier devices are left for another mesh."""
    expert: int = 1
    """Each device holds a share of the experts of every layer and a share of the rows."""


@section
class PolicyConfig(Section):
    """Settings of one of several policies.

    The policy is an adapter on the run's model if model.lora.rank is above 0, else a set of
    weights.
    """

    trains: bool = True
    """False: only the warm-up trains it."""
    base: PathOrName | None = None
    """Initial weights: a model with the shape and vocabulary of model.name. None: model.name, which
    adapters always start from."""
