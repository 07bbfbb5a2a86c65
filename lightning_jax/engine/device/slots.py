"""Prefill and generate over the slots of a KV cache.

A slot is one row of the decode batch. `prefill` writes the keys and values of all but the last
token of each prompt, several prompts at once. The next `generate` step feeds that last token, like
any other token. So there is one place that samples, and requests with the same prompt share all of
its prefill. A row lasts as long as its slot is in use. Anything kept longer is copied to `pages`.

All functions take the state and return the new one. Donated arguments may not be used again. What
the slots are doing is known on the host alone, in a `SlotTable`, which comes with every step. The
compiled programs are in programs.py.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device import programs
from lightning_jax.engine.device.executables import Compiler, Costs, Executables, Size
from lightning_jax.engine.device.pages import PageCopier
from lightning_jax.engine.device.programs import DecodeState, PromptColumn
from lightning_jax.engine.device.table import SlotTable
from lightning_jax.engine.sampling import Adjustment, Work
from lightning_jax.engine.scheduler import ChunkBatch, plan_prefill, row_counts
from lightning_jax.errors import InvalidValue
from lightning_jax.models.attention.kv_cache import KVCache, is_whole, row_length, segment_lengths
from lightning_jax.models.blocks.matmul import turn_kernels
from lightning_jax.models.formats.param_names import flatten
from lightning_jax.models.lora import frozen_part, pick
from lightning_jax.models.mesh import platform_of
from lightning_jax.models.reshard import ServingCopy, prepare_copy, reshard, take_copy
from lightning_jax.models.shape import DecoderConfig, DecoderShape
from lightning_jax.models.sharding import cache_sharding, param_shardings, stacked_shardings
from lightning_jax.models.transformer import can_stack, param_shapes
from lightning_jax.settings import ConfigError

Params = Any


STEPS_BY_SIZE = ((10**9, 4), (3 * 10**9, 2))  # most weights, and decode steps of a dispatch
PREFILL_TOKENS = 512  # per program; larger matrices are hardly faster on two CPU cores


@dataclass(frozen=True)
class Fill:
    """Tokens to write to a row of the cache, after the tokens that it already holds."""

    row: int
    start: int  # position of the first token
    ids: Sequence[int]
    adapter: int | None = None  # index, for a model with several adapters


class SlotPrograms:
    """Compiled functions for one model shape and slot layout. Holds no weights and no state.

    Prefill and generate steps are compiled when a call first needs them, see `executables`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        serve: ServeConfig,
        *,
        dtype: str = "float32",
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        serve = serve.with_sizes(config.shape.max_positions)
        if serve.max_len > config.shape.max_positions:
            raise ConfigError.out_of_range(
                "serve.max_len",
                f"serve.max_len is {serve.max_len}; the model has {config.shape.max_positions} "
                "positions. Lower serve.max_len.",
            )
        self._plain, self._cache = _shardings(mesh, config.shape)
        self._platform = platform_of(self._plain)
        on_one_cpu = len(self._plain.device_set) == 1 and self._platform == "cpu"
        turned = dtype == "float32" and on_one_cpu
        self.config, self.mesh = config.with_execution(turned=turned), mesh
        # The frozen weights beside adapters are those of the trainer, which has them one by one.
        has_adapters = config.execution.lora is not None
        self._stacks = self._platform == "gpu" and not has_adapters and can_stack(config)
        self.num_slots, self.max_len = serve.slots, serve.max_len
        default_steps = _default_steps(config, self._platform)
        self.steps_per_dispatch = serve.steps_per_dispatch or default_steps
        lengths = {min(bucket, serve.max_len) for bucket in serve.prefill_buckets}
        self.buckets = tuple(sorted(lengths))
        tokens = max(PREFILL_TOKENS, self.buckets[-1])
        self._chunks_at_once = {b: row_counts(b, tokens, serve.slots) for b in self.buckets}
        # Kernels read only the used part of a row, so one program serves all lengths.
        whole = is_whole(self._platform)
        segments = (serve.max_len,) if whole else segment_lengths(serve.max_len)
        self.capacities = tuple(itertools.accumulate(segments))
        self.slot_counts = _slot_counts(serve.slots, fewest=8 if self._platform == "tpu" else 1)
        self.dtype = jnp.dtype(dtype)  # of weights and cache
        self.compiler_options = _compiler_options(self.dtype) if on_one_cpu else None
        self._jit = partial(jax.jit, compiler_options=self.compiler_options)
        self.pages = PageCopier(config.shape, serve, self.dtype, self._cache, self._jit)
        self._compile_later()

    @property
    def devices(self) -> set[Any]:
        """Devices that the programs run on."""
        return set(self._plain.device_set)

    def _compile_later(self) -> None:
        jit, plain, cache = self._jit, self._plain, self._cache
        state = DecodeState(cache, plain)
        init = partial(
            programs.init_state,
            config=self.config,
            slots=self.num_slots,
            length=row_length(self.max_len, self._platform),
            dtype=self.dtype,
            platform=self._platform,
        )
        prefill = partial(programs.prefill, config=self.config)
        generate = partial(programs.generate, config=self.config)
        self._init = jit(init, out_shardings=state)
        self.compiler = Compiler()
        self._prefill = Executables(
            "prefill",
            lambda size, *shapes: jit(prefill, donate_argnums=1, out_shardings=cache).lower(
                *shapes
            ),
            self.compiler,
            Costs(fixed_share=0.3),
        )
        many_steps = partial(
            programs.generate_steps, config=self.config, steps=self.steps_per_dispatch
        )

        has_branches = self._platform == "cpu"

        def decode(name: str, program: Any, **chosen: bool) -> Executables:
            """Return the executables of a generate step, by (cache segments, rows)."""
            work = None if has_branches else Work(**chosen)

            def lower(size: Size, *shapes: Any) -> Any:
                sized = partial(program, segments=size[0], rows=size[1], work=work)
                return jit(sized, donate_argnums=1, out_shardings=(state, plain)).lower(*shapes)

            costs = Costs(fixed_share=0.7)  # to read the weights
            return Executables(name, lower, self.compiler, costs)

        self._generate = decode("generate", generate)
        self._generate_steps = decode("generate_steps", many_steps)
        # Separate programs, because most steps need neither masks nor the likeliest tokens, and few
        # a bias.
        self._generate_adjusted = decode("generate_adjusted", generate)
        self._generate_biased = decode("generate_biased", generate, filters=True, likeliest=True)
        self._sized = [
            *(self._prefill, self._generate, self._generate_steps),
            *(self._generate_adjusted, self._generate_biased),
        ]
        # On a CPU, branches of the same programs do this.
        self._generate_filtered, self._steps_filtered = self._generate, self._generate_steps
        self._generate_full = self._generate_adjusted
        if not has_branches:
            self._generate_filtered = decode("generate_filtered", generate, filters=True)
            self._steps_filtered = decode("steps_filtered", many_steps, filters=True)
            self._generate_full = decode("generate_full", generate, filters=True, likeliest=True)
            self._sized += [self._generate_filtered, self._steps_filtered, self._generate_full]

    def put_on_mesh(self, params: Params | ServingCopy) -> Params:
        """Return a copy of the weights, or of some of them, in the engine's layout and dtype.

        Blocks until the copy is complete. The originals may be donated. Weights from `prepare_copy`
        are shared where possible.
        """
        if isinstance(params, ServingCopy):
            served = take_copy(params, self._targets(params.params))
        else:
            served = reshard(params, self._targets(params), self.dtype, stacked=self._stacks)
        turned = self.config.execution.turned
        return jax.block_until_ready(turn_kernels(served)) if turned else served

    def prepare_copy(self, params: Params, *, share_base: bool = False) -> Params | ServingCopy:
        """Gather the weights once for `put_on_mesh` of all engines like this one.

        With `share_base` the caller promises never to donate the frozen weights of a model with
        adapters. Engines then use those weights in place, if layout and dtype match.
        """
        if jax.process_count() > 1:  # there is one engine, and `put_on_mesh` runs in all processes
            return params
        frozen = frozen_part(params) if share_base else None
        shared = () if frozen is None else flatten(frozen)
        return prepare_copy(
            params, self._targets(params), self.dtype, shared=shared, stacked=self._stacks
        )

    def _targets(self, params: Params) -> Any:
        if self.mesh is None:
            return self._plain
        shardings = param_shardings(self.config.with_execution(turned=False), self.mesh)
        return stacked_shardings(shardings) if self._stacks else pick(shardings, params)

    def init_state(self) -> DecodeState:
        """Return a state with all rows empty."""
        return self._init()

    def prefill(self, params: Params, cache: KVCache, fills: Sequence[Fill]) -> KVCache:
        """Return the cache with the tokens of all `fills` in their rows. Donates `cache`.

        The rest of each row is garbage. Prompts are cut into chunks of bucket lengths, and chunks
        of different rows run together, so `fills` may name a row only once. Raises ValueError if a
        row would be longer than `max_len`.
        """
        for fill in fills:
            if (total := fill.start + len(fill.ids)) > self.max_len:
                raise InvalidValue(
                    f"a sequence of {total} tokens exceeds serve.max_len={self.max_len}; shorten "
                    "the prompt or raise serve.max_len",
                    reason="too_long",
                    key="prompt",
                )
        lengths = [len(fill.ids) for fill in fills]
        for batch in self._plan_prefill(params, cache, lengths):
            chosen = [fills[index] for index, _, _ in batch.chunks]
            prompts = self._prompts(batch.bucket, len(chosen))
            for row, fill, (_, first, end) in zip(prompts, chosen, batch.chunks, strict=True):
                numbers = (fill.row, fill.start + first, end - first, fill.adapter or 0)
                row[: len(PromptColumn)] = numbers
                row[len(PromptColumn) :][: end - first] = fill.ids[first:end]
            cache = self._prefill.run_exactly(_prefill_size(batch), params, cache, prompts)
        return cache

    def _plan_prefill(
        self, params: Params, cache: KVCache, lengths: Sequence[int]
    ) -> list[ChunkBatch]:
        """Plan batches for prompts of these lengths with the programs that are compiled.

        The time that others would save is counted for them. If no program is compiled, the smallest
        is.
        """
        best = list(plan_prefill(lengths, self.buckets, self._chunks_at_once))
        missing = {_prefill_size(batch) for batch in best} - self._prefill.ready
        if not missing:
            return best
        smallest = (self.buckets[0], 1)
        if smallest not in self._prefill.ready:
            self._prefill.compile(smallest, params, cache, self._prompts(*smallest))
        ready = self._prefill.ready
        counts = {
            bucket: tuple(count for count in counts if (bucket, count) in ready)
            for bucket, counts in self._chunks_at_once.items()
            if (bucket, 1) in ready
        }
        plan = list(plan_prefill(lengths, tuple(counts), counts))
        lost_s = self._prefill_s(plan) - self._prefill_s(best)
        work = sum(map(math.prod, missing))
        for size in missing:
            share = math.prod(size) / work
            self._prefill.lose(size, share * lost_s, params, cache, self._prompts(*size))
        return plan

    def _prefill_s(self, plan: Sequence[ChunkBatch]) -> float:
        """Return the seconds that a plan takes, 0.0 while none are known."""
        seconds = (self._prefill.costs.seconds(_prefill_size(batch)) for batch in plan)
        return sum(s or 0.0 for s in seconds)

    def _prompts(self, bucket: int, count: int) -> Int32[np.ndarray, "B _"]:
        return np.zeros((count, len(PromptColumn) + bucket), np.int32)

    def generate(
        self,
        params: Params,
        state: DecodeState,
        table: SlotTable,
        slots: Sequence[int],
        *,
        adjustment: Adjustment | None = None,
        steps: int = 1,
        has_filters: bool = True,
    ) -> tuple[DecodeState, Any]:
        """Sample a token for each of `slots`, which the table counts. Donates `state`.

        Other rows do not change, nor do those whose response has ended, see `SlotTable`. Returns
        the state, and on its way to the host an int32 array that `table.unpack_sampled` reads,
        [F, R], for rows up to the last of `slots` or more.

        `steps` is 1 or `steps_per_dispatch`. If it is above 1, `adjustment` must be None, and each
        slot takes that many steps at once, or fewer to its end. The array then has a leading axis
        for the steps. As long as their program is being compiled, there is one step and no axis.

        With an `adjustment`, every step runs all rows, and with a bias it also reads the whole
        cache. The arrays of an `adjustment` must not change before the step is done. Without
        `has_filters` the caller promises that no row has a filter, which an accelerator's program
        then lacks.
        """
        longest = int(table.positions(slots).max()) + steps
        segments = 1 + bisect.bisect_left(self.capacities, min(longest, self.max_len))
        rows = next(n for n in self.slot_counts if n > max(slots))
        program = self._generate_filtered if has_filters else self._generate
        weights: Any = params
        if steps > 1:
            chain = self._steps_filtered if has_filters else self._generate_steps
            repeated = self._per_step(params)
            if chain.has((segments, rows)):
                program, weights = chain, repeated
            else:
                chain.request((segments, rows), repeated, state, table.next_steps(()))
                steps = 1
        arguments: tuple[Any, ...] = (weights, state, table.next_steps(slots, steps))
        if adjustment is not None:
            arguments = (*arguments, adjustment)
            rows = self.num_slots
            if adjustment.bias is None:
                is_full = has_filters or adjustment.has_likeliest
                program = self._generate_full if is_full else self._generate_adjusted
            else:
                segments, program = len(self.capacities), self._generate_biased
        state, sampled = program.run((segments, rows), *arguments)
        sampled.copy_to_host_async()
        return state, sampled

    def _per_step(self, params: Params) -> tuple[Params, ...]:
        """Return the weights as `programs.generate_steps` takes them."""
        return (params,) * (self.steps_per_dispatch if self._stacks else 1)

    def adjustment(self, has_bias: bool = False, has_likeliest: bool = False) -> Adjustment:
        """Return a new adjustment that changes no logits: mask bits all 1, bias (if any) all 0."""
        shape = self.num_slots, self.config.shape.vocab_size
        return Adjustment(
            allowed=np.full((shape[0], (shape[1] + 7) // 8), 0xFF, np.uint8),
            has_likeliest=np.bool_(has_likeliest),
            bias=np.zeros(shape, np.float32) if has_bias else None,
        )

    @property
    def compiles(self) -> int:
        """Number of programs compiled so far."""
        init: Any = self._init
        compiled = sum(len(executables.ready) for executables in self._sized)
        return self.pages.compiles + compiled + init._cache_size()

    def num_compiling(self) -> int:
        """Return the number of prefill and generate programs that are being compiled now."""
        return sum(executables.num_compiling for executables in self._sized)

    def waited_s(self) -> float:
        """Return the seconds so far in which calls waited for prefill and generate programs."""
        return sum(executables.waited_s for executables in self._sized)

    def compile_while_idle(self) -> None:
        """Begin to compile a program whose lack has cost time. Call it while there is no work."""
        if not self.compiler.is_busy:
            any(executables.request_while_idle() for executables in self._sized)

    def compile_first(self, params: Params, state: DecodeState, num_requests: int = 1) -> None:
        """Begin to compile, in a thread, what the first requests need and what can serve all.

        `num_requests` of them arrive together.
        """
        size = (self.buckets[0], 1)
        self._prefill.request(size, params, state.cache, self._prompts(*size))
        table = SlotTable(self.num_slots).next_steps(())
        rows = next(n for n in self.slot_counts if n >= min(num_requests, self.num_slots))
        for size in ((1, rows), (len(self.capacities), self.num_slots)):
            self._generate.request(size, params, state, table)

    def warmup(self, params: Params, state: DecodeState) -> None:
        """Compile every program that serves slots, except those of `pages`."""
        for bucket, counts in self._chunks_at_once.items():
            for count in counts:
                prompts = self._prompts(bucket, count)
                self._prefill.compile((bucket, count), params, state.cache, prompts)
        arguments = (params, state, SlotTable(self.num_slots).next_steps(()))
        repeated = (self._per_step(params), *arguments[1:])
        most = len(self.capacities)
        for size in itertools.product(range(1, most + 1), self.slot_counts):
            self._generate.compile(size, *arguments)
            if self.steps_per_dispatch > 1:
                self._generate_steps.compile(size, *repeated)
        for segments in range(1, most + 1):
            size = (segments, self.num_slots)
            self._generate_filtered.compile(size, *arguments)
            if self.steps_per_dispatch > 1:
                self._steps_filtered.compile(size, *repeated)
            for executables in (self._generate_adjusted, self._generate_full):
                executables.compile(size, *arguments, self.adjustment())
        size = (most, self.num_slots)
        self._generate_biased.compile(size, *arguments, self.adjustment(has_bias=True))


def _default_steps(config: DecoderConfig, platform: str) -> int:
    """Return the decode steps of a dispatch: as many as hide the host's work on an accelerator.

    The host needs about a millisecond for a dispatch, and more for the requests that it serves
    meanwhile. A step of a model above 3B takes longer than that by itself, and so does any on a
    CPU, whose steps also compete with the host for its cores.
    """
    if platform == "cpu":
        return 1
    num_weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config)))
    return next((steps for most, steps in STEPS_BY_SIZE if num_weights < most), 1)


