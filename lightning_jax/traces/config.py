"""Settings of roles and of rewards by rule."""

import re
from dataclasses import dataclass, field
from typing import Literal

from lightning_jax.schema import Finite, FinitePositive, Section, is_plain_url, require

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
SERVED_BY = ("policy", "initial")
RESERVED = ("policy", "initial", "latest")  # model names with another meaning for the gateway


@dataclass(frozen=True)
class RoleConfig(Section):
    """Role that some calls of a run play.

    A call gets the first role whose patterns all match. A call without a role trains.
    """

    agent: str | None = None  # pattern for the sub-agent's name, with * and ? as in file names
    model: str | None = None  # pattern for the requested model name, with * and ?
    system: str | None = None  # regular expression to find in the system prompt
    trains: bool = True  # False: the call is part of the environment
    policy: str | None = None  # policy that answers and learns; None: the one the call asks for
    # policy: current weights; initial: weights from the start of the run; or the URL of an
    # OpenAI-compatible server, whose calls cannot train.
    served_by: str = "policy"
    served_model: str | None = None  # for a URL: model to request; None: as the agent asks
    api_key: str | None = field(default=None, repr=False)  # for a URL; sent only to its host
    # For a URL: limit of a call outside rollouts, which have their own.
    timeout_s: FinitePositive = 600.0
    max_response_mib: FinitePositive = 32.0  # for a URL: a longer response fails the call

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self,
            agent=(
                any((self.agent, self.model, self.system)),
                "a pattern for the agent, the model or the system prompt",
            ),
            system=(_compiles(self.system), "a regular expression"),
            served_by=(
                self.served_by in SERVED_BY or is_plain_url(self.served_by),
                "policy, initial or the http(s) URL of a server, without a user, query or fragment",
            ),
            policy=(
                self.policy is None or self.served_by == "policy",
                f"none, because served_by is {self.served_by} and no policy of the run answers",
                "conflict",
            ),
            trains=(
                not self.trains or self.served_by == "policy",
                f"false, because served_by is {self.served_by} and only a policy's responses are "
                "trained",
                "conflict",
            ),
        )

    @property
    def is_external(self) -> bool:
        """True if another server answers the calls."""
        return self.served_by not in SERVED_BY


@dataclass(frozen=True)
class RewardRule(Section):
    """Reward that a call earns each time it causes `fact`."""

    fact: Fact  # what a call causes, see docs/traces.md
    reward: Finite  # added to the call's reward, in reward units
    pattern: str | None = None  # regular expression to find in the fact's text; None: any
    agent: str | None = None  # pattern for the sub-agent's name, with * and ?; None: any

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self,
            pattern=(
                _compiles(self.pattern) and (self.pattern is not None or self.fact not in TEXTS),
                "a regular expression"
                + (f", because the fact is {self.fact}" * (self.fact in TEXTS)),
            ),
        )


def _compiles(pattern: str | None) -> bool:
    try:
        re.compile(pattern or "")
    except re.error:
        return False
    return True
