"""Every knob, as frozen dataclasses, and `load_config`, which reads YAML files and `key=value`
pairs.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_jax.types import UserError

T = TypeVar("T")


def _require(section: object, **conditions: tuple[bool, str]) -> None:
    """Raises ValueError for the first field whose condition does not hold; the text says what
    would.
    """
    for name, (holds, expected) in conditions.items():
        if not holds:
            raise ValueError(f"{name} is {getattr(section, name)!r}; expected {expected}.")


@dataclass(frozen=True)
class ModelConfig:
    name: str = (
        "smollm2-135m-instruct"  # a name, a Hugging Face directory or hub id, or a .gguf file
    )
    dtype: str = "float32"  # of weights and activations: float32 or bfloat16
    remat: bool = (
        False  # recompute activations in the backward pass: less memory, a third more time
    )

    def __post_init__(self) -> None:
        _require(self, dtype=(self.dtype in ("float32", "bfloat16"), "float32 or bfloat16"))


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
    api_key: str | None = None  # None: a random one
    slots: int = 16  # requests decoded at once
    max_len: int = 1024  # tokens of prompt and response together that a slot holds
    prefill_buckets: tuple[int, ...] = (32, 128, 512)  # padded prompt lengths, one compile each
    max_queue: int = 1024  # requests waiting for a slot; more are refused with 429
    # Memory for keys and values of past calls, beside the slots'; at most 8 times theirs is taken.
    # SmolLM2-135M in float32 has 46 kB a token: 256 MiB are 5,800 tokens. 0: nothing is kept.
    prefix_cache_mib: float = 256.0
    orchestrator: str = "native"  # native, or jetstream (cannot train: it takes no new weights)
    # Devices that serve. None: the trainer's; of several processes, all devices of process 0.
    mesh: MeshConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill_buckets", tuple(sorted(self.prefill_buckets)))
        _require(
            self,
            slots=(self.slots >= 1, "at least 1"),
            port=(0 <= self.port < 65536, "0 (any free port) to 65535"),
            max_len=(self.max_len >= 16, "at least 16 tokens"),
            prefill_buckets=(
                bool(self.prefill_buckets) and self.prefill_buckets[0] > 0,
                "positive lengths",
            ),
            prefix_cache_mib=(
                0 <= self.prefix_cache_mib < math.inf,
                "a number of MiB, or 0 for no prefix cache",
            ),
            orchestrator=(self.orchestrator in ("native", "jetstream"), "native or jetstream"),
        )


@dataclass(frozen=True)
class RolloutConfig:
    agent: str = (
        "agents/spider_sql.py:run"  # FILE:FUNCTION, a coroutine function (task, llm) -> reward
    )
    tasks_per_step: int = 8
    group_size: int = 4  # rollouts of one task in one step
    concurrency: int = 16  # rollouts running at once
    timeout_s: float = 120.0  # of one rollout; over it the agent has failed
    call_timeout_s: float = 60.0  # of one LLM call; over it the infrastructure has failed
    max_attempts: int = 3  # tries of a rollout whose infrastructure fails
    agent_failure_reward: float | None = 0.0  # None: a failed agent's rollout is not trained on
    max_infrastructure_failures: float = 0.2  # share of a step's rollouts above which the run stops
    # Sampling of the policy in training rollouts, whatever the agent asks for. None: as the agent
    # asks.
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    max_tokens: int | None = None  # a ceiling, not an override

    def __post_init__(self) -> None:
        _require(
            self,
            agent=(":" in self.agent, "FILE:FUNCTION, such as agents/spider_sql.py:run"),
            tasks_per_step=(self.tasks_per_step >= 1, "at least 1"),
            group_size=(self.group_size >= 1, "at least 1"),
            concurrency=(self.concurrency >= 1, "at least 1"),
            max_attempts=(self.max_attempts >= 1, "at least 1"),
            timeout_s=(self.timeout_s > 0, "a positive number of seconds"),
            call_timeout_s=(self.call_timeout_s > 0, "a positive number of seconds"),
        )


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    warmup_steps: int = 0  # steps of linear rise from 0
    decay_steps: int | None = None  # steps of cosine fall to a tenth after the rise; None: constant
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self,
            learning_rate=(self.learning_rate > 0, "a positive number"),
            warmup_steps=(self.warmup_steps >= 0, "0 or more"),
            max_grad_norm=(self.max_grad_norm > 0, "a positive number"),
        )


@dataclass(frozen=True)
class AlgorithmConfig:
    """From rewards to a loss; docs/algorithms.md says which settings make which algorithm."""

    # Rewards, and the rollouts that are trained on.
    credit: str = "identical"  # identical, per_step, turn_groups, learned or learned_token
    discount: float = 1.0  # of all but identical, between calls; of learned_token, between tokens
    gae_lambda: float = 1.0  # of learned and learned_token; 1: unbiased whatever the values
    overlong_penalty: float = 0.0  # most that a long response costs, in reward units; 0: nothing
    overlong_max_tokens: int = 1024  # tokens of a response from which it costs all of that
    overlong_buffer: int = 256  # tokens before there, over which the cost rises from 0
    # Rounds of rollouts a step may take. In each further one other tasks replace the groups whose
    # returns are all equal, and such groups are never trained on. 1: no group is replaced.
    max_sampling_rounds: int = 1
    # Advantages.
    baseline: str = "group_mean"  # group_mean, leave_one_out, batch_mean or none
    normalize: str = "group_std"  # group_std, batch_std or none: what advantages are divided by
    # What a token's gradient is, and how much it weighs.
    loss: str = "clip"  # clip (PPO, per token), gspo (per call), cispo or reinforce
    clip_low: float = 0.2  # below 1; 1 is no lower bound
    clip_high: float = 0.2  # above 1
    aggregation: str = "rollout"  # rollout, token, call or constant: what weighs the same
    token_divisor: float = 1024.0  # of constant: the tokens by which a rollout's sum is divided
    # Off-policy correction.
    proximal: str = "behavior"  # the policy in the ratio's denominator: behavior, or old
    correction: str = "none"  # none, truncate or mask, by the ratio of old to behavior policy
    correction_level: str = "token"  # token, sequence or sequence_mean: what has one ratio
    correction_low: float = 0.5  # of mask: the least ratio that is kept
    correction_high: float = 2.0  # of mask: the largest that is kept; of truncate: the ceiling
    max_staleness: int = 4  # trainer steps; older transitions are dropped and counted
    # Terms beside the policy gradient.
    kl_coef: float = 0.0  # of the KL to the reference policy; 0: no reference is kept
    kl_estimator: str = "k3"  # k1, k2 or k3
    kl_in: str = "loss"  # loss, or reward (each token's advantage loses the KL still to come)
    entropy_coef: float = 0.0  # of the bonus for the entropy of each token's distribution, in nats
    # The value head of learned and learned_token.
    value_learning_rate: float = 1e-3  # of its own Adam, without a schedule
    value_clip: float = 0.0  # how far a value learns to move in a step, in reward units; 0: any
    value_coef: float = 0.0  # of the value loss in the policy's gradient; 0: the head alone learns
    # Updates.
    num_epochs: int = 1  # passes over the data of a step
    num_minibatches: int = 1  # optimizer updates of a pass
    skip_zero_advantage: bool = True  # leave out rows that cannot move the weights; same gradient
    max_nonfinite_steps: int = 5  # in a row without a finite gradient; then the run stops

    def __post_init__(self) -> None:
        self._check_choices()
        _require(
            self,
            discount=(0 < self.discount <= 1, "above 0 and at most 1"),
            overlong_penalty=(self.overlong_penalty >= 0, "0 (off) or more"),
            overlong_buffer=(
                0 <= self.overlong_buffer <= self.overlong_max_tokens,
                f"0 to overlong_max_tokens={self.overlong_max_tokens}",
            ),
            max_sampling_rounds=(self.max_sampling_rounds >= 1, "at least 1"),
            clip_low=(0 < self.clip_low <= 1, "above 0 and at most 1"),
            clip_high=(self.clip_high > 0, "a positive number"),
            token_divisor=(self.token_divisor > 0, "a positive number of tokens"),
            correction=(
                self.correction != "truncate" or self.proximal == "old" or self.loss == "reinforce",
                "none or mask, because the ratio of this loss is to the behavior policy already; "
                "or set proximal to old",
            ),
            correction_low=(self.correction_low >= 0, "0 or more"),
            correction_high=(
                self.correction_high > self.correction_low,
                f"above correction_low={self.correction_low}",
            ),
            max_staleness=(self.max_staleness >= 0, "0 or more"),
            kl_coef=(self.kl_coef >= 0, "0 or more"),
            entropy_coef=(self.entropy_coef >= 0, "0 or more"),
            gae_lambda=(0 <= self.gae_lambda <= 1, "0 to 1"),
            value_learning_rate=(self.value_learning_rate > 0, "a positive number"),
            value_clip=(self.value_clip >= 0, "0 (off) or more"),
            value_coef=(
                self.value_coef >= 0 and (self.value_coef == 0 or self.has_critic),
                "0 or more, and 0 unless credit is learned or learned_token",
            ),
            num_epochs=(self.num_epochs >= 1, "at least 1"),
            num_minibatches=(self.num_minibatches >= 1, "at least 1"),
            max_nonfinite_steps=(self.max_nonfinite_steps >= 1, "at least 1"),
        )

    def _check_choices(self) -> None:
        for name, choices in {
            "credit": ("identical", "per_step", "turn_groups", "learned", "learned_token"),
            "baseline": ("group_mean", "leave_one_out", "batch_mean", "none"),
            "normalize": ("group_std", "batch_std", "none"),
            "loss": ("clip", "gspo", "cispo", "reinforce"),
            "aggregation": ("rollout", "token", "call", "constant"),
            "proximal": ("behavior", "old"),
            "correction": ("none", "truncate", "mask"),
            "correction_level": ("token", "sequence", "sequence_mean"),
            "kl_estimator": ("k1", "k2", "k3"),
            "kl_in": ("loss", "reward"),
        }.items():
            expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
            _require(self, **{name: (getattr(self, name) in choices, expected)})

    @property
    def has_critic(self) -> bool:
        """Whether a value head is trained."""
        return self.credit in ("learned", "learned_token")

    @property
    def has_only_policy_gradient(self) -> bool:
        """Whether a token without an advantage has no gradient: no KL, entropy or value term."""
        return self.kl_coef == 0 and self.entropy_coef == 0 and not self.has_critic

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the loss reads the trainer's own log-probs before the step's first update."""
        return self.proximal == "old" or (self.kl_coef > 0 and self.kl_in == "reward")


