"""Count what the programs of engine and trainer do on a GPU, without a GPU.

    python benchmarks/gpu_programs.py [--models 135m 1.5b 8b] [--programs generate prefill ...]
                                      [--target h100]

XLA's own compiler for GPUs compiles the product's programs from shapes. It needs the extra
`gpu-compiler` (about 640 MB, Python 3.12 and newer). Nothing runs, so there are no times. What a
program launches comes from the compiler's dump of its thunks, the parts that the host starts one by
one. A CUDA graph (command buffer) is one thunk however many kernels it holds.

The sort in `generate_adjusted` and `generate_biased` is another algorithm than with a GPU present.
For an update the products and branches of the lowered program are counted, before XLA compiles it.
"""

import argparse
import contextlib
import functools
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

MODELS = ("135m", "1.5b", "8b")
SLOTS = 64
STEPS = 4  # of one dispatch of `generate_steps`
FEW = 8  # rows of `generate_8`
CHUNKS = (128, 4)  # tokens and rows of `prefill`
MANY_FLOPS = 10**9  # of a product that should not be in float32

# Thunks.

GRAPH = "CommandBuffer"
# These start nothing themselves, only what is in them.
_HOLDERS = (GRAPH, "While", "Conditional", "AsyncStart", "AsyncDone", "DynamicSliceFusion")
_LINE = re.compile(r"^( *)\d+: k(\w+)")
_LOOP = re.compile(r"^.* = .* while\(.*$", re.MULTILINE)


@dataclass
class Thunk:
    """Part of a program that the host starts: a kernel, a call of a library, a graph or a loop."""

    kind: str
    inner: list["Thunk"] = field(default_factory=list)

    def walk(self) -> Iterator["Thunk"]:
        """Yield this thunk and all thunks within it."""
        yield self
        for thunk in self.inner:
            yield from thunk.walk()


def read_thunks(dump: str) -> list[Thunk]:
    """Return the top-level thunks of XLA's dump, in which indentation shows what holds what."""
    top: list[Thunk] = []
    path: list[tuple[int, list[Thunk]]] = [(-1, top)]
    for line in dump.splitlines():
        if match := _LINE.match(line):
            depth, thunk = len(match[1]), Thunk(match[2])
            while path[-1][0] >= depth:
                path.pop()
            path[-1][1].append(thunk)
            path.append((depth, thunk.inner))
    return top


def outside_graphs(thunks: Iterable[Thunk]) -> Iterator[Thunk]:
    """Yield what the host starts one by one: graphs, and thunks that are in none.

    Each iteration of a loop starts what is in the loop. It is listed once.
    """
    for thunk in thunks:
        yield thunk
        if thunk.kind != GRAPH:
            yield from outside_graphs(thunk.inner)


# Programs.


@dataclass(frozen=True)
class ProgramCounts:
    """Counts of one call of a compiled program. Branches and loops count once."""

    launches: int  # graphs, and kernels in no graph, each of which the host starts
    graphs: int  # CUDA graphs among them
    reads: int  # branches, and loops of unknown length, whose condition the host waits for
    kernels: int  # kernels, copies and calls of libraries, in graphs and outside
    arguments: int  # arrays
    temp_bytes: int
    undonated_bytes: int  # of the cache or the pool, which is therefore copied


@dataclass(frozen=True)
class UpdateCounts:
    """Counts in the gradient of a bundle of microbatches, as lowered."""

    wide_products: int  # with float32 on both sides and above 1 GFLOP
    branches: int
    kernels_per_layer: float  # of attention, forward and backward


