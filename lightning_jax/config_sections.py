"""Settings for the model, data, devices, server, agent, rollouts and checkpoints.

`config_learning.py` has the settings for learning. `config.py` combines all sections.
"""

import math
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.types import InvalidValue


class FieldError(InvalidValue):
    """Error in a field of a section.

    The message begins with the field's name, which is also the error's key. A caller that knows the
    section's path prepends it to both.
    """


def require(section: object, **conditions: tuple[bool, str] | tuple[bool, str, str]) -> None:
    """Raise FieldError for the first field whose condition is false.

    The text says what is expected. An optional third item is the error's reason.
    """
    for name, (holds, expected, *reason) in conditions.items():
        if not holds:
            message = f"{name} is {getattr(section, name)!r}; expected {expected}."
            raise FieldError(message, reason=reason[0] if reason else "invalid", key=name)


AUTO = "auto"  # dtype: the fastest one on the devices here
KERNELS = ("q", "k", "v", "o", "gate", "up", "down")  # in each layer of a model


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, trained instead of the model's weights."""

    rank: int = 0  # rank of each adapter; 0: no adapters, all weights are trained
    alpha: float = 16.0  # an adapter's output is scaled by alpha / rank
    targets: tuple[str, ...] = KERNELS  # kernels of each layer that have an adapter

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        require(
            self,
            rank=(self.rank >= 0, "0 (no adapters) or more"),
            alpha=(0 < self.alpha < math.inf, "a positive number"),
            targets=(
                bool(self.targets)
                and set(self.targets) <= set(KERNELS)
                and len(set(self.targets)) == len(self.targets),
                f"some of {', '.join(KERNELS)}, each once",
            ),
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    name: str = "smollm2-135m-instruct"  # name, Hugging Face directory or hub id, or .gguf file
    # Weights and activations: float32, bfloat16 or auto. auto takes the fastest dtype on the
    # devices here; on a CPU it is measured (models/precision.py). A run keeps its first choice.
    dtype: str = "float32"
    # None: same as `dtype`. float32 with bfloat16 weights: activations are rounded only for
    # products with weights and in the KV cache. On a CPU this is as fast as pure bfloat16.
    activation_dtype: str | None = None
    # Recompute activations in the backward pass: less memory, a third more time.
    remat: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        require(
            self,
            dtype=(self.dtype in ("float32", "bfloat16", AUTO), "float32, bfloat16 or auto"),
            activation_dtype=(
                self.activation_dtype is None
                or (self.activation_dtype == "float32" and self.dtype != AUTO),
                "none, because dtype=auto chooses it as well"
                if self.dtype == AUTO
                else "float32, or none for those of the weights",
            ),
        )


@dataclass(frozen=True)
class DataConfig:
    # Folder of the data set, in the published or the compact layout. None: generate a data set.
    root: str | None = None
    max_train_tasks: int | None = None  # None: all
    # Tasks that the next settings leave out are counted.
    max_schema_chars: int | None = None  # leave out databases with a longer schema text
    require_rows: bool = True  # leave out tasks whose gold query returns no row
    sources: tuple[str, ...] | None = None  # for Calc-X: keep only tasks from these sources
    max_question_chars: int | None = None  # for Calc-X: leave out longer questions

    def __post_init__(self) -> None:
        limits = ("max_train_tasks", "max_schema_chars", "max_question_chars")
        given = {name: getattr(self, name) for name in limits}
        require(
            self,
            **{n: (v is None or v >= 1, "at least 1, or none") for n, v in given.items()},
        )


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; -1 takes the remaining devices."""

    data: int = 1  # each device holds all weights and a share of the rows
    fsdp: int = -1  # each device holds a share of the weights and of the rows
    tensor: int = 1  # each device computes a share of every layer
    first_device: int = 0  # earlier devices are left for another mesh


@dataclass(frozen=True)
class ServeConfig:
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


@dataclass(frozen=True)
class AgentConfig:
    """Program to train. docs/agents.md describes its input and output."""

    # FILE:FUNCTION, (task, llm) -> reward. The function may be a coroutine function.
    function: str = "agents/spider_sql.py:run"
    # Interpreter that runs `function` in a process with its own packages. None: this process.
    python: str | None = None
    # Command line, as a string or a list of words, to run for each rollout instead of `function`.
    command: Any = None
    # For a command: FILE:FUNCTION, (task, output) -> reward. None: the last line of the output.
    reward: str | None = None
    # Environment variables for a program, in addition to docs/agents.md: NAME to pass on the
    # trainer's value, or NAME=value.
    env: tuple[str, ...] = field(default=(), repr=False)
    # Limits of one program, including all processes it starts. A program above a limit is killed.
    max_processes: int = 1024
    memory_mib: float | None = None  # total resident memory; None: no limit

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", tuple(self.env))
        if not all(map(_VARIABLE.match, self.env)):
            names = [variable.partition("=")[0] for variable in self.env]  # the values are secret
            raise FieldError(
                f"env has {names}; expected variable names, optionally with =VALUE. Replace any "
                "??? of a saved file.",
                reason="invalid",
                key="env",
            )
        command = self.command
        if isinstance(command, str):
            object.__setattr__(self, "command", _words(command))
        elif isinstance(command, list):
            object.__setattr__(self, "command", tuple(str(word) for word in command))
        require(
            self,
            function=(":" in self.function, "FILE:FUNCTION, such as agents/spider_sql.py:run"),
            python=(
                self.python is None or command is None,
                "none with agent.command, whose first word is the program",
                "conflict",
            ),
            command=(
                self.command is None or (isinstance(self.command, tuple) and any(self.command[:1])),
                "a command line, such as 'node agent.mjs', or a list of its words",
            ),
            reward=(
                self.reward is None or (":" in self.reward and command is not None),
                "FILE:FUNCTION with agent.command only; agent.function returns its own reward",
            ),
            max_processes=(self.max_processes >= 1, "at least 1"),
            memory_mib=(self.memory_mib is None or self.memory_mib > 0, "above 0, or none"),
        )


_VARIABLE = re.compile(r"[A-Za-z_]\w*(=(?!\?\?\?$)[^\0]*)?\Z", re.ASCII | re.DOTALL)


def _words(line: str) -> tuple[str, ...]:
    """Split a command line into words as a shell does."""
    try:
        return tuple(shlex.split(line))
    except ValueError as error:
        raise InvalidValue(
            f"agent.command {line!r} cannot be split into words: {error}.",
            reason="unbalanced_quotes",
            key="agent.command",
        ) from None


@dataclass(frozen=True)
class RolloutConfig:
    tasks_per_step: int = 8
    group_size: int = 4  # rollouts of one task in one step
    concurrency: int = 16  # rollouts running at once
    timeout_s: float = 120.0  # limit of a rollout; beyond it the agent has failed
    call_timeout_s: float = 60.0  # limit of an LLM call; beyond it the infrastructure has failed
    max_attempts: int = 3  # attempts per rollout when the infrastructure fails
    # Seconds before the second attempt. The wait doubles up to the maximum. Up to half of it is
    # added at random, so that rollouts do not all retry at once.
    retry_delay_s: float = 2.0
    max_retry_delay_s: float = 60.0
    agent_failure_reward: float | None = 0.0  # None: do not train on rollouts of failed agents
    # Maximum magnitude of a rollout's reward, and of the total reward of one call. More fails the
    # agent.
    max_abs_reward: float = 1e6
    # Numbers to keep per rollout in addition to the reward, and distinct ones in a metrics row.
    max_metrics: int = 100
    max_infrastructure_failures: float = 0.2  # the run stops if a larger share of a step fails
    # Sampling in training rollouts, overriding the agent's request. None: as the agent asks.
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    max_tokens: int | None = None  # upper limit, not an override
    max_spans: int = 10_000  # spans an agent may post per rollout, including rewards of calls
    max_spans_mib: float = 64.0  # size of posted spans in the store

    def __post_init__(self) -> None:
        require(
            self,
            max_spans=(self.max_spans >= 0, "at least 0"),
            max_spans_mib=(0 <= self.max_spans_mib < math.inf, "a number of MiB, 0 or more"),
            tasks_per_step=(self.tasks_per_step >= 1, "at least 1"),
            group_size=(self.group_size >= 1, "at least 1"),
            concurrency=(self.concurrency >= 1, "at least 1"),
            max_attempts=(self.max_attempts >= 1, "at least 1"),
            retry_delay_s=(0 <= self.retry_delay_s < math.inf, "0 or more seconds"),
            max_retry_delay_s=(
                self.retry_delay_s <= self.max_retry_delay_s < math.inf,
                "at least rollout.retry_delay_s",
            ),
            max_abs_reward=(0 < self.max_abs_reward <= 1e30, "above 0 and at most 1e30"),
            max_metrics=(self.max_metrics >= 0, "0 or more"),
            timeout_s=(self.timeout_s > 0, "a positive number of seconds"),
            call_timeout_s=(self.call_timeout_s > 0, "a positive number of seconds"),
            agent_failure_reward=(
                self.agent_failure_reward is None or math.isfinite(self.agent_failure_reward),
                "a finite number, or none",
            ),
            max_infrastructure_failures=(
                0 <= self.max_infrastructure_failures <= 1,
                "a share from 0 to 1",
            ),
            temperature=(
                self.temperature is None or 0 <= self.temperature <= 10,
                "0 to 10, or none",
            ),
            top_p=(self.top_p is None or 0 < self.top_p <= 1, "above 0 and up to 1, or none"),
            top_k=(self.top_k is None or self.top_k >= 0, "0 (all) or more, or none"),
            max_tokens=(self.max_tokens is None or self.max_tokens >= 1, "at least 1, or none"),
        )


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10  # in trainer steps; 0: only at the end
    num_tasks: int = 64  # from the dev split, always the same tasks
    at_start: bool = True  # also before the first step and after the warm-up
    by: str | None = None  # task field; also report a result for each of its values

    def __post_init__(self) -> None:
        require(
            self,
            every=(self.every >= 0, "0 (only at the end) or more"),
            num_tasks=(self.num_tasks >= 0, "0 (no evaluation) or more"),
        )


@dataclass(frozen=True)
class SearchConfig:
    """Search service for agents that search paragraphs."""

    retriever: str = "bm25"  # bm25, or dense
    encoder: str = "all-MiniLM-L6-v2"  # for dense: this name, a directory or a hub id
    index: str | None = None  # folder with an index of this corpus; None: build and keep one
    top_k: int = 3  # paragraphs per query
    max_chars: int = 500  # length limit of a paragraph
    start_timeout_s: float = 3600.0  # a large dense index takes long to build

    def __post_init__(self) -> None:
        require(
            self,
            retriever=(self.retriever in ("bm25", "dense"), "bm25 or dense"),
            top_k=(self.top_k >= 1, "at least 1"),
            max_chars=(self.max_chars >= 1, "at least 1"),
            start_timeout_s=(self.start_timeout_s > 0, "a positive number of seconds"),
        )


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 10  # in trainer steps; the last step is always saved
    keep: int = 1  # number of newest checkpoints to keep

    def __post_init__(self) -> None:
        require(self, every=(self.every >= 1, "at least 1"), keep=(self.keep >= 1, "at least 1"))


@dataclass(frozen=True)
class DistributedConfig:
    """Processes of one run, each with its own devices.

    Process 0 runs the agents and the gateway.
    """

    # none: one process; auto: JAX asks the TPU pod, Slurm or MPI; manual: use the fields below.
    mode: str = "none"
    coordinator: str | None = None  # HOST:PORT at which the others reach process 0
    num_processes: int | None = None
    process_id: int | None = None  # 0, 1, ..., different in each process
    timeout_s: int = 300  # wait for all processes to connect

    def __post_init__(self) -> None:
        manual = self.mode == "manual"
        number, process_id = self.num_processes, self.process_id
        require(
            self,
            mode=(self.mode in ("none", "auto", "manual"), "none, auto or manual"),
            coordinator=(
                not manual or ":" in (self.coordinator or ""),
                "HOST:PORT of process 0 with distributed.mode manual",
            ),
            num_processes=(
                not manual or (number is not None and number >= 1),
                "the number of processes with distributed.mode manual",
            ),
            process_id=(
                not manual or (process_id is not None and 0 <= process_id < (number or 0)),
                "0 to num_processes - 1 with distributed.mode manual",
            ),
            timeout_s=(self.timeout_s >= 1, "at least 1 second"),
        )


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server without a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    record: str | None = None  # SQLite file that records every call; None: do not record
    drain_s: float = 30.0  # time that running requests have to finish at shutdown
    tensor: int = 1  # GPUs or TPUs per copy of the model; the others hold more copies

    def __post_init__(self) -> None:
        require(
            self,
            tensor=(self.tensor >= 1, "at least 1"),
            record=(self.record != "", "the name of a file"),
            drain_s=(self.drain_s >= 0, "0 or more seconds"),
        )
