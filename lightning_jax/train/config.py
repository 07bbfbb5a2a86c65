"""Settings of a whole run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from lightning_jax.cluster.config import ClusterConfig
from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import InvalidValue
from lightning_jax.models.config import MeshConfig, ModelConfig, PolicyConfig, policy_indices
from lightning_jax.rl.config import (
    GROUP_BASELINES,
    INITIAL_TEACHER,
    AlgorithmConfig,
    BatchConfig,
    DistillConfig,
    OptimizerConfig,
)
from lightning_jax.rl.scope import ALL, PolicyScope, scopes_of
from lightning_jax.rollouts.config import (
    AGENT,
    INITIAL,
    AgentConfig,
    PromptSearchConfig,
    RewardConfig,
    RolloutConfig,
    check_prompt_search,
    check_rewards,
)
from lightning_jax.schema import (
    Count,
    FunctionRef,
    Natural,
    NonNegative,
    PathOrName,
    Section,
    Share,
    require,
)
from lightning_jax.traces.config import RESERVED, RewardRule, RoleConfig
from lightning_jax.traces.convert import COLDEST


@dataclass(frozen=True)
class DifficultyConfig(Section):
    """Weights of tasks by how much the rewards of their attempts differ.

    With rewards of 0 and 1 a task that is solved with probability p has the weight
    4 * p * (1 - p). Unseen tasks have the weight 1.
    """

    rate: Annotated[float, Gt(0), Le(1)] = 0.5  # weight of the newest group in the estimate
    # Least weight of a task that is not left out, such as one that was never solved.
    min_weight: Annotated[float, Gt(0), Le(1)] = 0.1
    # Groups in a row with full rewards only, after which a task is left out. 0: never.
    solved_visits: Natural = 3
    # Task field, such as `level`. Unseen tasks have the weight of seen ones with the same value.
    by: str | None = None


@dataclass(frozen=True)
class DataConfig(Section):
    # FILE:FUNCTION that makes the tasks; see docs/howto/bring_your_own_tasks.md. None: read the
    # files at `root`.
    load: FunctionRef | None = None
    # Argument of the loader, or a file of tasks, or a folder with train.jsonl and dev.jsonl.
    root: PathOrName | None = None
    max_train_tasks: Count | None = None  # None: all
    # uniform: all tasks in random order, then again; difficulty: mostly those that are solved in
    # some attempts. See docs/howto/choose_tasks_by_difficulty.md.
    sampler: Literal["uniform", "difficulty"] = "uniform"
    difficulty: DifficultyConfig = field(default_factory=DifficultyConfig)
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the loader


@dataclass(frozen=True)
class EvalConfig(Section):
    every: Natural = 10  # in trainer steps; 0: only at the end
    num_tasks: Natural = 64  # from the dev split, always the same tasks
    attempts: Natural = 0  # also sample this many attempts at each task, as in training
    at_start: bool = True  # also before the first step and after the warm-up
    by: str | None = None  # task field; also report a result for each of its values
    # FILE:FUNCTION, list of tasks -> dict with the mean reward of answers that need no model, by
    # name. They are reported beside each evaluation.
    baselines: FunctionRef | None = None


@dataclass(frozen=True)
class CheckpointConfig(Section):
    every: Count = 10  # in trainer steps; the last step is always saved
    # Number of newest checkpoints to keep. With 2 or more a run goes on from the one before if the
    # newest is damaged.
    keep: Count = 1


SinkName = Literal["jsonl", "tensorboard", "wandb", "mlflow", "trackio"]


@dataclass(frozen=True)
class MetricsConfig(Section):
    """Places that keep the metrics of a run. docs/howto/keep_metrics.md shows each."""

    # The file metrics.jsonl of the run directory is always written. Each other one needs the
    # package of its name. One that fails never stops a run.
    sinks: list[SinkName] = field(default_factory=lambda: ["jsonl"])
    project: str = "lightning_jax"  # W&B and trackio: project; MLflow: experiment
    name: str | None = None  # of the run; None: the name of run_dir
    close_s: NonNegative = 60.0  # wait at the end of a run for sinks that are not done


@dataclass(frozen=True)
class DistributedConfig(Section):
    """Processes of one run, each with its own devices.

    Process 0 runs the agents and the gateway.
    """

    # none: one process; auto: JAX asks the TPU pod, Slurm or MPI; manual: use the fields below.
    mode: Literal["none", "auto", "manual"] = "none"
    coordinator: str | None = None  # HOST:PORT at which the others reach process 0
    num_processes: int | None = None  # of the run, with mode manual
    process_id: int | None = None  # 0, 1, ..., different in each process
    timeout_s: Count = 300  # wait for all processes to connect

    def __post_init__(self) -> None:
        super().__post_init__()
        manual = self.mode == "manual"
        number, process_id = self.num_processes, self.process_id
        require(
            self,
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
        )


@dataclass(frozen=True)
class WarmupStopConfig(Section):
    """End of a warm-up at the weights from which RL has most to learn.

    A probe samples attempts at tasks that the warm-up shows no demonstration of. It scores (share
    of tasks whose attempts earn differently) * (share of tasks of which one earns 1 or more).
    """

    # Warm-up steps from one probe to the next, the first before the warm-up. 0: no probes, all of
    # warmup.num_steps.
    every: Natural = 0
    num_tasks: Count = 16  # training tasks, always the same, at most half of them
    attempts: Annotated[int, Ge(2)] = 8  # per task
    patience: Count = 2  # probes in a row below the best one that end the warm-up
    min_score: Share = 0.1  # the best score must reach this; of 16 tasks, a lower one is chance


@dataclass(frozen=True)
class WarmupConfig(Section):
    """Supervised steps on demonstrations before the first rollout."""

    num_steps: Natural = 0  # 0: no warm-up; with `stop` the maximum
    # FILE:FUNCTION, list of tasks -> list of conversations.
    demonstrations: FunctionRef | None = None
    # Task field. Tasks with the same value share a long prefix and are trained together.
    group_by: str | None = None
    group_size: Count = 8  # maximum tasks per group; a step computes a group's prefix once
    groups_per_step: Count = 4  # groups whose demonstrations make one step
    stop: WarmupStopConfig = field(default_factory=WarmupStopConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(learning_rate=1e-4))


@dataclass(frozen=True)
class LearnConfig(Section):
    """Steps on the stored attempts of another run, which `lightning-jax learn` sets.

    Nothing is sampled but evaluations. See docs/howto/learn_from_stored_attempts.md.
    """

    run: PathOrName | None = None  # directory of the other run; None: learn from own rollouts
    # true: steps of a warm-up, which imitate the attempts of `where`; false: policy steps on whole
    # groups.
    supervised: bool = True
    where: str = "reward > 0"  # for supervised steps: attempts to imitate
    only_best: bool = False  # for supervised steps: only the best of them in each group
    phase: Literal["train", "eval"] = "train"  # of the rollouts to learn from
    rescored: bool = False  # score the attempts by `rewards` first
    num_groups: Count | None = None  # maximum number of groups, evenly spaced; None: all
    # Number of steps, in place of num_steps and warmup.num_steps. None: each group once.
    num_steps: Count | None = None


def check_policies(
    policies: Mapping[str, PolicyConfig],
    roles: Mapping[str, RoleConfig],
    model: ModelConfig,
    algorithm: AlgorithmConfig,
) -> None:
    """Raise ValueError if the policies of a run are invalid or do not fit its roles."""
    names = ", ".join(policies)
    for name, policy in policies.items():
        if name in RESERVED or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise InvalidValue(
                f"policies has the name {name!r}; expected letters, digits, - and _, and none of "
                f"{', '.join(RESERVED)}: agents ask for it as their model.",
                reason="invalid",
                key=f"policies.{name}",
            )
        if model.lora.rank and policy.base not in (None, model.name):
            raise InvalidValue(
                f"policies.{name}.base is {policy.base!r}; expected none or {model.name!r}, as "
                "with model.lora.rank above 0 all policies are adapters on model.name.",
                reason="conflict",
                key=f"policies.{name}.base",
            )
    if policies and not any(policy.trains for policy in policies.values()):
        raise InvalidValue(
            f"policies names {names}, and trains is false for all; set trains: true for at least "
            "one.",
            reason="conflict",
            key="policies",
        )
    if policies and not model.lora.rank and algorithm.value_heads == "shared":
        raise InvalidValue(
            f"algorithm.value_heads is 'shared' and {names} have weights of their own, as "
            "model.lora.rank is 0; expected per_policy, because the states of different weights "
            "have nothing in common that one head could read.",
            reason="conflict",
            key="algorithm.value_heads",
        )
    _check_roles(policies, roles)


CORRECTED = "algorithm.proximal=old algorithm.correction=truncate algorithm.correction_high=2"


def check_external(agent: AgentConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ValueError for `agent.external` with settings that do not fit it."""
    if not agent.external:
        return
    if rollout.ahead:
        raise InvalidValue(
            f"agent.external is true and rollout.ahead is {rollout.ahead}, but programs outside "
            "decide when rollouts run; set rollout.ahead=0.",
            reason="conflict",
            key="rollout.ahead",
        )
    for name, fix, in_group in (
        ("baseline", "batch_mean", GROUP_BASELINES),
        ("normalize", "batch_std", ("group_std",)),
    ):
        value = getattr(algorithm, name)
        if rollout.group_size == 1 and value in in_group:
            raise InvalidValue(
                f"rollout.group_size is 1 and algorithm.{name} is {value}, which compares the "
                f"rollouts of a group, so nothing would be learned; set algorithm.{name}={fix}.",
                reason="conflict",
                key=f"algorithm.{name}",
            )
    if algorithm.max_staleness == 0:
        raise InvalidValue(
            "agent.external is true and algorithm.max_staleness is 0, but rollouts run while the "
            "trainer works; set it to at least 1.",
            reason="out_of_range",
            key="algorithm.max_staleness",
        )
    _check_correction("agent.external is true", algorithm)


