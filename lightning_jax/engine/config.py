"""Settings of the engine and its gateway."""

import math
from dataclasses import dataclass, field

from lightning_jax.errors import require
from lightning_jax.models.config import MeshConfig


@dataclass(frozen=True)
class ServeConfig:
    """Settings of an engine and its gateway."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    # Key of the owner; each rollout has its own key. None: a random key.
    api_key: str | None = field(default=None, repr=False)
    # Requests decoded at once, per copy of the engine and per policy with its own weights.
    slots: int = 16
    max_len: int = 1024  # tokens of prompt and response in one slot
    # Padded lengths of prompt chunks. One program prefills 1, 4, 16, ... chunks of one length,
    # up to 512 tokens or the longest chunk. Each combination is one compile.
    prefill_buckets: tuple[int, ...] = (32, 128, 512)
    # Decode steps per dispatch, if no response reaches its limit within them. Above 1, each decode
    # program is compiled twice, and a new request waits for all the steps. A response that stops
    # early wastes the rest (serve/tokens_past_end). Useful only on an accelerator whose steps are
    # shorter than the host's work.
    steps_per_dispatch: int = 1
    max_queue: int = 1024  # requests that wait for a slot; more are refused with 429
    max_body_mib: float = 16.0  # uncompressed size of a body; larger ones are refused with 413
    max_json_values: int = 200_000  # names and values in a body; more are refused with 413
    # Limits of one rollout: calls in flight, and responses in flight summed over its calls. More
    # are refused with 429.
    max_calls_per_rollout: int = 128
    max_choices_per_rollout: int = 512
    # Prompt and response tokens of all calls of one rollout. Further calls are refused with 400.
    max_tokens_per_rollout: int = 2**24
    # Memory of one rollout for answers kept for retries, and again as much for saved responses.
    # The oldest are dropped first.
    max_kept_mib_per_rollout: float = 64.0
    # Open connections, lowered if the limit of open files is lower. A new one closes an idle one.
    max_connections: int = 4096
    idle_connection_s: float = 300.0  # close a connection that is idle or unread for this long
    slow_request_s: float = 60.0  # a request that takes longer to arrive is refused with 408
    # Memory for cached keys and values of past calls, in addition to the slots, and at most 8 times
    # their memory. Each copy of the engine and each policy with its own weights has this much.
    # SmolLM2-135M in float32 needs 46 kB per token: 256 MiB hold 5,800 tokens. 0: no cache.
    prefix_cache_mib: float = 256.0
    # Limits of one grammar, compiled from a tool or a response schema in its own process: CPU time
    # to compile it, the same to compute a token mask, and memory. Memory is limited only on Linux.
    grammar_timeout_s: float = 2.0
    grammar_memory_mib: float = 512.0
    max_grammar_kib: int = 256  # total length of the schemas in one request
    max_logit_biases: int = 1024  # entries of a request's logit_bias
    max_stop_chars: int = 1024  # total length of a request's stop strings
    orchestrator: str = "native"  # native, or jetstream (serves only: it cannot load new weights)
    # Serving devices. `data` is the number of engine copies, each with its own weights, slots and
    # prefix cache. None: the trainer's devices, on a GPU or TPU with one copy per `mesh.tensor`
    # devices. With several processes, all devices of process 0 are one engine.
    mesh: MeshConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill_buckets", tuple(sorted(self.prefill_buckets)))
        require(
            self,
            slots=(self.slots >= 1, "at least 1"),
            port=(0 <= self.port < 65536, "0 (any free port) to 65535"),
            max_len=(self.max_len >= 16, "at least 16 tokens"),
            steps_per_dispatch=(self.steps_per_dispatch >= 1, "at least 1"),
            max_queue=(self.max_queue >= 0, "at least 0"),
            max_body_mib=(0 < self.max_body_mib < math.inf, "a positive number of MiB"),
            max_json_values=(self.max_json_values >= 1000, "at least 1000"),
            max_calls_per_rollout=(self.max_calls_per_rollout >= 1, "at least 1"),
            max_choices_per_rollout=(self.max_choices_per_rollout >= 1, "at least 1"),
            max_tokens_per_rollout=(self.max_tokens_per_rollout >= 1, "at least 1 token"),
            max_kept_mib_per_rollout=(
                0 <= self.max_kept_mib_per_rollout < math.inf,
                "0 or more MiB",
            ),
            max_connections=(self.max_connections >= 1, "at least 1"),
            idle_connection_s=(self.idle_connection_s > 0, "a positive number of seconds"),
            slow_request_s=(self.slow_request_s > 0, "a positive number of seconds"),
            prefill_buckets=(
                bool(self.prefill_buckets) and self.prefill_buckets[0] > 0,
                "positive lengths",
            ),
            prefix_cache_mib=(
                0 <= self.prefix_cache_mib < math.inf,
                "a number of MiB, or 0 for no prefix cache",
            ),
            grammar_timeout_s=(
                0 < self.grammar_timeout_s < math.inf,
                "a positive number of seconds",
            ),
            grammar_memory_mib=(self.grammar_memory_mib >= 64, "at least 64 MiB"),
            max_grammar_kib=(self.max_grammar_kib >= 1, "at least 1 KiB"),
            max_logit_biases=(self.max_logit_biases >= 0, "at least 0"),
            max_stop_chars=(self.max_stop_chars >= 0, "at least 0"),
            orchestrator=(self.orchestrator in ("native", "jetstream"), "native or jetstream"),
        )
