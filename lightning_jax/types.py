"""The frozen records that travel through the system, and the letters that name array axes.

    Span  ->  Transition  ->  Trajectory  ->  Batch

Axis letters, used in every shape annotation: B rows, T tokens of a row, R targets of a row, V
vocabulary, E embedding, H query heads, K key/value heads, D head size, L layers, S slots, C cache
length, G groups, N rollouts of a group. Log-probabilities are in nats, of the token at that index.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

Leaf = Any  # an array, or what JAX puts in its place while it transforms a record
FinishReason = Literal["stop", "length", "error", "cancelled"]
# A rollout's life. "scored" and the two failures are final; only an infrastructure failure is
# retried.
RolloutStatus = Literal["queued", "running", "scored", "agent_failure", "infrastructure_failure"]
FINISHED = ("scored", "agent_failure")  # what measures the policy, and is not tried again
Message = dict[str, Any]  # an OpenAI chat message
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), best first
Advantage = float | tuple[float, ...]  # of all tokens of a call, or of each that is trained
MAX_TOP_LOGPROBS = 20
Task = dict[str, Any]  # whatever one line of a task file says; "id" is always there


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled. `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0 and
    the penalties 0 are off.

    A logit becomes logit + bias - frequency_penalty * count - presence_penalty * (count > 0), where
    count is how often the response holds the token already. What `grammar` forbids is never drawn.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn by the server
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0  # alternatives of each token to report
    grammar: str | None = None  # the response's language, in llguidance's format
    ignore_eos: bool = False  # go on past an end-of-turn token, as benchmarks do
    score_prompt: bool = False  # also give the log-probabilities of the prompt's own tokens

    def __post_init__(self) -> None:
        biases = [-100.0 <= bias <= 100.0 and token >= 0 for token, bias in self.logit_bias]
        for name, ok, expected in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 10.0, "between 0 and 10"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("min_p", 0.0 <= self.min_p < 1.0, "at least 0 and below 1"),
            ("stop", all(self.stop) and len(self.stop) <= 16, "at most 16 non-empty strings"),
            ("logit_bias", all(biases), "token ids of 0 or more with values between -100 and 100"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            (
                "top_logprobs",
                0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
                f"between 0 and {MAX_TOP_LOGPROBS}",
            ),
            ("grammar", self.grammar != "", "None (off) or a grammar's text"),
            (
                "ignore_eos",
                not self.ignore_eos or self.grammar is None,
                "False where a grammar says when the response is complete",
            ),
        ):
            if not ok:
                raise InvalidValue(
                    f"{name} is {getattr(self, name)!r}; expected {expected}.",
                    key=name,
                )


@dataclass(frozen=True)
class PromptScores:
    """Of each prompt token after the first, what the policy at temperature 1 gave it."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]  # the likeliest tokens in its place

    def __post_init__(self) -> None:
        _same_length(self, "logprobs", "top_logprobs")


@dataclass(frozen=True)
class Completion:
    """One finished response of the engine, token by token. Left out, `forced` is all False,
    `top_logprobs` empty for each token and `tempered_logprobs` what `behavior_logprobs` is.
    """

    token_ids: tuple[int, ...]  # as sampled, the end-of-turn token included
    text: str  # what the client sees: no special tokens, cut before a stop string
    behavior_logprobs: tuple[float, ...]  # of the policy at temperature 1, unfiltered
    sampling_logprobs: tuple[float, ...]  # of the tempered and filtered distribution drawn from
    policy_versions: tuple[int, ...]  # weights version that made each token
    finish_reason: FinishReason
    forced: tuple[bool, ...] = ()  # True where the grammar left the sampler no choice
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of the policy, as `behavior_logprobs`
    prompt_scores: PromptScores | None = None  # where asked for
    # Of the policy at the request's temperature (1 where greedy), unfiltered and unbiased.
    tempered_logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _fill(self, "forced", False, like="token_ids")
        _fill(self, "top_logprobs", (), like="token_ids")
        if not self.tempered_logprobs:
            object.__setattr__(self, "tempered_logprobs", self.behavior_logprobs)
        _same_length(
            self,
            "token_ids",
            "behavior_logprobs",
            "sampling_logprobs",
            "tempered_logprobs",
            "policy_versions",
            "forced",
            "top_logprobs",
        )


