"""Settings of a whole run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from lightning_jax.engine.config import MAX_LEN, ServeConfig
from lightning_jax.models.config import MeshConfig, ModelConfig, PolicyConfig
from lightning_jax.models.policies import INITIAL, TEACHER, PolicyTable
from lightning_jax.rl.config import (
    AlgorithmConfig,
    BatchConfig,
    DistillConfig,
    OptimizerConfig,
)
from lightning_jax.rollouts.config import (
    AGENT,
    AgentConfig,
    ChatModel,
    PromptSearchConfig,
    RewardConfig,
    RolloutConfig,
    prompt_rules,
    reward_rules,
)
from lightning_jax.settings.schema import (
    ClassRef,
    Count,
    FunctionRef,
    Natural,
    NonNegative,
    PathKind,
    PathOrName,
    Positive,
    Rule,
    Section,
    Share,
    Table,
    expect,
    section,
)
from lightning_jax.traces.config import RewardRule, RoleConfig, TracesConfig
from lightning_jax.traces.convert import COLDEST
from lightning_jax.train.rules import age_rules, policy_rules


@section
class DifficultyConfig(Section):
    """Weights of tasks by how much the rewards of their attempts differ.

    With rewards of 0 and 1 a task that is solved with probability p has the weight
    4 * p * (1 - p). Unseen tasks have the weight 1.
    """

    rate: Annotated[float, Gt(0), Le(1)] = 0.5
    """Weight of the newest group in the estimate."""
    min_weight: Annotated[float, Gt(0), Le(1)] = 0.1
    """Least weight of a task that is not left out, such as one that was never solved."""
    solved_visits: Natural = 3
    """Groups in a row with full rewards only, after which a task is left out. 0: never."""
    by: str | None = None
    """Task field, such as `level`. Unseen tasks have the weight of seen ones of the same value."""


@section
class DataConfig(Section):
    load: FunctionRef | None = None
    """FILE:FUNCTION that makes the tasks; see docs/howto/bring_your_own_tasks.md. None: read the
    files at `root`."""
    root: PathOrName | None = None
    """Argument of the loader, or a file of tasks, or a folder with train.jsonl and dev.jsonl."""
    max_train_tasks: Count | None = None
    """None: all."""
    sampler: Literal["uniform", "difficulty"] = "uniform"
    """uniform: all tasks in random order, then again; difficulty: mostly those that are solved in
    some attempts. See docs/howto/choose_tasks_by_difficulty.md."""
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the loader."""


@section
class EvalConfig(Section):
    every: Natural = 10
    """In trainer steps; 0: only at the end."""
    num_tasks: Natural = 64
    """From the dev split, always the same tasks."""
    attempts: Natural = 0
    """Also sample this many attempts at each task, as in training."""
    at_start: bool = True
    """Also before the first step and after the warm-up."""
    by: str | None = None
    """Task field; also report a result for each of its values."""
    baselines: FunctionRef | None = None
    """FILE:FUNCTION, list of tasks -> dict with the mean reward of answers that need no model, by
    name. They are reported beside each evaluation."""


@section
class CheckpointConfig(Section):
    every: Count = 10
    """In trainer steps; the last step is always saved."""
    keep: Count = 1
    """Number of newest checkpoints to keep. With 2 or more a run goes on from the one before if the
    newest is damaged."""


SINK_NAMES = ("jsonl", "tensorboard", "wandb", "mlflow", "trackio")
SinkRef = Annotated[
    str,
    PathKind.CLASS,
    expect(
        lambda name: name in SINK_NAMES or ":" in name,
        f"{', '.join(SINK_NAMES)} or FILE:CLASS",
        "unknown",
    ),
]


@section
class MetricsConfig(Section):
    """Places that keep the metrics of a run. docs/howto/keep_metrics.md shows each."""

    sinks: list[SinkRef] = field(default_factory=lambda: ["jsonl"])
    """Any of jsonl, tensorboard, wandb, mlflow and trackio, and FILE:CLASS of yours; see
    docs/howto/add_a_metric_sink.md. The file metrics.jsonl of the run directory is always written.
    Each other one needs the package of its name. One that fails never stops a run."""
    project: str = "lightning_jax"
    """W&B and trackio: project; MLflow: experiment."""
    name: str | None = None
    """Of the run; None: the name of run_dir."""
    close_s: NonNegative = 60.0
    """Wait at the end of a run for sinks that are not done."""


