"""Settings of roles, of rewards by rule and of the export of traces."""

import re
from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from lightning_jax.models.policies import INITIAL
from lightning_jax.settings.schema import (
    PLAIN_URL,
    Finite,
    FinitePositive,
    NonNegative,
    Rule,
    Section,
    expect,
    is_plain_url,
    section,
)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


Pattern = Annotated[str, expect(_compiles, "a regular expression")]
Fact = Literal[
    "tool_error",
    "tool_timeout",
    "tool_output",
    "observation",
    "response",
    "malformed_call",
    "cut_short",
]
TEXTS = ("tool_output", "observation", "response")  # facts that always have a text
SERVED_BY = ("policy", INITIAL)
RESERVED = ("policy", INITIAL, "latest")  # model names with another meaning for the gateway


@section
class RoleConfig(Section):
    """Role that some calls of a run play.

    A call gets the first role whose patterns all match. A call without a role trains.
    """

    agent: str | None = None
    """Pattern for the sub-agent's name, with * and ? as in file names."""
    model: str | None = None
    """Pattern for the requested model name, with * and ?"""
    system: Pattern | None = None
    """Regular expression to find in the system prompt."""
    message: Pattern | None = None
    """Regular expression to find in the last message, if it is the user's; results of tools are no
    part of it."""
    trains: bool = True
    """False: the call is part of the environment."""
    policy: str | None = None
    """Policy that answers and learns; None: the one the call asks for."""
    served_by: str = "policy"
    """policy: current weights; initial: weights from the start of the run; or the URL of an
    OpenAI-compatible server, whose calls cannot train."""
    served_model: str | None = None
    """For a URL: model to request; None: as the agent asks."""
    api_key: str | None = field(default=None, repr=False)
    """For a URL; sent only to its host."""
    timeout_s: FinitePositive = 600.0
    """For a URL: limit of a call outside rollouts, which have their own."""
    max_response_mib: FinitePositive = 32.0
    """For a URL: a longer response fails the call."""

    def rules(self) -> Iterator[Rule]:
        has_pattern = any((self.agent, self.model, self.system, self.message))
        yield "agent", has_pattern, "expected a pattern for agent, model, system or message"
        is_known = self.served_by in SERVED_BY or is_plain_url(self.served_by)
        yield "served_by", is_known, f"expected {', '.join(SERVED_BY)} or {PLAIN_URL}"
        is_policy = self.served_by == "policy"
        why = f"because served_by is {self.served_by}"
        expected = f"expected none, {why} and no policy of the run answers"
        yield "policy", self.policy is None or is_policy, expected
        expected = f"expected false, {why} and only a policy's responses are trained"
        yield "trains", not self.trains or is_policy, expected

    @property
    def is_external(self) -> bool:
        """True if another server answers the calls."""
        return self.served_by not in SERVED_BY

    @property
    def fits_all(self) -> bool:
        """True if every call matches."""
        return {self.agent, self.model} <= {None, "*"} and self.system is self.message is None


@section
class RewardRule(Section):
    """Reward that a call earns each time it causes `fact`."""

    fact: Fact
    """What a call causes, see docs/traces.md."""
    reward: Finite
    """Added to the call's reward, in reward units."""
    pattern: Pattern | None = None
    """Regular expression to find in the fact's text; None: any."""
    agent: str | None = None
    """Pattern for the sub-agent's name, with * and ?; None: any."""

    def rules(self) -> Iterator[Rule]:
        has_pattern = self.pattern is not None or self.fact not in TEXTS
        yield "pattern", has_pattern, f"expected a regular expression, as the fact is {self.fact}"


FROM_ENVIRONMENT = "env"  # of `traces.export`
# Variables that name a collector of spans, the one that counts first.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
Collector = Annotated[
    str,
    expect(lambda url: url == FROM_ENVIRONMENT or is_plain_url(url), f"env, or {PLAIN_URL}"),
]
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+=[^\r\n]*")
Headers = Annotated[
    tuple[str, ...],
    expect(lambda pairs: all(map(_HEADER.fullmatch, pairs)), "headers as NAME=value"),
]


@section
class TracesConfig(Section):
    """Export of each finished rollout as a trace. docs/howto/export_traces.md shows backends.

    It needs the extra `otlp`. A collector that is slow or down never holds up a run.
    """

    export: Collector | None = None
    """URL of an OTLP collector that takes HTTP, such as http://127.0.0.1:6006; /v1/traces is added
    where it is missing. env: the one that OTEL_EXPORTER_OTLP_ENDPOINT or its form for traces names.
    Its other variables count in any case. None: nothing is sent."""
    headers: Headers = field(default=(), repr=False)
    """For the collector, as NAME=value, such as authorization=Bearer KEY."""
    content: bool = True
    """false: send no prompts, responses, tasks, and no texts of agents or tools."""
    close_s: NonNegative = 10.0
    """Wait at the end of a run for what is not sent yet."""
