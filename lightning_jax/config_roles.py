"""Settings of who trains and what single calls earn: the policies of a run, the parts that its
calls play, and rules that reward what a call brings about.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lightning_jax.config_learning import AlgorithmConfig
from lightning_jax.config_sections import ModelConfig, require
from lightning_jax.types import InvalidValue

FACTS = (
    "tool_error", "tool_timeout", "tool_output", "observation", "response", "malformed_call",
    "cut_short"
)  # fmt: skip
TEXTS = ("tool_output", "observation", "response")  # they always hold some text
SERVED_BY = ("policy", "initial")
RESERVED = ("policy", "initial", "latest")  # names that mean something else to a gateway


@dataclass(frozen=True)
class PolicyConfig:
    """One of several policies: an adapter of its own on the model of the run where model.lora has
    a rank, else weights of its own.
    """

    trains: bool = True  # False: the warm-up shapes it, and after that nothing does
    # What its own weights begin as: a model of the shape and vocabulary of model.name. None: that
    # one, and all adapters are on that one.
    base: str | None = None


@dataclass(frozen=True)
class RoleConfig:
    """A part that some calls of a run play. A call has the first role all of whose patterns fit it;
    a call without a role trains.
    """

    agent: str | None = None  # the sub-agent's name, with * and ? as in file names
    model: str | None = None  # the model's name that the call asks for, with * and ?
    system: str | None = None  # a regular expression, found in the system prompt
    trains: bool = True  # False: the call is part of the environment
    policy: str | None = None  # of several, which answers and learns. None: as the call asks
    # policy: the present weights; initial: those that the run began with; else the URL of an
    # OpenAI-compatible server, whose calls cannot train.
    served_by: str = "policy"
    served_model: str | None = None  # of a URL: the model to ask for. None: as the agent asks
    api_key: str | None = field(default=None, repr=False)  # of a URL; sent to its host alone
    timeout_s: float = 600.0  # of a URL, for calls outside of rollouts, which have their own limit
    max_response_mib: float = 32.0  # of a URL; a longer answer breaks off

    def __post_init__(self) -> None:
        url = urlsplit(self.served_by)
        is_url = url.scheme in ("http", "https")
        is_plain = not (url.username or url.password or url.query or url.fragment)
        require(
            self,
            agent=(
                any((self.agent, self.model, self.system)),
                "a pattern for the agent, the model or the system prompt",
            ),
            system=(_compiles(self.system), "a regular expression"),
            served_by=(
                self.served_by in SERVED_BY or (is_url and is_plain),
                "policy, initial or the http(s) URL of a server, without a user, query or fragment",
            ),
            timeout_s=(0 < self.timeout_s < math.inf, "a positive number of seconds"),
            max_response_mib=(0 < self.max_response_mib < math.inf, "a positive number of MiB"),
            policy=(
                self.policy is None or self.served_by == "policy",
                f"none, as served_by is {self.served_by} and a policy of the run answers nothing",
                "conflict",
            ),
            trains=(
                not self.trains or self.served_by == "policy",
                f"false, as served_by is {self.served_by} and only what the policy says can train",
                "conflict",
            ),
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether another server answers."""
        return self.served_by not in SERVED_BY


@dataclass(frozen=True)
class RewardRule:
    """A reward for a call, each time it brings something about."""

    fact: str
    reward: float
    pattern: str | None = None  # a regular expression, found in the fact's text; None: any
    agent: str | None = None  # only calls of the sub-agents of this name, with * and ?

    def __post_init__(self) -> None:
        require(
            self,
            fact=(self.fact in FACTS, f"one of {', '.join(FACTS)}"),
            reward=(math.isfinite(self.reward), "a finite number"),
            pattern=(
                _compiles(self.pattern) and (self.pattern is not None or self.fact not in TEXTS),
                "a regular expression"
                + (f", because the fact is {self.fact}" * (self.fact in TEXTS)),
            ),
        )


def policy_places(policies: Iterable[str]) -> dict[str, int]:
    """The place of each policy among all, which is that of its adapter or of its own weights: in
    the order of their names here.
    """
    return {name: place for place, name in enumerate(policies)}


def check_policies(
    policies: Mapping[str, PolicyConfig],
    roles: Mapping[str, RoleConfig],
    model: ModelConfig,
    algorithm: AlgorithmConfig,
) -> None:
    """Raises ValueError where the policies of a run cannot be, or do not fit its roles."""
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
            f"policies names {names}, and trains is false for all; expected one that trains.",
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
    _check_initial(policies, roles, model)


def _check_roles(policies: Mapping[str, PolicyConfig], roles: Mapping[str, RoleConfig]) -> None:
    """Raises ValueError where a role names a policy that there is not, or no role names one while
    some name others.

    Agents may reach a policy by asking for it as their model, and then no role need name it; but a
    setting like `policies.writter.trains=false` makes a policy, too, which nobody would ever call.
    So where roles say who answers, they say it of all.
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
    named = {role.policy for role in roles.values()} - {None}
    for name in policies:
        if named and name not in named:
            raise InvalidValue(
                f"policies.{name} is the policy of no role, and roles name {_listed(named)}; "
                "expected a role for each where they name any. Correct its name, or where agents "
                f"ask for it as their model add roles.{name}={{model: {name}, policy: {name}}}.",
                reason="unused",
                key=f"policies.{name}",
            )


def _check_initial(
    policies: Mapping[str, PolicyConfig], roles: Mapping[str, RoleConfig], model: ModelConfig
) -> None:
    """Raises ValueError where the initial weights, which a role asks for, are not those of all."""
    others = [name for name, policy in policies.items() if policy.base not in (None, model.name)]
    for name, role in roles.items():
        if others and role.served_by == "initial":
            raise InvalidValue(
                f"roles.{name}.served_by is 'initial' and policies.{others[0]} begins as "
                f"{policies[others[0]].base!r}; expected policies that all begin as {model.name!r}"
                f", or the role to say whose weights it means: add a policy with trains: false and "
                f"the base that you want, and name it as roles.{name}.policy.",
                reason="conflict",
                key=f"roles.{name}.served_by",
            )


def _listed(names: Iterable[str | None]) -> str:
    return ", ".join(sorted(str(name) for name in names))


def _compiles(pattern: str | None) -> bool:
    try:
        re.compile(pattern or "")
    except re.error:
        return False
    return True