@section
class DistributedConfig(Section):
    """Processes of one run, each with its own devices.

    Process 0 runs the agents and the gateway.
    """

    mode: Literal["none", "auto", "manual"] = "none"
    """none: one process; auto: JAX asks the TPU pod, Slurm or MPI; manual: use the fields below."""
    coordinator: str | None = None
    """HOST:PORT at which the others reach process 0."""
    num_processes: int | None = None
    """Of the run, with mode manual."""
    process_id: int | None = None
    """0, 1, ..., different in each process."""
    timeout_s: Count = 300
    """Wait for all processes to connect."""

    def rules(self) -> Iterator[Rule]:
        if self.mode != "manual":
            return
        number, process_id = self.num_processes or 0, self.process_id
        mode = "with distributed.mode manual"
        has_port = ":" in (self.coordinator or "")
        yield "coordinator", has_port, f"expected HOST:PORT of process 0 {mode}"
        yield "num_processes", number >= 1, f"expected the number of processes {mode}"
        is_index = process_id is not None and 0 <= process_id < number
        yield "process_id", is_index, f"expected 0 to num_processes - 1 {mode}"


LOCAL_CLUSTER, AUTO_CLUSTER = "local", "auto"  # addresses
Address = Annotated[
    str, expect(re.compile(r"auto|local|[^:/]+:\d+").fullmatch, "auto, local, HOST:PORT or none")
]
_PAIR = re.compile(r"\w+=.*", re.DOTALL)
Variables = Annotated[
    tuple[str, ...],
    expect(lambda pairs: all(map(_PAIR.fullmatch, pairs)), "variables as NAME=value"),
]


@section
class ClusterConfig(Section):
    """Processes that Ray places, on this machine or others. They need the extra `ray`."""

    address: Address | None = None
    """auto: the cluster that this machine is part of; HOST:PORT: the cluster with this head; local:
    a cluster of this machine alone, which ends with the run. None: no Ray."""
    samplers: Natural = 0
    """Samplers. Each serves the policy on the devices that it gets, and the trainer's devices only
    train. 0: the trainer's process serves."""
    sampler_resources: dict[str, Positive] = field(default_factory=dict)
    """Ray's resources for a sampler: CPU, GPU, TPU, memory in bytes, or a name of your own. By
    default a CPU."""
    sampler_env: Variables = field(default=(), repr=False)
    """Environment variables of a sampler, as NAME=value."""
    workers: Natural = 0
    """Workers, which run agents instead of the trainer's process."""
    worker_resources: dict[str, Positive] = field(default_factory=dict)
    """Ray's resources for a worker, by default a CPU."""
    trainers: Natural = 0
    """Processes of the trainer: one on this machine, and others that Ray places. If one dies, all
    of them start again from the newest checkpoint. 0: this process trains."""
    trainer_resources: dict[str, Positive] = field(default_factory=dict)
    """Ray's resources for each other process of the trainer, by default a CPU."""
    timeout_s: Positive = 300.0
    """For the cluster to place and start what is asked for."""

    def rules(self) -> Iterator[Rule]:
        has_address = self.address is not None
        yield (
            "trainers",
            not self.trainers or has_address,
            "expected 0 without a cluster.address; set it to local, auto or HOST:PORT",
        )
        yield (
            "samplers",
            (self.samplers + self.workers + self.trainers > 0) == has_address,
            "expected 1 or more, or workers or trainers, with a cluster.address, and 0 without",
        )

    def resources(self, process: str) -> dict[str, float]:
        """Return what a "sampler", "worker" or "trainer" takes.

        The default is here, because settings are merged with the default of a field.
        """
        return getattr(self, f"{process}_resources") or {"CPU": 1.0}


@section
class WarmupStopConfig(Section):
    """End of a warm-up at the weights from which RL has most to learn.

    A probe samples attempts at tasks that the warm-up shows no demonstration of. It scores (share
    of tasks whose attempts earn differently) * (share of tasks of which one earns 1 or more).
    """

    every: Natural = 0
    """Warm-up steps from one probe to the next, the first before the warm-up. 0: no probes, all of
    warmup.num_steps."""
    num_tasks: Count = 16
    """Training tasks, always the same, at most half of them."""
    attempts: Annotated[int, Ge(2)] = 8
    """Per task."""
    patience: Count = 2
    """Probes in a row below the best one that end the warm-up."""
    min_score: Share = 0.1
    """The best score must reach this; of 16 tasks, a lower one is chance."""