def check_ahead(rollout: RolloutConfig, algorithm: AlgorithmConfig) -> None:
    """Raise ValueError for `rollout.ahead` without what training on older samples needs."""
    if not rollout.ahead:
        return
    most = rollout.tasks_per_step * algorithm.max_staleness
    if rollout.ahead > most:
        raise InvalidValue(
            f"rollout.ahead is {rollout.ahead}; expected at most {most}, which is "
            f"rollout.tasks_per_step={rollout.tasks_per_step} times "
            f"algorithm.max_staleness={algorithm.max_staleness}, or samples would be dropped for "
            "their age.",
            reason="out_of_range",
            key="rollout.ahead",
        )
    _check_correction(f"rollout.ahead is {rollout.ahead}", algorithm)


def _check_correction(cause: str, algorithm: AlgorithmConfig) -> None:
    """Raise ValueError if the loss cannot use samples of older weights, which `cause` brings."""
    if algorithm.loss == "dpo":  # compares pairs, without a ratio to the behavior policy
        return
    if algorithm.correction == "none":
        raise InvalidValue(
            f"{cause}, which trains on samples of older weights, and algorithm.correction is "
            f"none; set {CORRECTED}.",
            reason="conflict",
            key="algorithm.correction",
        )
    if algorithm.loss in ("clip", "gspo") and algorithm.clip_dual == 0:
        raise InvalidValue(
            f"{cause} and algorithm.clip_dual is 0, so a negative advantage of an older sample "
            "may have a gradient of any size; set algorithm.clip_dual=3.",
            reason="conflict",
            key="algorithm.clip_dual",
        )