@dataclass(frozen=True)
class Span:
    """One traced event, as OpenTelemetry names its parts. Times are nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_span_id: str | None
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None  # why the traced call failed; None if it did not
    # Place in the order in which the store's spans began. None: the store gives it the next one, or
    # the span is of a store older than schema version 4.
    sequence: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Transition:
    """One LLM call of one agent. Ids come from the server that sampled them; text is never
    re-tokenized. Left out, `forced` is all False.

    It is learned from at its `temperature`, which `tempered_logprobs` are of; () at 1, where they
    are the behaviour log-probs.
    """

    call_id: str  # the span's id
    rollout_id: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason
    agent: str = ""  # the sub-agent that called, where known
    policy: str = "policy"  # the model name it asked for
    reward: float = 0.0  # what this call earned by itself, besides the rollout's reward
    forced: tuple[bool, ...] = ()  # True where a grammar left the sampler no choice
    role: str = ""  # the part it plays, one of the config's `roles`; "" if none fits
    trains: bool = True  # False: it is part of the environment
    answered_by: str = ""  # which of several policies sampled it; "": there is but one, or none did
    temperature: float = 1.0
    tempered_logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _fill(self, "forced", False, like="response_token_ids")
        _same_length(
            self,
            "response_token_ids",
            "behavior_logprobs",
            "sampling_logprobs",
            "policy_versions",
            "forced",
            *(["tempered_logprobs"] if self.temperature != 1.0 else []),
        )
        if not self.prompt_token_ids:
            raise InvalidValue(
                f"transition {self.call_id!r} has an empty prompt; expected at least 1 token.",
                reason="empty",
                key=self.call_id,
            )


@dataclass(frozen=True)
class Trajectory:
    """The calls of one scored rollout in order, and the reward of the whole."""

    rollout_id: str
    group_id: str  # rollouts of one task in one step share it
    transitions: tuple[Transition, ...]
    reward: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise InvalidValue(
                f"rollout {self.rollout_id!r} has reward {self.reward}; expected a finite number.",
                reason="not_finite",
                key=self.rollout_id,
            )


@dataclass(frozen=True)
class StateValues:
    """The states of one sequence that a critic learns from, at most one a trained token.

    State i is what the policy had read before response token `positions[i]`; 0 is the prompt.
    """

    positions: tuple[int, ...]
    values: tuple[float, ...]  # the critic's own, before the step's first update
    returns: tuple[float, ...]  # what they should have been
    weight: float = 1.0  # of each state in the loss

    def __post_init__(self) -> None:
        _same_length(self, "positions", "values", "returns")


@dataclass(frozen=True)
class TrainingSequence:
    """One response to learn from: a prompt, its response and what each of its tokens counts for.
    Left out, `loss_mask` is all True.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    advantage: Advantage
    weight: float  # of each token that is trained; see rl/weights.py
    loss_mask: tuple[bool, ...] = ()  # False: the token is context only
    states: StateValues | None = None  # for a critic
    # The place of the policy that learns, among several: that of the adapter it is read with, or of
    # the weights. None: there is one policy, or it is among its own.
    adapter: int | None = None
    pair: int | None = None  # of DPO: which of the step's pairs its rollout is in
    # The places of its rollout and its group in the step. None: it is of no rollout.
    rollout: int | None = None
    group: int | None = None
    # The policy that learns is the one whose logits are divided by it; the log-probs are of that.
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _fill(self, "loss_mask", True, like="response_token_ids")
        _same_length(self, "response_token_ids", "behavior_logprobs", "loss_mask")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBatch:
    """The states of a batch that a critic learns from, at most one a target and in its place."""

    nodes: Leaf  # int32 [B, R], index into the row of the last node that the state has read
    values: Leaf  # float32 [B, R], the critic's own before the step's first update
    returns: Leaf  # float32 [B, R]
    weights: Leaf  # float32 [B, R], 0 where there is no state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DistinctTargets:
    """What the LM head is read for: the different (node, token) pairs among a row's targets.

    Siblings that sampled the same token at the same place have a target each, of one such pair.
    """

    nodes: Leaf  # int32 [B, R], index into the row of the node that predicts
    ids: Leaf  # int32 [B, R], the token; -1 where there is no pair
    of_targets: Leaf  # int32 [B, R], for each target the place of its pair
    # float32 [B, R], by which a pair's logits are divided; pairs that differ in it are two.
    # None: all are 1.
    temperatures: Leaf = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """A forest of token tries in fixed shapes: B rows of T nodes, and R targets a row.

    Nodes lie in depth-first order. Node i sees node j iff `j <= i < ends[j]`; `positions` is the
    depth in its tree. Padding nodes see only themselves. A target is one sampled token: the model,
    having read the path to `target_nodes`, gave `target_ids`. Two transitions that sampled the same
    token at the same place share the node, never the target. The targets of one sequence lie side
    by side in one row, in order.
    """

    tokens: Leaf  # int32 [B, T]
    positions: Leaf  # int32 [B, T]
    ends: Leaf  # int32 [B, T]
    target_nodes: Leaf  # int32 [B, R], index into the row of the node that predicts
    target_ids: Leaf  # int32 [B, R]
    target_mask: Leaf  # bool [B, R], True = a sampled token
    target_calls: Leaf  # int32 [B, R], index of the sequence the target is of; -1 where masked
    behavior_logprobs: Leaf  # float32 [B, R]
    advantages: Leaf  # float32 [B, R]
    weights: Leaf  # float32 [B, R], 0 where masked
    # float32 [B, R], the trainer's own before the step's first update. None: this is the first.
    old_logprobs: Leaf = None
    states: Leaf = None  # StateBatch, None without a critic
    adapters: Leaf = None  # int32 [B], which one each row is read with; None: there is but one
    distinct: Leaf = None  # DistinctTargets; None: the LM head is read for each target by itself


