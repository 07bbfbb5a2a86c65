"""Settings of the engine and its gateway."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from lightning_jax.models.config import MeshConfig
from lightning_jax.schema import (
    DERIVED,
    Count,
    FiniteNonNegative,
    FinitePositive,
    Natural,
    Positive,
    Section,
    is_plain_url,
    require,
)

if TYPE_CHECKING:
    Lengths = tuple[int, ...]
else:  # None until `ServeConfig.with_sizes` derives them
    Lengths = tuple[int, ...] | None
PREFILL_BUCKETS = (32, 128, 512)


@dataclass(frozen=True)
class ServeConfig(Section):
    """Settings of an engine and its gateway."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: all of this machine's
    port: Annotated[int, Ge(0), Le(65535)] = 0  # 0: any free port
    # URL at which agents reach the server, if another program passes requests on to it. None: the
    # address that it listens on; for 0.0.0.0, the one of this machine that others reach.
    public_url: str | None = None
    # Key of the owner; each rollout has its own key. None: a random key.
    api_key: str | None = field(default=None, repr=False)
    # Refuse model names, under a rollout's URL too, that are neither the policy's nor a role's.
    # Otherwise the policy answers for them there. A server without a run always refuses them.
    strict_models: bool = False
    # Requests decoded at once, per copy of the engine and per policy with its own weights.
    slots: Count = 16
    max_len: Annotated[int, Ge(16)] = 1024  # tokens of prompt and response in one slot
    # Padded lengths of prompt chunks. One program prefills 1, 4, 16, ... chunks of one length,
    # up to 512 tokens or the longest chunk. Each combination is one compile. None: those of 32, 128
    # and 512 that are at most half of max_len, and 32.
    prefill_buckets: Lengths = DERIVED
    # Decode steps per dispatch, if no response reaches its limit within them. Above 1, each decode
    # program is compiled twice, and a new request waits for all the steps. A response that stops
    # early wastes the rest (serve/tokens_past_end). Useful only on an accelerator whose steps are
    # shorter than the host's work.
    steps_per_dispatch: Count = 1
    max_queue: Natural = 1024  # requests that wait for a slot; more are refused with 429
    max_body_mib: FinitePositive = 16.0  # uncompressed; a larger body is refused with 413
    max_json_values: Annotated[int, Ge(1000)] = 200_000  # names and values in a body; more: 413
    max_calls_per_rollout: Count = 128  # in flight; more are refused with 429
    # Responses in flight, summed over a rollout's calls. More are refused with 429.
    max_choices_per_rollout: Count = 512
    # Prompt and response tokens of all calls of one rollout. Further calls are refused with 400.
    max_tokens_per_rollout: Count = 2**24
    # Memory of one rollout for answers kept for retries, and again as much for saved responses.
    # The oldest are dropped first.
    max_kept_mib_per_rollout: FiniteNonNegative = 64.0
    # Open connections, lowered if the limit of open files is lower. A new one closes an idle one.
    max_connections: Count = 4096
    idle_connection_s: Positive = 300.0  # close a connection that is idle or unread for this long
    slow_request_s: Positive = 60.0  # a request that takes longer to arrive is refused with 408
    # Memory for cached keys and values of past calls, in addition to the slots, and at most 8 times
    # their memory. Each copy of the engine and each policy with its own weights has this much.
    # SmolLM2-135M in float32 needs 46 kB per token: 256 MiB hold 5,800 tokens. 0: no cache.
    prefix_cache_mib: FiniteNonNegative = 256.0
    # CPU time to compile a grammar, from a tool or a response schema, and to compute a token mask.
    grammar_timeout_s: FinitePositive = 2.0
    # Memory of the process that compiles grammars. Only on Linux.
    grammar_memory_mib: Annotated[float, Ge(64)] = 512.0
    max_grammar_kib: Count = 256  # total length of the schemas in one request
    max_logit_biases: Natural = 1024  # entries of a request's logit_bias
    max_stop_chars: Natural = 1024  # total length of a request's stop strings
    # jetstream only serves: it cannot load new weights.
    orchestrator: Literal["native", "jetstream"] = "native"
    # Serving devices. `data` is the number of engine copies, each with its own weights, slots and
    # prefix cache. None: the trainer's devices, on a GPU or TPU with one copy per `mesh.tensor`
    # devices. With several processes, all devices of process 0 are one engine.
    mesh: MeshConfig | None = None

    def __post_init__(self) -> None:
        buckets = self.prefill_buckets
        if buckets is not None:
            object.__setattr__(self, "prefill_buckets", tuple(sorted(buckets)))
        super().__post_init__()
        is_positive = buckets is None or min(buckets, default=0) > 0
        url = "the http(s) URL of this server, without a user, query or fragment"
        require(
            self,
            prefill_buckets=(is_positive, "positive lengths"),
            public_url=(self.public_url is None or is_plain_url(self.public_url), url),
        )

    def with_sizes(self) -> "ServeConfig":
        """Return the settings with the lengths that follow from `max_len`."""
        first, *others = PREFILL_BUCKETS
        fitting = (first, *(size for size in others if 2 * size <= self.max_len))
        return replace(self, prefill_buckets=self.prefill_buckets or fitting)
