"""Settings of the engine and its gateway."""

from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le
from pydantic import AfterValidator

from lightning_jax.models.config import MeshConfig
from lightning_jax.settings.schema import (
    DERIVED,
    Count,
    FiniteNonNegative,
    FinitePositive,
    Natural,
    PathKind,
    Positive,
    Section,
    Url,
    expect,
    section,
)

if TYPE_CHECKING:
    Length = int
    Lengths = tuple[int, ...]
else:  # None until `ServeConfig.with_sizes` derives them
    Length = Annotated[int, Ge(16)] | None
    Lengths = Annotated[tuple[Count, ...], AfterValidator(sorted), AfterValidator(tuple)] | None
LEAST_CACHE_MIB = 256.0
MAX_LEN = 1024  # where nothing says what a conversation needs
LONGEST = 32_768  # of a server without a run: coding agents begin with 7,000 to 20,000 tokens
PREFILL_BUCKETS = (32, 128, 512)
LOOPS = ("native", "jetstream")
Orchestrator = Annotated[
    str,
    PathKind.CLASS,
    expect(lambda x: x in LOOPS or ":" in x, "native, jetstream or FILE:CLASS", "unknown"),
]


@section
class ServeConfig(Section):
    """Settings of an engine and its gateway."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all of this machine's."""
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """0: any free port."""
    public_url: Url | None = None
    """URL at which agents reach the server, if another program passes requests on to it. None: the
    address that it listens on; for 0.0.0.0, the one of this machine that others reach."""
    api_key: str | None = field(default=None, repr=False)
    """Key of the owner; each rollout has its own key. None: a random key."""
    strict_models: bool = False
    """Refuse model names, under a rollout's URL too, that are neither the policy's nor a role's.
    Otherwise the policy answers for them there. A server without a run answers for them only with
    --any-model."""
    slots: Count = 16
    """Requests decoded at once, per copy of the engine and per policy with its own weights."""
    max_len: Length = DERIVED
    """Tokens of prompt and response in one slot. None: 1024, or batch.row_len if that is less,
    because each update pays for whole rows. A server without a run takes the model's positions
    instead, as far as memory allows."""
    prefill_buckets: Lengths = DERIVED
    """Padded lengths of prompt chunks. One program prefills 1, 4, 16, ... chunks of one length, up
    to 512 tokens or the longest chunk. Each combination is one compile. None: those of 32, 128 and
    512 that are at most half of max_len, and 32."""
    prefill_s: Positive = 0.25
    """Longest time that prefill takes between two decode steps, so that a long prompt does not hold
    up other responses. The engine measures how many tokens that is, and prefills at least the
    shortest chunk. While nothing decodes, prefill takes up to 8 times as long."""
    steps_per_dispatch: Count | None = None
    """Decode steps per dispatch. A response that reaches its limit or an end-of-turn token takes no
    part in the rest. Stop strings, grammars, biases and penalties need the host after each step, so
    beside such a request there is one step. Above 1, a stream gets that many tokens at a time, and
    a new request, a cancellation and new weights wait for the steps that have started: up to twice
    that many. None: on a GPU or TPU 4 for models below 1B and 2 below 3B, otherwise 1."""
    max_queue: Natural = 1024
    """Requests that wait for a slot; more are refused with 429."""
    max_body_mib: FinitePositive = 16.0
    """Uncompressed; a larger body is refused with 413."""
    max_json_values: Annotated[int, Ge(1000)] = 200_000
    """Names and values in a body; more: 413."""
    max_calls_per_rollout: Count = 128
    """In flight; more are refused with 429."""
    max_choices_per_rollout: Count = 512
    """Responses in flight, summed over a rollout's calls. More are refused with 429."""
    max_tokens_per_rollout: Count = 2**24
    """Prompt and response tokens of all calls of one rollout. More calls are refused with 400."""
    max_kept_mib_per_rollout: FiniteNonNegative = 64.0
    """Memory of one rollout for answers kept for retries, and again as much for saved responses.
    The oldest are dropped first."""
    max_connections: Count = 4096
    """Open connections, or the limit of open files if lower. A new one closes an idle one."""
    idle_connection_s: Positive = 300.0
    """Close a connection that is idle or unread for this long."""
    slow_request_s: Positive = 60.0
    """A request that takes longer to arrive is refused with 408."""
    prefix_cache_mib: FiniteNonNegative | None = None
    """Memory for cached keys and values of past calls, in addition to the slots, and at most 8
    times their memory. Each copy of the engine and each policy with its own weights has this much.
    SmolLM2-135M in float32 needs 46 kB per token: 256 MiB hold 5,800 tokens. 0: no cache. None: as
    much as the slots have, so that each of their conversations finds its last call. It takes at
    most half of the memory that is left, but at least 256 MiB and one conversation of max_len."""
    grammar_timeout_s: FinitePositive = 2.0
    """CPU time to compile a grammar of a tool or a response schema, and to make a token mask."""
    grammar_memory_mib: Annotated[float, Ge(64)] = 512.0
    """Memory of the process that compiles grammars. Only on Linux."""
    max_grammar_kib: Count = 256
    """Total length of the schemas in one request."""
    max_logit_biases: Natural = 1024
    """Entries of a request's logit_bias."""
    max_stop_chars: Natural = 1024
    """Total length of a request's stop strings."""
    orchestrator: Orchestrator = "native"
    """Loop over the slots: native, or one that only serves and cannot load new weights. These are
    jetstream and FILE:CLASS, a loop of yours with the methods of `EngineLoop`."""
    mesh: MeshConfig | None = None
    """Serving devices. `data` is the number of engine copies, each with its own weights, slots and
    prefix cache. None: the trainer's devices, on a GPU or TPU with one copy per `mesh.tensor`
    devices. With several processes, all devices of process 0 are one engine."""

    def with_sizes(self, longest: int = MAX_LEN) -> "ServeConfig":
        """Return the settings with all lengths. `max_len` is by default at most `longest`."""
        max_len = self.max_len or min(longest, MAX_LEN)
        first, *others = PREFILL_BUCKETS
        fitting = (first, *(size for size in others if 2 * size <= max_len))
        buckets = self.prefill_buckets or fitting
        return replace(self, max_len=max_len, prefill_buckets=buckets)