def _slot_counts(slots: int, fewest: int) -> tuple[int, ...]:
    """Return the slot counts that decode programs are compiled for: 16 gives 1, 4, 8, 16.

    Up to four slots, or eight on a TPU, a step is bound by reading the weights, so one program
    serves all of them. A TPU's compiler also does not use the matrix units for a single row, hence
    `fewest`.
    """
    counts = [1, *(2**power for power in range(2, slots.bit_length()))]
    return (*(count for count in counts if fewest <= count < slots), slots)


def _compiler_options(dtype: jnp.dtype) -> dict[str, str] | None:
    """Return options that keep a bfloat16 cache in bfloat16 on a CPU.

    To write one token, XLA in JAX 0.10 converts the whole cache to float32 and back unless this
    pass is disabled. Later versions do not need it.
    """
    if dtype != jnp.bfloat16:
        return None
    return {"xla_disable_hlo_passes": "float-normalization-bf16"}


def _shardings(mesh: jax.sharding.Mesh | None, shape: DecoderShape) -> tuple[Any, Any]:
    """Return the shardings of small arrays and of the cache.

    Every array is committed to one, because an uncommitted array makes JAX compile a program again.
    """
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return device, device
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return replicated, cache_sharding(shape, mesh)


def _prefill_size(batch: ChunkBatch) -> Size:
    return batch.bucket, len(batch.chunks)
