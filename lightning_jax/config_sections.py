"""Sections of the settings: model, data, devices, server, agent, rollouts and what is kept.

`config_learning.py` has those of the learning, `config.py` all of them together.
"""

import math
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.types import InvalidValue


class FieldError(InvalidValue):
    """A field of a section is wrong. The message begins with the field's name, which is the error's
    key, too; whoever knows where the section stands adds the rest of both.
    """


def require(section: object, **conditions: tuple[bool, str] | tuple[bool, str, str]) -> None:
    """Raises FieldError for the first field whose condition does not hold; the text says what
    would. A third item is the error's reason, where "invalid" does not say enough.
    """
    for name, (holds, expected, *reason) in conditions.items():
        if not holds:
            message = f"{name} is {getattr(section, name)!r}; expected {expected}."
            raise FieldError(message, reason=reason[0] if reason else "invalid", key=name)


AUTO = "auto"  # as a dtype: whichever is fastest on the devices here
KERNELS = ("q", "k", "v", "o", "gate", "up", "down")  # of each layer of a model


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which are trained instead of the model's own weights."""

    rank: int = 0  # of each adapter; 0: none, and all weights are trained
    alpha: float = 16.0  # an adapter's part in its layer's output is scaled by alpha / rank
    targets: tuple[str, ...] = KERNELS  # which kernels of every layer have one

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
    name: str = (
        "smollm2-135m-instruct"  # a name, a Hugging Face directory or hub id, or a .gguf file
    )
    # Of weights and activations: float32, bfloat16 or auto, which is what is fastest on the devices
    # here, on a CPU by a short measurement (models/precision.py). A run keeps what it began with.
    dtype: str = "float32"
    # None: as `dtype`. float32 beside bfloat16 weights: activations are rounded for products with
    # weights, and keys and values in the server's cache. On a CPU as fast as all in bfloat16.
    activation_dtype: str | None = None
    remat: bool = (
        False  # recompute activations in the backward pass: less memory, a third more time
    )
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
    root: str | None = (
        None  # a folder with the data set as published or in the compact form; None: generated
    )
    max_train_tasks: int | None = None  # None: all
    max_schema_chars: int | None = None  # leave out databases whose schema text is longer; counted
    require_rows: bool = True  # leave out tasks whose gold query returns no row
    sources: tuple[str, ...] | None = None  # of Calc-X: leave out tasks of others; counted
    max_question_chars: int | None = None  # of Calc-X: leave out longer questions; counted

    def __post_init__(self) -> None:
        limits = ("max_train_tasks", "max_schema_chars", "max_question_chars")
        given = {name: getattr(self, name) for name in limits}
        require(
            self,
            **{n: (v is None or v >= 1, "at least 1, or none") for n, v in given.items()},
        )


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; -1 takes what is left."""

    data: int = 1  # each holds whole weights and a share of the rows
    fsdp: int = -1  # each holds a share of the weights and of the rows
    tensor: int = 1  # each computes a share of every layer
    first_device: int = 0  # those before it are left to another mesh


@dataclass(frozen=True)
class ServeConfig:
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    # The owner's key; a rollout has its own. None: a random one.
    api_key: str | None = field(default=None, repr=False)
    # Requests decoded at once, by each copy of the engine, for each policy with weights of its own.
    slots: int = 16
    max_len: int = 1024  # tokens of prompt and response together that a slot holds
    # Padded lengths of a prompt's chunks. A program takes as many as 1, 4, 16, ... chunks of one
    # length at once, up to 512 tokens or the longest chunk; each is a compile.
    prefill_buckets: tuple[int, ...] = (32, 128, 512)
    # Decode steps that the device is told to make in one go, where no response reaches its limit in
    # them. More than 1 compiles every decode program twice, a response that stops within them
    # wastes the rest (serve/tokens_past_end), and who comes waits for all of them. It pays where
    # the host is slower than a step, on an accelerator; never on a CPU.
    steps_per_dispatch: int = 1
    max_queue: int = 1024  # requests waiting for a slot; more are refused with 429
    max_body_mib: float = 16.0  # of a request's body, unpacked; larger ones are refused with 413
    max_json_values: int = 200_000  # names and values in a body; more are refused with 413
    # What one rollout may have in flight at once: calls, and responses of all its calls together.
    # More are refused with 429.
    max_calls_per_rollout: int = 128
    max_choices_per_rollout: int = 512
    # Prompt and response tokens of all calls of one rollout; further calls are refused with 400.
    max_tokens_per_rollout: int = 2**24
    # Memory of one rollout for answers that a retry may ask for again, and as much for saved
    # responses. The oldest are forgotten first.
    max_kept_mib_per_rollout: float = 64.0
    # Connections at once, or as few as the limit of open files allows. One more closes an idle one.
    max_connections: int = 4096
    idle_connection_s: float = 300.0  # a connection without a request, or unread, is closed then
    slow_request_s: float = 60.0  # a request that is not whole by then is refused with 408
    # Memory for keys and values of past calls, beside the slots'; at most 8 times theirs is taken.
    # Each copy of the engine, and each policy that has weights of its own, has as much.
    # SmolLM2-135M in float32 has 46 kB a token: 256 MiB are 5,800 tokens. 0: nothing is kept.
    prefix_cache_mib: float = 256.0
    # Of one grammar that a tool or an answer's schema demands. Its process takes this CPU time to
    # compile it, and again for the mask of a token, and this memory; Linux alone bounds the memory.
    grammar_timeout_s: float = 2.0
    grammar_memory_mib: float = 512.0
    max_grammar_kib: int = 256  # length of the schemas of one request
    max_logit_biases: int = 1024  # entries of a request's logit_bias
    orchestrator: str = "native"  # native, or jetstream (cannot train: it takes no new weights)
    # Devices that serve; `data` counts copies of the engine, each with weights, slots and a prefix
    # cache of its own. None: the trainer's, on a GPU or TPU as many copies as they hold with
    # `mesh.tensor` each; of several processes, all devices of process 0 as one engine.
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
            orchestrator=(self.orchestrator in ("native", "jetstream"), "native or jetstream"),
        )


@dataclass(frozen=True)
class AgentConfig:
    """The program that is trained; docs/agents.md says what it gets and how it answers."""

    # FILE:FUNCTION, (task, llm) -> reward, a coroutine function or not; it runs in this process...
    function: str = "agents/spider_sql.py:run"
    python: str | None = None  # ...or in one of this interpreter's, which has what it imports
    # A command line, as a string or a list of its words, that runs for each rollout instead of
    # `function`.
    command: Any = None
    # Of a command. FILE:FUNCTION, (task, output) -> reward; None: the output's last line is it.
    reward: str | None = None
    # Variables for a program besides those of docs/agents.md: NAME, with the value that the trainer
    # has, or NAME=value.
    env: tuple[str, ...] = field(default=(), repr=False)
    # Limits of one program with all that it started. Over one of them the program is ended.
    max_processes: int = 1024
    memory_mib: float | None = None  # resident, all together; None: what the machine has

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", tuple(self.env))
        if not all(_VARIABLE.match(each) for each in self.env):  # without the values
            raise FieldError(
                f"env has {[each.partition('=')[0] for each in self.env]}; expected names of "
                "variables, each alone or with =VALUE, and not the ??? of a saved file.",
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
                "none beside agent.command, whose first word is what runs",
                "conflict",
            ),
            command=(
                self.command is None or (isinstance(self.command, tuple) and any(self.command[:1])),
                "a command line, such as 'node agent.mjs', or a list of its words",
            ),
            reward=(
                self.reward is None or (":" in self.reward and command is not None),
                "FILE:FUNCTION beside agent.command; agent.function returns the reward itself",
            ),
            max_processes=(self.max_processes >= 1, "at least 1"),
            memory_mib=(self.memory_mib is None or self.memory_mib > 0, "above 0, or none"),
        )


_VARIABLE = re.compile(r"[A-Za-z_]\w*(=(?!\?\?\?$)[^\0]*)?\Z", re.ASCII | re.DOTALL)


def _words(line: str) -> tuple[str, ...]:
    """The words of a command line, as a shell would split them."""
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
    timeout_s: float = 120.0  # of one rollout; over it the agent has failed
    call_timeout_s: float = 60.0  # of one LLM call; over it the infrastructure has failed
    max_attempts: int = 3  # tries of a rollout whose infrastructure fails
    # Seconds before the second try. The wait doubles with each try up to the maximum. Up to a half
    # is added at random, so that rollouts do not come back all at once.
    retry_delay_s: float = 2.0
    max_retry_delay_s: float = 60.0
    agent_failure_reward: float | None = 0.0  # None: a failed agent's rollout is not trained on
    # Magnitude of a rollout's reward, and of all that one of its calls earns. More fails the agent.
    max_abs_reward: float = 1e6
    # Numbers besides the reward that are kept of a rollout, and different ones in a row of metrics.
    max_metrics: int = 100
    max_infrastructure_failures: float = 0.2  # share of a step's rollouts above which the run stops
    # Sampling of the policy in training rollouts, whatever the agent asks for. None: as the agent
    # asks.
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    max_tokens: int | None = None  # a ceiling, not an override
    max_spans: int = 10_000  # that a rollout's agent posts, rewards of calls included
    max_spans_mib: float = 64.0  # of posted spans as they are stored

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
    every: int = 10  # trainer steps; 0: only at the end
    num_tasks: int = 64  # of the dev split, always the same ones
    at_start: bool = True  # also before the first step, and after the warm-up
    by: str | None = None  # a field of the tasks: a result for each of its values, too

    def __post_init__(self) -> None:
        require(
            self,
            every=(self.every >= 0, "0 (only at the end) or more"),
            num_tasks=(self.num_tasks >= 0, "0 (no evaluation) or more"),
        )


@dataclass(frozen=True)
class SearchConfig:
    """The search service of experiments whose agent searches paragraphs."""

    retriever: str = "bm25"  # bm25, or dense
    encoder: str = "all-MiniLM-L6-v2"  # of dense: this one, a directory or a hub id
    index: str | None = None  # a folder with an index of this corpus; None: made once, and kept
    top_k: int = 3  # paragraphs a query
    max_chars: int = 500  # of a paragraph
    start_timeout_s: float = 3600.0  # the making of a large dense index takes long

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
    every: int = 10  # trainer steps; the last one is always saved
    keep: int = 1  # newest checkpoints kept

    def __post_init__(self) -> None:
        require(self, every=(self.every >= 1, "at least 1"), keep=(self.keep >= 1, "at least 1"))


@dataclass(frozen=True)
class DistributedConfig:
    """The processes of one run, each with devices of its own; process 0 runs agents and gateway."""

    # none: one process; auto: jax asks the TPU pod, Slurm or MPI; manual: as the other fields say.
    mode: str = "none"
    coordinator: str | None = None  # HOST:PORT of process 0, as all others reach it
    num_processes: int | None = None
    process_id: int | None = None  # 0, 1, ..., another one in each process
    timeout_s: int = 300  # for all processes to appear

    def __post_init__(self) -> None:
        manual = self.mode == "manual"
        number, place = self.num_processes, self.process_id
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
                not manual or (place is not None and 0 <= place < (number or 0)),
                "0 to num_processes - 1 with distributed.mode manual",
            ),
            timeout_s=(self.timeout_s >= 1, "at least 1 second"),
        )


@dataclass(frozen=True)
class ServerConfig:
    """What one server is and does, without a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    record: str | None = None  # a SQLite file that keeps every call; None: no call is kept
    drain_s: float = 30.0  # how long running requests may go on once it is told to stop
    tensor: int = 1  # GPUs or TPUs that share a copy of the model; the others hold copies

    def __post_init__(self) -> None:
        require(
            self,
            tensor=(self.tensor >= 1, "at least 1"),
            record=(self.record != "", "the name of a file"),
            drain_s=(self.drain_s >= 0, "0 or more seconds"),
        )