def count_program(lowered: Any, cache_bytes: int) -> ProgramCounts:
    """Compile a lowered program and count. `cache_bytes` is the size of what it should donate."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_backend_optimization_level": 3,  # tests lower it for the CPU
            }
        )
        # Passes that change nothing, as in a program of a few kernels, have no dump of their own.
        dump = max(Path(folder).glob("*thunk_sequence*"), key=lambda path: "after" in path.name)
        thunks = read_thunks(dump.read_text())
    started = list(outside_graphs(thunks))
    kinds = Counter(thunk.kind for thunk in started)
    work = [inner.kind for thunk in thunks for inner in thunk.walk()]
    loops = [line for line in _LOOP.findall(compiled.as_text()) if "known_trip_count" not in line]
    memory = compiled.memory_analysis()
    return ProgramCounts(
        launches=sum(thunk.kind == GRAPH or thunk.kind not in _HOLDERS for thunk in started),
        graphs=kinds[GRAPH],
        reads=kinds["Conditional"] + len(loops),
        kernels=sum(kind not in _HOLDERS for kind in work),
        arguments=len(_leaves(lowered.args_info)),
        temp_bytes=memory.temp_size_in_bytes,
        undonated_bytes=max(cache_bytes - memory.alias_size_in_bytes, 0),
    )


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


class EnginePrograms:
    """Programs of the engine for one model on an absent GPU, lowered from shapes."""

    def __init__(self, model: str, devices: Sequence[Any]) -> None:
        import jax
        import jax.numpy as jnp
        from window.shapes import shape_of

        from lightning_jax.engine.config import ServeConfig
        from lightning_jax.engine.device.slots import SlotPrograms
        from lightning_jax.engine.device.table import SlotTable
        from lightning_jax.models.config import MeshConfig
        from lightning_jax.models.mesh import make_mesh
        from lightning_jax.models.sharding import param_shardings, stacked_shardings
        from lightning_jax.models.transformer import param_shapes, stack_layers

        config = shape_of(model)
        mesh = make_mesh(MeshConfig(fsdp=1), devices)
        serve = ServeConfig(
            slots=SLOTS,
            max_len=768 if model == "135m" else 4096,
            steps_per_dispatch=STEPS,
            prefix_cache_mib=256.0,
        )
        self._mesh = mesh
        self._programs = SlotPrograms(config, serve, dtype="bfloat16", mesh=mesh)
        shapes, shardings = param_shapes(config), param_shardings(config, mesh)
        self._params = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=place),
            *(jax.eval_shape(stack_layers, shapes), stacked_shardings(shardings)),
        )
        self._state = _shapes(self._programs._init.lower().out_info)
        self._pool = _shapes(self._programs.pages._init.lower().out_info)
        self._table = SlotTable(serve.slots).next_steps(())

    @property
    def lowerings(self) -> dict[str, Callable[[], Any]]:
        """Functions that lower each program, by name."""
        engine, state = self._programs, self._state
        slots = engine.num_slots
        weights = (self._params, engine._per_step(self._params))
        step, steps = ((one, state, self._table) for one in weights)
        no_move = engine.pages.no_moves()
        chunks, adjustment = engine._prompts(*CHUNKS), engine.adjustment
        return {
            "generate": lambda: engine._generate.lower((1, slots), *step),
            "generate_8": lambda: engine._generate.lower((1, FEW), *step),
            "generate_steps": lambda: engine._generate_steps.lower((1, slots), *steps),
            "generate_filtered": lambda: engine._generate_filtered.lower((1, slots), *step),
            "steps_filtered": lambda: engine._steps_filtered.lower((1, slots), *steps),
            "generate_full": lambda: engine._generate_full.lower((1, slots), *step, adjustment()),
            "generate_adjusted": lambda: engine._generate_adjusted.lower(
                (1, slots), *step, adjustment()
            ),
            "generate_biased": lambda: engine._generate_biased.lower(
                (1, slots), *step, adjustment(has_bias=True)
            ),
            "prefill": lambda: engine._prefill.lower(CHUNKS, self._params, state.cache, chunks),
            "restore": lambda: engine.pages._restore.lower(state.cache, self._pool, no_move),
            "store": lambda: engine.pages._store.lower(self._pool, state.cache, no_move),
        }

    def count(self, name: str) -> ProgramCounts:
        """Compile one program and count."""
        donated = self._pool if name == "store" else self._state.cache
        with _compiling(self._mesh):
            return count_program(self.lowerings[name](), _num_bytes(donated))


def _shapes(tree: Any) -> Any:
    import jax

    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in _leaves(tree))


@contextlib.contextmanager
def _compiling(mesh: Any) -> Iterator[None]:
    """Lower and compile for absent devices.

    JAX lowers a kernel for an absent GPU only under a mesh that names the GPU. Its cache on disk
    would keep programs that it cannot load.
    """
    import jax

    settings: Any = jax.config
    was_cached = settings.jax_enable_compilation_cache
    settings.update("jax_enable_compilation_cache", False)
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            yield
    finally:
        settings.update("jax_enable_compilation_cache", was_cached)


# Updates.


class Product(NamedTuple):
    """Matrix product of a lowered program."""

    dtypes: tuple[str, str]
    flops: int


_TENSOR = r"tensor<((?:\d+x)*)(\w+)>"
_PRODUCT = re.compile(
    r"stablehlo\.dot_general .*?contracting_dims = \[([\d, ]*)\] x \[[\d, ]*\].*"
    rf": \({_TENSOR}, {_TENSOR}\) -> {_TENSOR}"
)
_FUNCTION = re.compile(r"^\s*func\.func .*?@([\w.]+)\(")
_CALL = re.compile(r"\bcall @([\w.]+)\(")
_CHOICE = re.compile(
    r'(%\w+)(?::\d+)? = (stablehlo\.constant|"stablehlo\.(?:case|if)"\((%\w+)(?:#\d+)?\))'
)
_KERNEL_CALL = re.compile(r"stablehlo\.custom_call @(__gpu\$xla\.gpu\.triton|mosaic_gpu_v2)\b")


def products_of(stablehlo: str) -> list[Product]:
    """Return the products of a lowered program, each once however often it runs."""
    products = []
    for match in _PRODUCT.finditer(stablehlo):
        summed, left, left_dtype, _, right_dtype, out, _ = match.groups()
        sizes = _sizes(left)
        number = math.prod(sizes[int(axis)] for axis in summed.split(",") if axis.strip())
        products.append(Product((left_dtype, right_dtype), 2 * number * math.prod(_sizes(out))))
    return products


def _sizes(shape: str) -> list[int]:
    return [int(size) for size in shape.split("x") if size]


def count_branches(stablehlo: str) -> int:
    """Return the number of branches that are chosen at run time.

    JAX chooses among platforms by branches on constants, which XLA removes.
    """
    number, constants = 0, set()
    for line in stablehlo.splitlines():
        if _FUNCTION.match(line):
            constants = set()
        elif match := _CHOICE.search(line):
            name, _, index = match.groups()
            if index is None or index in constants:
                constants.add(name)
            else:
                number += 1
    return number


def count_calls(stablehlo: str, pattern: re.Pattern[str]) -> int:
    """Return the number of matches, times the number of calls of the functions that have them."""
    matches: Counter[str] = Counter()
    calls: dict[str, Counter[str]] = {}
    name = ""
    for line in stablehlo.splitlines():
        if function := _FUNCTION.match(line):
            name = function[1]
            calls[name] = Counter()
        elif name:
            matches[name] += len(pattern.findall(line))
            calls[name].update(_CALL.findall(line))

    @functools.cache
    def total(name: str) -> int:
        return matches[name] + sum(number * total(to) for to, number in calls[name].items())

    return total("main")


def lower_update(model: str, devices: Sequence[Any]) -> tuple[str, int]:
    """Return the gradient of a model's update as JAX lowers it, and the number of layers.

    Sizes and algorithm are those of experiments/configs/spider.yaml. 8b trains adapters. With
    `model.remat: full`, attention's forward kernel would run twice.
    """
    from window.shapes import shape_of

    from lightning_jax.engine.config import ServeConfig
    from lightning_jax.models.config import LoraConfig, MeshConfig, ModelConfig
    from lightning_jax.models.lora import adapted_shape
    from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
    from lightning_jax.train.config import Config
    from lightning_jax.train.memory.lowering import lower_step
    from lightning_jax.train.state.updaters import phase_updater

    lora = LoraConfig(rank=32) if model == "8b" else LoraConfig()
    config = Config(
        model=ModelConfig(dtype="bfloat16", remat="attention", lora=lora),
        serve=ServeConfig(max_len=4096),
        algorithm=AlgorithmConfig(
            clip_high=0.28, proximal="old", correction="truncate", correction_high=2.0
        ),
        batch=BatchConfig(rows=4, row_len=4096, max_targets=2048, head_chunk=256),
        mesh=MeshConfig(fsdp=1),
    )
    shape = adapted_shape(shape_of(model), lora, config.policy_table.num_adapters)
    updater = phase_updater(shape, config, supervised=False, devices=devices)
    with _compiling(updater.mesh):
        gradient, _ = lower_step(updater, config.model.dtype, config.distill)
    return gradient.as_text(), shape.shape.num_layers


def count_update(model: str, devices: Sequence[Any]) -> UpdateCounts:
    """Lower the gradient of a model's update and count."""
    text, num_layers = lower_update(model, devices)
    wide = [product for product in products_of(text) if product.dtypes == ("f32", "f32")]
    return UpdateCounts(
        wide_products=sum(product.flops > MANY_FLOPS for product in wide),
        branches=count_branches(text),
        kernels_per_layer=count_calls(text, _KERNEL_CALL) / num_layers,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--programs", nargs="+", metavar="NAME", help="default: all, and update")
    parser.add_argument("--target", default="h100", help="a100, h100 or h200")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the package may not be installed
    from lightning_jax.train.memory.targets import target_devices

    devices, _ = target_devices(args.target)
    names = [name.name for name in fields(ProgramCounts)]
    print("| program |", " | ".join(names), "|")
    print("|---" * (1 + len(names)) + "|")
    for model in args.models:
        engine = EnginePrograms(model, devices)
        for name in args.programs or (*engine.lowerings, "update"):
            if name == "update":
                print(f"| {model} update | {count_update(model, devices)} |", flush=True)
                continue
            counts = engine.count(name)
            cells = (f"{getattr(counts, name):,}" for name in names)
            print(f"| {model} {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
