"""Frozen records that travel through the system, and the letters that name array axes.

    Span  ->  Transition  ->  Trajectory  ->  Batch

Axis letters, used in every shape annotation: B rows, T tokens of a row, R targets of a row, V
vocabulary, E embedding, H query heads, K key/value heads, D head size, L layers, S slots, C cache
length, G groups, N rollouts of a group. Log-probabilities are in nats, for the token at that index.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

Leaf = Any  # an array, or JAX's placeholder while it transforms a record
FinishReason = Literal["stop", "length", "error", "cancelled"]
# "scored" and the two failures are final. Only an infrastructure failure is retried.
RolloutStatus = Literal["queued", "running", "scored", "agent_failure", "infrastructure_failure"]
FINISHED = ("scored", "agent_failure")  # statuses that measure the policy and are not retried
Message = dict[str, Any]  # an OpenAI chat message
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), best first
Advantage = float | tuple[float, ...]  # of a whole call, or of each trained token
MAX_TOP_LOGPROBS = 20
Task = dict[str, Any]  # one line of a task file; always has "id"


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one response.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and penalties of 0 are off. A logit
    becomes logit + bias - frequency_penalty * count - presence_penalty * (count > 0). Here count is
    the number of times the response already contains the token. Tokens that `grammar` forbids are
    never sampled.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None  # None: chosen by the server
    stop: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0  # number of alternatives to report per token
    grammar: str | None = None  # grammar of the response, in llguidance's format
    ignore_eos: bool = False  # continue after an end-of-turn token, for benchmarks
    score_prompt: bool = False  # also return log-probabilities of the prompt's tokens

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
                    reason="out_of_range",
                    key=name,
                )


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of the policy at temperature 1 for each prompt token after the first."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]  # likeliest tokens at each position

    def __post_init__(self) -> None:
        _same_length(self, "logprobs", "top_logprobs")


@dataclass(frozen=True)
class Completion:
    """Finished response of the engine, token by token.

    By default `forced` is all False, `top_logprobs` is empty for each token, and
    `tempered_logprobs` equals `behavior_logprobs`.
    """

    token_ids: tuple[int, ...]  # as sampled, including the end-of-turn token
    text: str  # text for the client: no special tokens, cut before a stop string
    behavior_logprobs: tuple[float, ...]  # of the policy at temperature 1, unfiltered
    sampling_logprobs: tuple[float, ...]  # of the sampled distribution, tempered and filtered
    policy_versions: tuple[int, ...]  # weights version that sampled each token
    finish_reason: FinishReason
    forced: tuple[bool, ...] = ()  # True if the grammar allowed only this token
    top_logprobs: tuple[TopLogprobs, ...] = ()  # of the policy, like `behavior_logprobs`
    prompt_scores: PromptScores | None = None  # if requested
    # Of the policy at the request's temperature (1 if greedy), unfiltered and unbiased.
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
    forced: tuple[bool, ...] = ()  # True if a grammar allowed only this token
    role: str = ""  # name in the config's `roles`, or "" if none matches
    trains: bool = True  # False: the call is part of the environment
    answered_by: str = ""  # policy that sampled it; "": the only policy, or none
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
    """Calls of one scored rollout, in order, and the rollout's reward."""

    rollout_id: str
    group_id: str  # shared by the rollouts of one task in one step
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
    """States of one sequence that a critic learns from, at most one per trained token.

    State i is the context before response token `positions[i]`; position 0 is the prompt.
    """

    positions: tuple[int, ...]
    values: tuple[float, ...]  # of the critic, before the step's first update
    returns: tuple[float, ...]  # targets of the values
    weight: float = 1.0  # of each state in the loss

    def __post_init__(self) -> None:
        _same_length(self, "positions", "values", "returns")


