"""Frozen records that views show, and their JSON. All text in them is safe to print."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

from lightning_jax.rollouts.results.failures import Failure
from lightning_jax.system.text import printable
from lightning_jax.types import Rollout

Json = dict[str, Any]
Kind = Literal["agent", "llm", "tool", "reward", "other"]

MAX_CHARS = 20_000  # of one text in JSON
MAX_NAME_CHARS = 300  # of ids, reasons and names of numbers
MAX_TOKEN_CHARS = 500
MAX_RESPONSE_CHARS = 100_000  # of all tokens of a response
MAX_TOKENS = 5_000  # of a response
MAX_SPANS = 500  # of a rollout
CHARS = {  # of fields with another limit
    **dict.fromkeys(("task_id", "reason", "worker", "name", "group_id"), MAX_NAME_CHARS),
    **dict.fromkeys(("label", "attributes"), 500),
    "shared_text": 2000,
}


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

    json_fields: ClassVar = (
        *("number", "facts", "shares_with", "shared_size", "shared_text", "new_text", "text"),
        *("tokens", "num_tokens", "tool_calls", "reward", "credit"),
    )

    number: int  # 1, 2, ... in order of start
    num_prompt_tokens: int | None
    shared_text: str  # part of the prompt that an earlier call had read or written
    new_text: str  # the rest of the prompt
    tokens: tuple[TokenView, ...] = ()
    tool_calls: tuple[tuple[str, str], ...] = ()  # (name, arguments as JSON) in the response
    finish_reason: str = ""
    mean_logprob: float | None = None  # nats per token
    versions: tuple[int, ...] = ()  # distinct weights versions
    reward: float = 0.0  # the call's own reward
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
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_response_tokens(self) -> int | None:
        return self.num_counted_tokens if self.served_by else len(self.tokens)

    @property
    def shared_size(self) -> str:
        """Length of `shared_text`, such as "12 tokens"."""
        if self.num_shared_messages:
            return f"{self.num_shared_messages} messages"
        return f"{self.num_shared_tokens} tokens"

    @property
    def facts(self) -> list[str]:
        """Numbers of the call, each as a short phrase."""
        facts = [f"by {self.served_by}"] if self.served_by else []
        if self.num_prompt_tokens is not None:
            facts.append(f"{self.num_prompt_tokens} + {self.num_response_tokens or 0} tokens")
        if self.finish_reason:
            facts.append(f"finish {self.finish_reason}")
        if self.mean_logprob is not None:
            facts.append(f"log-prob {self.mean_logprob:.3f} a token")
        if self.versions:
            facts.append(f"weights {', '.join(map(str, self.versions))}")
        if self.role:
            facts.append(f"role {self.role}" + ("" if self.trains else ", not trained"))
        if self.answered_by:
            facts.append(f"policy {self.answered_by}")
        if self.reward:
            facts.append(f"own reward {self.reward:+g}")
        if self.credit:
            facts.append(f"credit {self.credit.credit:.4g}")
            facts.append(f"advantage {self.credit.advantage:+.4g}")
            facts += [self.credit.note] if self.credit.note else []
        return facts


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

    json_fields: ClassVar = (
        *("rollout", "task_name", "task", "reasons", "notes", "duration_s", "spans"),
        *("num_spans", "num_calls"),
    )

    rollout: Rollout
    duration_s: float
    spans: tuple[SpanView, ...]  # parents before children, siblings by start time
    task: tuple[tuple[str, str], ...] = ()  # fields of the task, where they were recorded
    notes: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()  # of judges, by reward component
    task_name: str = ""  # its id, and the start of its text where that was recorded

    @property
    def calls(self) -> tuple[CallView, ...]:
        return tuple(span.call for span in self.spans if span.call)

    @property
    def num_spans(self) -> int:
        return len(self.spans)

    @property
    def num_calls(self) -> int:
        return len(self.calls)


@dataclass(frozen=True)
class RolloutRow:
    """One line of a table of rollouts. A number that was not counted is None."""

    rollout: Rollout
    task_name: str
    seconds: float | None
    num_calls: int | None = None


@dataclass(frozen=True)
class RunView:
    """Rollouts of a run, newest step first, and the outcomes of all that match the query."""

    name: str
    rows: tuple[RolloutRow, ...]
    num_left_out: int
    counts: Mapping[str, int]  # by status
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class AttemptView:
    """One attempt at a task: its reward, and why there is none."""

    rollout_id: str
    status: str
    reward: float | None
    reason: str | None
    superseded: bool
    key: str = ""  # of its run, beside attempts of other runs


def attempt_view(rollout: Rollout, key: str = "") -> AttemptView:
    """Return a rollout as one of several attempts."""
    numbers = rollout.status, rollout.reward, rollout.reason, rollout.superseded
    return AttemptView(rollout.rollout_id, *numbers, key)


@dataclass(frozen=True)
class Verdict:
    """Answer to whether something is better: 1, -1, or 0 if that is not clear."""

    sign: int
    text: str


@dataclass(frozen=True)
class Column:
    name: str
    is_number: bool = False
    can_drop: bool = False  # in a narrow terminal


@dataclass(frozen=True)
class Grid:
    """Table with a title above and notes below. Its text is safe to print."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def columns(
    *names: str, numbers: Collection[str] = (), can_drop: Collection[str] = ()
) -> tuple[Column, ...]:
    """Return columns of these names. Those in `numbers` are aligned to the right."""
    return tuple(Column(name, name in numbers, name in can_drop) for name in names)


# Text and JSON


def as_json(value: Any, max_chars: int = MAX_CHARS) -> Any:
    """Return a record as values for JSON. Texts are safe to print, long ones and lists are cut.

    Fields of a record's rollout stand beside its own. `json_fields` names fields and properties; by
    default it is all fields.
    """
    match value:
        case str():
            return printable(cut(value, max_chars))
        case Mapping():
            return {
                as_json(name, MAX_NAME_CHARS): as_json(item, max_chars)
                for name, item in value.items()
            }
        case list() | tuple():
            return [as_json(item, max_chars) for item in value]
    if not is_dataclass(value):
        return value
    record: Json = {}
    for name in getattr(value, "json_fields", None) or [column.name for column in fields(value)]:
        item = getattr(value, name)
        if name == "tokens":
            record[name] = _first_tokens(item)
        elif name == "rollout":
            record |= as_json(item)
        else:
            item = item[:MAX_SPANS] if name == "spans" else item
            record[name] = as_json(item, CHARS.get(name, max_chars))
    return record


def _first_tokens(tokens: tuple[TokenView, ...]) -> list[Any]:
    """Return the first tokens of a response as [text, log-prob, version, forced]."""
    num_chars, first = 0, []
    for token in tokens[:MAX_TOKENS]:
        text = cut(token.text, MAX_TOKEN_CHARS)
        num_chars += len(text)
        if num_chars > MAX_RESPONSE_CHARS:
            break
        first.append([text, token.logprob, token.version, token.forced])
    return first


def as_text(value: Any) -> str:
    """Format an attribute's value for people: text unchanged, anything else as JSON."""
    if isinstance(value, str):
        return printable(value)
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def common_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the number of items, or characters, at the start of both."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def cut(text: str, limit: int) -> str:
    """Shorten a long text to its start and end, with the number of characters left out.

    `limit` is in characters, and 0 means no limit.
    """
    left_out = len(text) - limit
    if limit == 0 or left_out <= 0:
        return text
    tail = limit // 4
    end = text[len(text) - tail :]
    return f"{text[: limit - tail]}\n[... {left_out:,} characters omitted ...]\n{end}"