@dataclass(frozen=True)
class LLM:
    """All that an OpenAI client needs."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True)
class Rollout:
    """One execution of an agent on a task, as the store keeps it."""

    rollout_id: str
    task_id: str
    group_id: str
    phase: str  # "train" or "eval"
    step: int  # trainer step at which it was asked for
    index: int  # 0 <= index < rollouts of the group
    attempt: int  # 1 for the first try
    status: RolloutStatus
    reward: float | None = None
    reason: str | None = None  # a short code: why it failed
    detail: str | None = None  # one sentence for people
    metrics: dict[str, float] = field(default_factory=dict)  # what else the agent measured
    superseded: bool = False  # settings changed since, so that it is another run's


class Coded(Exception):
    """An error that says to programs what its message says to people.

    `reason` is a short code in snake_case ("missing", "unknown_key"); `key` names the setting,
    field, path or id that is concerned. Callers and tests read these, never the message.
    """

    def __init__(self, message: str = "", *, reason: str = "invalid", key: str | None = None):
        super().__init__(message)
        self.reason = reason
        self.key = key


class UserError(Coded):
    """A fault that the person at the keyboard can mend. The message is one sentence: the fact and
    the fix.
    """


class InvalidValue(Coded, ValueError):
    """A value from a caller, a file or a request that cannot be used."""


def _fill(record: Any, name: str, value: Any, *, like: str) -> None:
    """Sets a per-token field that was left out to `value` for each item of the field `like`."""
    if not getattr(record, name):
        object.__setattr__(record, name, (value,) * len(getattr(record, like)))


def _same_length(record: Any, *names: str) -> None:
    lengths = {name: len(getattr(record, name)) for name in names}
    if len(set(lengths.values())) != 1:
        raise InvalidValue(
            f"{type(record).__name__} fields differ in length: {lengths}; expected equal.",
            reason="mismatch",
        )