@dataclass(frozen=True)
class TrainingSequence:
    """Prompt and response to learn from, with the advantage and weight of the response's tokens.

    By default `loss_mask` is all True.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    advantage: Advantage
    weight: float  # of each trained token; see rl/weights.py
    loss_mask: tuple[bool, ...] = ()  # False: the token is context only
    states: StateValues | None = None  # for a critic
    # Index of the policy that learns, and so of its adapter or weights. None: a single policy, or
    # sequences of one policy only.
    adapter: int | None = None
    pair: int | None = None  # for DPO: index of the rollout's pair in the step
    # Indices of the rollout and its group in the step. None: not from a rollout.
    rollout: int | None = None
    group: int | None = None
    # Divisor of the logits of the policy that learns. Log-probabilities are at this temperature.
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _fill(self, "loss_mask", True, like="response_token_ids")
        _same_length(self, "response_token_ids", "behavior_logprobs", "loss_mask")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBatch:
    """States of a batch that a critic learns from, at most one per target and at its index."""

    nodes: Leaf  # int32 [B, R], row index of the last node in the state's context
    values: Leaf  # float32 [B, R], of the critic before the step's first update
    returns: Leaf  # float32 [B, R]
    weights: Leaf  # float32 [B, R], 0 where there is no state


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DistinctTargets:
    """Distinct (node, token) pairs among a row's targets, for which the LM head is evaluated.

    Siblings that sampled the same token after the same path have one target each, but share the
    pair.
    """

    nodes: Leaf  # int32 [B, R], row index of the node that predicts
    ids: Leaf  # int32 [B, R], the token; -1 if there is no pair
    of_targets: Leaf  # int32 [B, R], index of each target's pair
    # float32 [B, R], divisor of a pair's logits. Pairs with different divisors are distinct.
    # None: all are 1.
    temperatures: Leaf = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Forest of token tries in fixed shapes: B rows of T nodes, and R targets per row.

    Nodes are in depth-first order. Node i sees node j iff `j <= i < ends[j]`. `positions` is the
    depth in the tree. Padding nodes see only themselves.

    A target is one sampled token: after the path to `target_nodes`, the model sampled `target_ids`.
    Two transitions that sampled the same token after the same path share the node, never the
    target. The targets of one sequence are adjacent in one row, in order.
    """

    tokens: Leaf  # int32 [B, T]
    positions: Leaf  # int32 [B, T]
    ends: Leaf  # int32 [B, T]
    target_nodes: Leaf  # int32 [B, R], row index of the node that predicts
    target_ids: Leaf  # int32 [B, R]
    target_mask: Leaf  # bool [B, R], True = a sampled token
    target_calls: Leaf  # int32 [B, R], index of the target's sequence; -1 where masked
    behavior_logprobs: Leaf  # float32 [B, R]
    advantages: Leaf  # float32 [B, R]
    weights: Leaf  # float32 [B, R], 0 where masked
    # float32 [B, R], of the trainer before the step's first update. None: this is the first.
    old_logprobs: Leaf = None
    states: Leaf = None  # StateBatch, or None without a critic
    adapters: Leaf = None  # int32 [B], adapter index of each row; None: at most one adapter
    distinct: Leaf = None  # DistinctTargets; None: evaluate the LM head per target


@dataclass(frozen=True)
class LLM:
    """Connection settings for an OpenAI client."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True)
class Rollout:
    """One execution of an agent on a task, as stored."""

    rollout_id: str
    task_id: str
    group_id: str
    phase: str  # "train" or "eval"
    step: int  # trainer step that requested it
    index: int  # index in the group, from 0
    attempt: int  # 1 for the first attempt
    status: RolloutStatus
    reward: float | None = None
    reason: str | None = None  # short code of the failure
    detail: str | None = None  # one sentence for people
    metrics: dict[str, float] = field(default_factory=dict)  # other numbers that the agent returned
    superseded: bool = False  # True if settings changed since, so that it is not reused


class Coded(Exception):
    """Error with a code for programs and a message for people.

    `reason` is a short code in snake_case ("missing", "unknown_key"). `key` names the setting,
    field, path or id in question. Callers and tests read these fields, never the message.
    """

    def __init__(self, message: str = "", *, reason: str = "invalid", key: str | None = None):
        super().__init__(message)
        self.reason = reason
        self.key = key


class UserError(Coded):
    """Error that the user can fix.

    The message is one sentence: the fact and the fix.
    """


class InvalidValue(Coded, ValueError):
    """Unusable value from a caller, a file or a request."""


def _fill(record: Any, name: str, value: Any, *, like: str) -> None:
    """Set an omitted per-token field to `value` for each item of the field `like`."""
    if not getattr(record, name):
        object.__setattr__(record, name, (value,) * len(getattr(record, like)))


def _same_length(record: Any, *names: str) -> None:
    lengths = {name: len(getattr(record, name)) for name in names}
    if len(set(lengths.values())) != 1:
        raise InvalidValue(
            f"{type(record).__name__} fields differ in length: {lengths}; expected equal.",
            reason="mismatch",
        )
