"""Frozen records that views show. All text in them is safe to print."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_jax.rollouts.results.failures import Failure
from lightning_jax.types import Rollout

Kind = Literal["agent", "llm", "tool", "reward", "other"]


@dataclass(frozen=True)
class CallCredit:
    """Credit and advantage of one call, as the trainer computes them."""

    credit: float  # in reward units
    advantage: float
    note: str = ""  # reason if the call is not trained on, else ""


@dataclass(frozen=True)
class StepCredit:
    """Credit of the calls of one step by call id, and notes about all of it."""

    by_call: Mapping[str, CallCredit] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenView:
    """One sampled token."""

    text: str  # "" if the token is only the start of a character
    logprob: float | None  # nats, under the sampling policy; None: not recorded
    forced: bool = False  # True if a grammar left no choice
    version: int | None = None  # of the weights that sampled it


@dataclass(frozen=True)
class CallView:
    """One LLM call: the prompt that the policy or another server read, and the response.

    Tokens of another server are unknown. It may have counted them.
    """

    number: int  # 1, 2, ... in order of start
    num_prompt_tokens: int | None
    shared_text: str  # part of the prompt that an earlier call had read or written
    new_text: str  # the rest of the prompt
    tokens: tuple[TokenView, ...]
    tool_calls: tuple[tuple[str, str], ...]  # (name, arguments as JSON) in the response
    finish_reason: str
    mean_logprob: float | None  # nats per token
    versions: tuple[int, ...]  # distinct weights versions
    reward: float  # the call's own reward
    agent: str = ""  # the calling sub-agent, if known
    role: str = ""  # one of the config's `roles`; "" if none matches
    answered_by: str = ""  # policy name, if there are several, else ""
    trains: bool = True  # False if its role does not train or the call failed
    shares_with: int | None = None  # the earlier call that this prompt shares a prefix with
    num_shared_tokens: int = 0
    num_shared_messages: int = 0  # in place of tokens, for another server
    credit: CallCredit | None = None
    served_by: str = ""  # URL of the other server that answered
    text: str = ""  # its response
    num_counted_tokens: int | None = None  # of its response

    @property
    def response(self) -> str:
        return self.text or "".join(token.text for token in self.tokens)

    @property
    def num_response_tokens(self) -> int | None:
        return self.num_counted_tokens if self.served_by else len(self.tokens)

    @property
    def shared_size(self) -> str:
        """Length of `shared_text`, such as "12 tokens"."""
        if self.num_shared_messages:
            return f"{self.num_shared_messages} messages"
        return f"{self.num_shared_tokens} tokens"


@dataclass(frozen=True)
class SpanView:
    """One line of the waterfall and its details."""

    kind: Kind
    label: str
    depth: int  # 0 at the root
    start_s: float  # after the rollout's first span
    duration_s: float
    error: str | None
    call: CallView | None
    input: str
    output: str
    attributes: tuple[tuple[str, str], ...]  # those not shown above


@dataclass(frozen=True)
class RolloutView:
    """One rollout in time."""

    rollout: Rollout
    duration_s: float
    spans: tuple[SpanView, ...]  # parents before children, siblings by start time
    task: tuple[tuple[str, str], ...] = ()  # fields of the task, where they were recorded
    notes: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()  # of judges, by reward component

    @property
    def calls(self) -> tuple[CallView, ...]:
        return tuple(span.call for span in self.spans if span.call)


@dataclass(frozen=True)
class RolloutRow:
    """One line of the table."""

    rollout: Rollout
    num_calls: int
    duration_s: float
    task_name: str  # its id, and the start of its first text where that was recorded


@dataclass(frozen=True)
class RunView:
    """Rollouts of a run, newest step first, and the outcomes of all that match the query."""

    name: str
    rows: tuple[RolloutRow, ...]
    num_left_out: int
    counts: Mapping[str, int]  # by status
    failures: tuple[Failure, ...]