def _check_roles(policies: Mapping[str, PolicyConfig], roles: Mapping[str, RoleConfig]) -> None:
    """Raise ValueError for a role with an unknown policy, or a policy without a role.

    The second check applies only if some role names a policy. Otherwise agents reach policies by
    asking for them as their model. It catches a typo like `policies.writter.trains=false`, which
    makes a policy that is never called.
    """
    names = ", ".join(policies)
    for name, role in roles.items():
        if role.policy is not None and role.policy not in policies:
            raise InvalidValue(
                f"roles.{name}.policy is {role.policy!r}; expected "
                f"{f'one of {names}' if policies else 'none without a section policies'}.",
                reason="unknown",
                key=f"roles.{name}.policy",
            )
    named = {role.policy for role in roles.values() if role.policy is not None}
    for name in policies:
        if named and name not in named:
            raise InvalidValue(
                f"policies.{name} has no role, although roles name {', '.join(sorted(named))}; "
                "correct its name, or, if agents request it as their model, add "
                f"roles.{name}={{model: {name}, policy: {name}}}.",
                reason="unused",
                key=f"policies.{name}",
            )


def _check_initial(
    users: Sequence[str], policies: Mapping[str, PolicyConfig], model: ModelConfig
) -> None:
    """Raise ValueError if settings ask for the initial weights but policies start differently."""
    others = [name for name, policy in policies.items() if policy.base not in (None, model.name)]
    if users and others:
        raise InvalidValue(
            f"{users[0]} is 'initial' and policies.{others[0]} begins as "
            f"{policies[others[0]].base!r}; expected policies that all begin as {model.name!r}, or "
            "a policy with trains: false and the base that you want, named there.",
            reason="conflict",
            key=users[0],
        )