@section
class WarmupConfig(Section):
    """Supervised steps on demonstrations before the first rollout."""

    num_steps: Natural = 0
    """0: no warm-up; with `stop` the maximum."""
    demonstrations: FunctionRef | None = None
    """FILE:FUNCTION, list of tasks -> list of conversations."""
    group_by: str | None = None
    """Task field. Tasks with the same value share a long prefix and are trained together."""
    group_size: Count = 8
    """Maximum tasks per group; a step computes a group's prefix once."""
    groups_per_step: Count = 4
    """Groups whose demonstrations make one step."""
    stop: WarmupStopConfig = field(default_factory=WarmupStopConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))


@section
class LearnConfig(Section):
    """Steps on the stored attempts of another run, which `lightning-jax learn` sets.

    Nothing is sampled but evaluations. See docs/howto/learn_from_stored_attempts.md.
    """

    run: PathOrName | None = None
    """Directory of the other run; None: learn from own rollouts."""
    supervised: bool = True
    """true: steps of a warm-up, which imitate the attempts of `where`; false: policy steps on whole
    groups."""
    where: str = "reward > 0"
    """For supervised steps: attempts to imitate."""
    only_best: bool = False
    """For supervised steps: only the best of them in each group."""
    phase: Literal["train", "eval"] = "train"
    """Of the rollouts to learn from."""
    rescored: bool = False
    """Score the attempts by `rewards` first."""
    num_groups: Count | None = None
    """Maximum number of groups, evenly spaced; None: all."""
    num_steps: Count | None = None
    """Number of steps, in place of num_steps and warmup.num_steps. None: each group once."""


