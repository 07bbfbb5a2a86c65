"""Frozen records that travel through the system, and the letters that name array axes.

    Span  ->  Transition  ->  Trajectory  ->  Batch

Axis letters, used in every shape annotation: B rows, T tokens of a row, R targets of a row, V
vocabulary, E embedding, H query heads, K key/value heads, D head size, L layers, S slots, C cache
length, G groups, N rollouts of a group. Log-probabilities are in nats, for the token at that index.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_jax.errors import InvalidValue

Leaf = Any  # an array, or JAX's placeholder while it transforms a record
FinishReason = Literal["stop", "length", "error", "cancelled"]

# All but "queued" and "running" are final. Only an infrastructure failure is retried. A rollout is
# "stopped" if its run ended first; a resumed run samples it again with the same seed.
RolloutStatus = Literal[
    "queued", "running", "scored", "agent_failure", "infrastructure_failure", "stopped"
]
FINISHED = ("scored", "agent_failure")  # statuses that measure the policy and are not retried
# By convention, the reward of a task that is fully right, less a margin for rounding.
FULL_REWARD = 1.0 - 1e-6
Message = dict[str, Any]  # an OpenAI chat message
Advantage = float | tuple[float, ...]  # of a whole call, or of each trained token
Task = dict[str, Any]  # one line of a task file; always has "id"


@dataclass(frozen=True)
class Span:
    """Traced event, with OpenTelemetry's field names. Times are in nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None  # reason of a failed call, or None
    # Order of the span's start among the store's spans. None: the store assigns the next number, or
    # the store is older than schema version 4.
    sequence: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Transition:
    """LLM call of one agent.

    Ids come from the server that sampled them; text is never re-tokenized. By default `forced` is
    all False. Training uses the policy at the call's `temperature`. `tempered_logprobs` are at that
    temperature, or () at temperature 1, where they equal the behavior log-probabilities.
    """

    call_id: str  # id of the span
    rollout_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason
    agent: str = ""  # name of the calling sub-agent, if known
    policy: str = "policy"  # requested model name
    reward: float = 0.0  # reward of this call alone, in addition to the rollout's reward
    forced: tuple[bool, ...] = ()  # True if a grammar left no choice, or hardly any
    role: str = ""  # name in the config's `roles`, or "" if none matches
    trains: bool = True  # False: the call is part of the environment
    answered_by: str = ""  # policy that sampled it; "": the only policy, or none
    temperature: float = 1.0
    tempered_logprobs: tuple[float, ...] = ()
    max_tokens: int | None = None  # limit of the response; None: not recorded
    # Mask of the response, in llguidance's format, if nothing else but the temperature parted its
    # samples from the policy. None: no grammar, or not recorded.
    grammar: str | None = None

    def __post_init__(self) -> None:
        fill_default(self, "forced", False, like="response_token_ids")
        check_same_length(
            self,
            "response_token_ids",
            "behavior_logprobs",
            "sampling_logprobs",
            "policy_versions",
            "forced",
            *(["tempered_logprobs"] if self.temperature != 1.0 else []),
        )
        if not self.prompt_token_ids:
            raise InvalidValue.empty(
                self.call_id,
                f"transition {self.call_id!r} has an empty prompt; expected at least 1 token.",
            )


@dataclass(frozen=True)
class Trajectory:
    """Calls of one scored rollout, in order, and the rollout's reward."""

    rollout_id: str
    group_id: str  # shared by the rollouts of one task in one step
    transitions: tuple[Transition, ...]
    reward: float
    is_failed: bool = False  # by its agent, so that the reward is not one that anybody gave

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise InvalidValue(
                f"rollout {self.rollout_id!r} has reward {self.reward}; expected a finite number.",
                reason="not_finite",
                key=self.rollout_id,
            )


class Prompts(dict[str, str]):
    """Prompts by name, as the settings or the search for better ones have them."""

    def __missing__(self, name: str) -> str:
        names = ", ".join(sorted(self)) or "none"
        raise KeyError(f"no prompt {name!r} in the settings; add prompts.{name} (found: {names})")


@dataclass(frozen=True)
class LLM:
    """Connection settings for an OpenAI client, and the prompts that the run may improve.

    `calls_url` and `calls_key` answer the same calls, but rewards and spans that come with them do
    not count. Give these to programs that the policy steers.
    """

    base_url: str
    api_key: str
    model: str
    prompts: Mapping[str, str] = field(default_factory=Prompts, hash=False)
    calls_url: str = ""  # as `calls_key`, "" for a server without rollouts
    calls_key: str = ""
    is_judged: bool = False  # components of `rewards` other than the agent's own give the reward

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", Prompts(self.prompts))

    def calls_only(self) -> "LLM":
        """Return the settings with which only calls count."""
        return replace(
            self,
            base_url=self.calls_url or self.base_url,
            api_key=self.calls_key or self.api_key,
        )


# Uses of rollouts: training, greedy evaluation, sampled evaluation, a probe of the warm-up, and a
# search for prompts. Only the first is trained on.
PHASES = ("train", "eval", "sampled", "probe", "prompt")


@dataclass(frozen=True)
class Rollout:
    """One execution of an agent on a task, as stored."""

    rollout_id: str
    task_id: str
    group_id: str
    phase: str  # one of PHASES
    step: int  # trainer step that requested it
    index: int  # index in the group, from 0
    attempt: int  # 1 for the first attempt
    status: RolloutStatus
    reward: float | None = None
    reason: str | None = None  # short code of the failure, or of what stopped it
    detail: str | None = None  # one sentence for people
    metrics: dict[str, float] = field(default_factory=dict)  # other numbers that the agent returned
    superseded: bool = False  # True if settings changed since, so that it is not reused
    # Rewards by component of the config's `rewards`; empty: not scored by them.
    components: dict[str, float] = field(default_factory=dict)
    worker: str | None = None  # that ran the agent; None: the trainer's process, or a program's


def fill_default(record: Any, name: str, value: Any, *, like: str) -> None:
    """Set an omitted per-token field to `value` for each item of the field `like`."""
    if not getattr(record, name):
        object.__setattr__(record, name, (value,) * len(getattr(record, like)))


def check_same_length(record: Any, *names: str) -> None:
    lengths = {name: len(getattr(record, name)) for name in names}
    if len(set(lengths.values())) != 1:
        raise InvalidValue(
            f"{type(record).__name__} fields differ in length: {lengths}; expected equal.",
            reason="mismatch",
        )


Metrics = dict[str, float]


def keep_calls(trajectory: Trajectory, keep: Callable[[Transition], bool]) -> Trajectory:
    """Return the trajectory with only the kept calls; other calls are part of the environment.

    The reward of a removed call goes to the kept call before it, because it is a consequence of
    that call. Rewards before the first kept call go to the first. Without a kept call they are
    lost with the rollout.
    """
    kept: list[Transition] = []
    early = 0.0
    for call in trajectory.transitions:
        if keep(call):
            kept.append(replace(call, reward=call.reward + early) if early else call)
            early = 0.0
        elif kept and call.reward:
            kept[-1] = replace(kept[-1], reward=kept[-1].reward + call.reward)
        else:
            early += call.reward
    return replace(trajectory, transitions=tuple(kept))