def _check_temperature(distill: DistillConfig, rollout: RolloutConfig) -> None:
    """Raise ValueError for a teacher's server that could not score the rollouts.

    Samples below `COLDEST` are trained on at temperature 1.
    """
    temperature = rollout.temperature
    if distill.teacher_url is None or temperature is None:
        return
    if temperature != 1.0 and temperature >= COLDEST:
        raise InvalidValue(
            f"rollout.temperature is {temperature:g} and distill.teacher_url is set, but servers "
            "score tokens at temperature 1 only, so the teacher would score nothing; set "
            "rollout.temperature=1, or load the teacher with distill.teacher=MODEL.",
            reason="conflict",
            key="rollout.temperature",
        )


@dataclass(frozen=True)
class Config(Section):
    """Settings of one run.

    `run_dir` holds all its outputs and all it needs to resume after a crash.
    """

    # Directory of the outputs, relative to the working directory even in a file. Started again with
    # the same run_dir, a run resumes from its newest checkpoint.
    run_dir: str = "runs/default"
    seed: Natural = 0  # of tasks, sampling and new weights
    num_steps: Natural = 20  # policy steps, after the warm-up
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    # Policies by name; empty: a single policy.
    policies: dict[str, PolicyConfig] = field(default_factory=dict)
    roles: dict[str, RoleConfig] = field(default_factory=dict)  # by name; the first match wins
    reward_rules: dict[str, RewardRule] = field(default_factory=dict)  # by name
    # Components of a rollout's reward, by name; empty: what the agent returned.
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    # Texts by name that the agent reads as llm.prompts["NAME"] (docs/howto/improve_prompts.md).
    prompts: dict[str, str] = field(default_factory=dict)
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
    mesh: MeshConfig = field(default_factory=MeshConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "serve", self.serve.with_sizes())
        object.__setattr__(self, "batch", self.batch.with_sizes(self.serve.max_len))
        if self.batch.row_len < self.serve.max_len:
            raise InvalidValue(
                f"batch.row_len is {self.batch.row_len}, below serve.max_len={self.serve.max_len}, "
                "so longer conversations could not be trained on; raise it, lower serve.max_len, "
                "or leave batch.row_len out.",
                reason="conflict",
                key="batch.row_len",
            )
        check_policies(self.policies, self.roles, self.model, self.algorithm)
        check_rewards(self.rewards, self.policies)
        _check_initial(self.initial_users, self.policies, self.model)
        check_ahead(self.rollout, self.algorithm)
        check_external(self.agent, self.rollout, self.algorithm)
        if self.warmup.num_steps and not (self.warmup.demonstrations or self.learn.run):
            raise InvalidValue(
                "warmup.demonstrations is None; expected FILE:FUNCTION when warmup.num_steps is "
                "above 0.",
                reason="missing",
                key="warmup.demonstrations",
            )
        if self.warmup.stop.every and self.agent.external:
            raise InvalidValue(
                f"warmup.stop.every is {self.warmup.stop.every} and agent.external is true, so "
                "nothing here runs the attempts of a probe; set warmup.stop.every=0.",
                reason="conflict",
                key="warmup.stop.every",
            )
        check_prompt_search(
            self.prompt_search,
            self.prompts,
            self.agent,
            self.rollout,
            self.policies,
            self.rewards,
        )
        if self.data.sampler == "difficulty" and self.agent.external:
            raise InvalidValue(
                "data.sampler is difficulty and agent.external is true, so programs outside choose "
                "the tasks; leave one of them out.",
                reason="conflict",
                key="data.sampler",
            )
        if self.rollout.ahead and self.data.sampler == "difficulty":
            raise InvalidValue(
                f"data.sampler is difficulty and rollout.ahead is {self.rollout.ahead}, so the "
                "tasks drawn would depend on how fast agents are; set rollout.ahead=0.",
                reason="conflict",
                key="data.sampler",
            )
        _check_temperature(self.distill, self.rollout)
        if self.distill.teacher == INITIAL_TEACHER:
            _check_initial(["distill.teacher"], self.policies, self.model)
        if self.distill.has_teacher and self.algorithm.loss in ("dpo", "raft"):
            name = next(n for n in ("teacher", "teacher_url", "hint") if getattr(self.distill, n))
            raise InvalidValue(
                f"distill.{name} is {getattr(self.distill, name)!r} and algorithm.loss is "
                f"{self.algorithm.loss}, which has advantages of its own; set it to clip.",
                reason="conflict",
                key=f"distill.{name}",
            )
        if self.policies and self.serve.orchestrator != "native":
            raise InvalidValue(
                f"serve.orchestrator is {self.serve.orchestrator!r}, which does not support "
                "several policies; set it to native.",
                reason="conflict",
                key="serve.orchestrator",
            )

    @property
    def is_judged(self) -> bool:
        """True if components other than what the agent returned give a rollout's reward."""
        return any(reward.weight and name != AGENT for name, reward in self.rewards.items())

    @property
    def initial_users(self) -> list[str]:
        """Return the settings that ask for the weights from the start of the run."""
        judges = {name: reward.judge for name, reward in self.rewards.items() if reward.judge}
        return (
            [
                f"roles.{name}.served_by"
                for name, role in self.roles.items()
                if role.served_by == INITIAL
            ]
            + [
                f"rewards.{name}.judge.served_by"
                for name, judge in judges.items()
                if judge.served_by == INITIAL
            ]
            + ["prompt_search.served_by"] * self._proposes_initially
        )

    @property
    def _proposes_initially(self) -> bool:
        """True if the initial weights propose prompts."""
        return self.prompt_search.every > 0 and self.prompt_search.served_by == INITIAL

    @property
    def asked_models(self) -> list[str]:
        """Who answers the judges, and the search for prompts if there is one."""
        judges = [reward.judge.served_by for reward in self.rewards.values() if reward.judge]
        return judges + [self.prompt_search.served_by] * bool(self.prompt_search.every)

    @property
    def teacher_model(self) -> str | None:
        """Model to load, which scores the sampled tokens.

        None: no teacher, one behind a URL, or the policy itself.
        """
        is_initial = self.distill.teacher == INITIAL_TEACHER
        return self.model.name if is_initial else self.distill.teacher

    @property
    def adapters(self) -> dict[str, int]:
        """Index of each policy's adapter; empty unless several policies share weights."""
        return policy_indices(self.policies) if self.model.lora.rank else {}

    @property
    def num_adapters(self) -> int | None:
        """Number of adapters stacked in each kernel, or None if adapters are not stacked."""
        return len(self.adapters) or None

    @property
    def weight_scopes(self) -> tuple[PolicyScope, ...]:
        """Scopes of the weights that are trained, served and saved separately, in order."""
        return (ALL,) if self.model.lora.rank else scopes_of(self.policies)

    @property
    def total_steps(self) -> int:
        return self.warmup.num_steps + self.num_steps