@section
class Config(Section):
    """Settings of one run.

    `run_dir` holds all its outputs and all it needs to resume after a crash.
    """

    run_dir: str = "runs/default"
    """Directory of the outputs, relative to the working directory even in a file. Started again
    with the same run_dir, a run resumes from its newest checkpoint."""
    seed: Natural = 0
    """Of tasks, sampling and new weights."""
    num_steps: Natural = 20
    """Policy steps, after the warm-up."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    policies: Table[PolicyConfig] = field(default_factory=dict)
    """Policies by name; empty: a single policy."""
    roles: Table[RoleConfig] = field(default_factory=dict)
    """By name; the first match wins."""
    reward_rules: Table[RewardRule] = field(default_factory=dict)
    """By name."""
    rewards: Table[RewardConfig] = field(default_factory=dict)
    """Components of a rollout's reward, by name; empty: what the agent returned."""
    prompts: Table[str] = field(default_factory=dict)
    """Texts by name that the agent reads as llm.prompts["NAME"] (docs/howto/improve_prompts.md)."""
    prompt_search: PromptSearchConfig = field(default_factory=PromptSearchConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    hooks: list[ClassRef] = field(default_factory=list)
    """FILE:CLASS of subclasses of Hook, which take part in each step; see
    docs/howto/add_a_hook.md."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        longest = self.batch.row_len or MAX_LEN
        object.__setattr__(self, "serve", self.serve.with_sizes(longest))
        object.__setattr__(self, "batch", self.batch.with_sizes(self.serve.max_len))
        super().__post_init__()

    def rules(self) -> Iterator[Rule]:
        max_len, row_len = self.serve.max_len, self.batch.row_len
        agent, rollout, distill = self.agent, self.rollout, self.distill
        yield (
            "batch.row_len",
            row_len >= max_len,
            f"is {row_len}, below serve.max_len={max_len}, so longer conversations could not be "
            "trained on; raise it, lower serve.max_len, or leave it out",
        )
        yield from policy_rules(self.policies, self.roles, self.model, self.algorithm)
        yield from reward_rules(self.rewards)
        yield from self._served_rules()
        yield from age_rules(agent, rollout, self.algorithm)
        yield from prompt_rules(self.prompt_search, self.prompts, agent, rollout, self.rewards)
        yield (
            "warmup.demonstrations",
            not self.warmup.num_steps or self.warmup.demonstrations or self.learn.run,
            "expected FILE:FUNCTION when warmup.num_steps is above 0",
            "missing",
        )
        yield (
            "warmup.stop.every",
            not self.warmup.stop.every or not agent.external,
            f"is {self.warmup.stop.every} and agent.external is true, so nothing here runs the "
            "attempts of a probe; set it to 0",
        )
        is_drawn = self.data.sampler == "difficulty"
        yield (
            "data.sampler",
            not is_drawn or not agent.external,
            "is difficulty and agent.external is true, so programs outside choose the tasks; leave "
            "one of them out",
        )
        yield (
            "data.sampler",
            not is_drawn or not rollout.ahead,
            f"is difficulty and rollout.ahead is {rollout.ahead}, so the tasks drawn would depend "
            "on how fast agents are; set rollout.ahead=0",
        )
        # Samples below COLDEST are trained on at temperature 1.
        heat = rollout.temperature
        yield (
            "rollout.temperature",
            distill.teacher_url is None or heat is None or heat == 1.0 or heat < COLDEST,
            f"is {heat} and distill.teacher_url is set, but servers score tokens at temperature 1 "
            "only, so the teacher would score nothing; set it to 1, or load the teacher with "
            "distill.teacher=MODEL",
        )
        teachers = [n for n in ("teacher", "teacher_url", "hint") if getattr(distill, n)]
        yield (
            f"distill.{next(iter(teachers), '')}",
            not teachers or self.algorithm.loss not in ("dpo", "raft"),
            f"is set and algorithm.loss is {self.algorithm.loss}, which has advantages of its own; "
            "set that to clip",
        )
        served = [name for name in self.asked_models if "://" not in name]
        yield (
            "cluster.samplers",
            not self.cluster.samplers or not served,
            f"is {self.cluster.samplers} and a judge or the prompt search asks "
            f"{', '.join(served)}, which samplers do not serve; set rewards.NAME.judge.served_by "
            "or prompt_search.served_by to the URL of a server, or cluster.samplers to 0",
        )
        orchestrator = self.serve.orchestrator
        yield (
            "serve.orchestrator",
            not self.policies or orchestrator == "native",
            f"is {orchestrator!r}, which does not support several policies; set it to native",
        )

    def _served_rules(self) -> Iterator[Rule]:
        """Yield the rules that judges and others name a row of the table of policies.

        Policies have to begin as the model if settings ask for initial weights.
        """
        for key, chat in self.chat_models.items():
            yield (
                f"{key}.served_by",
                chat.url or chat.served_by in (INITIAL, *self.policies),
                f"is {chat.served_by!r}; expected {', '.join((INITIAL, 'a URL', *self.policies))}",
                "unknown",
            )
        model = self.model.name
        others = [n for n, policy in self.policies.items() if policy.base not in (None, model)]
        teacher = ["distill.teacher"] * (self.distill.teacher == INITIAL)
        for key in self.initial_users + teacher:
            yield (
                key,
                not others,
                f"is 'initial' and policies.{''.join(others[:1])} begins as another model; "
                f"expected all policies to begin as {model!r}, or a policy with trains: false and "
                "the base that you want, named there",
            )

    @property
    def is_judged(self) -> bool:
        """True if components other than what the agent returned give a rollout's reward."""
        return any(reward.weight and name != AGENT for name, reward in self.rewards.items())

    @property
    def chat_models(self) -> Mapping[str, ChatModel]:
        """Models that judge, and the one that proposes prompts if there is a search, by key."""
        judges = {f"rewards.{name}.judge": x.judge for name, x in self.rewards.items() if x.judge}
        return judges | ({"prompt_search": self.prompt_search} if self.prompt_search.every else {})

    @property
    def initial_users(self) -> list[str]:
        """Return the settings that ask for the weights from the start of the run."""
        users = {**{f"roles.{name}": role for name, role in self.roles.items()}, **self.chat_models}
        return [f"{key}.served_by" for key, user in users.items() if user.served_by == INITIAL]

    @property
    def asked_models(self) -> list[str]:
        """Who answers the judges, and the search for prompts if there is one."""
        return [model.served_by for model in self.chat_models.values()]

    @property
    def policy_table(self) -> PolicyTable:
        """Table of the policies that answer and learn.

        Fixed rows are the initial weights, if a setting asks for them, and a teacher.
        """
        table = PolicyTable.of(self.policies, are_adapters=self.model.lora.rank > 0)
        if self.initial_users:
            table = table.with_fixed(INITIAL)
        if teacher := self.distill.teacher:
            table = table.with_fixed(TEACHER, None if teacher == INITIAL else teacher)
        return table

    @property
    def total_steps(self) -> int:
        return self.warmup.num_steps + self.num_steps
