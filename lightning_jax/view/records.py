"""What a view shows, as frozen records. All text in them may be printed as it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lightning_jax.rollout_metrics import Failure
from lightning_jax.types import Rollout

Kind = Literal["agent", "llm", "tool", "reward", "other"]


@dataclass(frozen=True)
class CallCredit:
    """What the trainer holds one call responsible for."""

    credit: float  # in reward units
    advantage: float
    note: str = ""  # why the call is not trained all the same; "" if it is


@dataclass(frozen=True)
class StepCredit:
    """The credit of the calls of one step, by call id, and what has to be said of all of it."""

    by_call: Mapping[str, CallCredit] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenView:
    """One sampled token."""

    text: str  # "" for one that only together with a later one makes a character
    logprob: float | None  # nats, under the policy that sampled; None: not recorded
    forced: bool = False  # a grammar left no choice


@dataclass(frozen=True)
class CallView:
    """One LLM call: what the policy read and what it answered."""

    number: int  # 1, 2, ... in order of start
    num_prompt_tokens: int
    shared_text: str  # of the prompt, what an earlier call had read or written
    new_text: str  # of the prompt, after what it shares
    tokens: tuple[TokenView, ...]
    tool_calls: tuple[tuple[str, str], ...]  # (name, arguments as JSON) in the response
    finish_reason: str
    mean_logprob: float | None  # nats a token
    versions: tuple[int, ...]  # of the weights, each once
    reward: float  # what the call earned by itself
    agent: str = ""  # the sub-agent that called, where known
    role: str = ""  # one of the config's `roles`; "" if none fits
    answered_by: str = ""  # which of several policies; "": the only one, or none
    trains: bool = True  # False: its role does not, or the call failed
    shares_with: int | None = None  # the earlier call whose tokens this prompt begins with
    num_shared_tokens: int = 0
    credit: CallCredit | None = None

    @property
    def response(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True)
class SpanView:
    """One line of the waterfall and what belongs to it."""

    kind: Kind
    label: str
    depth: int  # 0: at the root
    start_s: float  # after the rollout's first span
    duration_s: float
    error: str | None
    call: CallView | None
    input: str
    output: str
    attributes: tuple[tuple[str, str], ...]  # the rest of them


@dataclass(frozen=True)
class RolloutView:
    """One rollout in time."""

    rollout: Rollout
    duration_s: float
    spans: tuple[SpanView, ...]  # parents before children, siblings by start
    notes: tuple[str, ...] = ()

    @property
    def calls(self) -> tuple[CallView, ...]:
        return tuple(span.call for span in self.spans if span.call)


@dataclass(frozen=True)
class RolloutRow:
    """One line of the table."""

    rollout: Rollout
    num_calls: int
    duration_s: float


@dataclass(frozen=True)
class RunView:
    """A run's rollouts, newest step first, and how all that were asked for ended."""

    name: str
    rows: tuple[RolloutRow, ...]
    num_left_out: int
    counts: Mapping[str, int]  # by status
    failures: tuple[Failure, ...]