@dataclass(frozen=True)
class BatchConfig:
    rows: int = 1  # rows of one microbatch; gradients of microbatches are added up
    row_len: int = 2048  # nodes of a row
    max_targets: int = 1024  # sampled tokens of a row
    head_chunk: int = 256  # targets whose logits are in memory at once; divides max_targets

    def __post_init__(self) -> None:
        _require(
            self,
            rows=(self.rows >= 1, "at least 1"),
            row_len=(self.row_len >= 16, "at least 16"),
            max_targets=(self.max_targets >= 1, "at least 1"),
            head_chunk=(
                self.head_chunk >= 1 and self.max_targets % self.head_chunk == 0,
                f"a divisor of max_targets={self.max_targets}",
            ),
        )


@dataclass(frozen=True)
class WarmupConfig:
    """Supervised steps on demonstrations before the first rollout."""

    num_steps: int = 0
    demonstrations: str | None = None  # FILE:FUNCTION: list of tasks -> list of conversations
    group_by: str | None = None  # a field of the tasks: those that share it share a long prefix...
    group_size: int = (
        8  # ...so this many of them are shown in one step, where their trie is shallow
    )
    groups_per_step: int = 4
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))

    def __post_init__(self) -> None:
        _require(
            self,
            group_size=(self.group_size >= 1, "at least 1"),
            groups_per_step=(self.groups_per_step >= 1, "at least 1"),
            num_steps=(self.num_steps >= 0, "0 or more"),
            demonstrations=(
                self.num_steps == 0 or self.demonstrations is not None,
                "FILE:FUNCTION when warmup.num_steps is above 0",
            ),
        )


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10  # trainer steps; 0: only at the end
    num_tasks: int = 64  # of the dev split, always the same ones
    temperature: float = 0.0
    at_start: bool = True  # also before the first step, and after the warm-up
    by: str | None = None  # a field of the tasks: a result for each of its values, too


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
        _require(
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
        _require(self, every=(self.every >= 1, "at least 1"), keep=(self.keep >= 1, "at least 1"))


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
        _require(
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
class Config:
    """One run. `run_dir` holds all it leaves, and all it needs to go on after a crash."""

    run_dir: str = "runs/default"
    seed: int = 0
    num_steps: int = 20  # GRPO steps, after the warm-up's
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    @property
    def total_steps(self) -> int:
        return self.warmup.num_steps + self.num_steps


class ConfigError(UserError, ValueError):
    """A setting is wrong; the message is one sentence for the person who wrote it."""


def load_config(schema: type[T], argv: list[str]) -> T:
    """`argv`: YAML paths and `dotted.key=value`, in order; later wins. Raises ConfigError."""
    merged = OmegaConf.structured(schema)
    for arg in argv:
        try:
            layer = OmegaConf.from_dotlist([arg]) if _is_setting(arg) else _load_yaml(arg)
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{_where(arg)}: {_one_sentence(error)}") from error
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise ConfigError(_one_sentence(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def save_config(config: Any, path: Path) -> None:
    """Writes the resolved settings as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))


def _where(arg: str) -> str:
    return f"setting {arg!r}" if _is_setting(arg) else f"config {arg}"


def _is_setting(arg: str) -> bool:
    """Whether it is key=value; the path of a file may hold a "=", too."""
    return "=" in arg and not Path(arg).is_file()


def _load_yaml(path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(
            f"config {path} does not exist; expected a YAML file or key=value. Check the path."
        )
    try:
        return OmegaConf.load(path)
    except (YAMLError, OSError) as error:
        raise ConfigError(f"config {path} is not readable YAML: {error}") from error


def _one_sentence(error: Exception) -> str:
    """OmegaConf's message without its block of fields."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )
    return f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]


def changed_keys(path: Path, config: Any) -> list[str]:
    """The dotted keys in which `config` differs from the settings saved at `path`; none without a
    file.
    """
    if not path.exists():
        return []
    old = _flatten(OmegaConf.to_container(OmegaConf.load(path)))
    new = _flatten(OmegaConf.to_container(OmegaConf.structured(config)))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix: list(node) if isinstance(node, list | tuple) else node}
    return {
        key: value
        for name, child in node.items()
        for key, value in _flatten(child, f"{prefix}.{name}" if prefix else str(name)).items()
    }
