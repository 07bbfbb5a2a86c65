"""Settings for policies, the roles of calls, and rewards of single calls."""

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
TEXTS = ("tool_output", "observation", "response")  # facts that always have a text
SERVED_BY = ("policy", "initial")
RESERVED = ("policy", "initial", "latest")  # model names with another meaning for the gateway


@dataclass(frozen=True)
class PolicyConfig:
    """Settings of one of several policies.

    The policy is an adapter on the run's model if model.lora.rank is above 0, else a set of
    weights.
    """

    trains: bool = True  # False: only the warm-up trains it
    # Initial weights: a model with the shape and vocabulary of model.name. None: model.name, which
    # adapters always start from.
    base: str | None = None


@dataclass(frozen=True)
class RoleConfig:
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
    timeout_s: float = 600.0  # for a URL: limit of a call outside rollouts, which have their own
    max_response_mib: float = 32.0  # for a URL: a longer response fails the call

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
class RewardRule:
    """Reward that a call earns each time it causes `fact`."""

    fact: str
    reward: float
    pattern: str | None = None  # regular expression to find in the fact's text; None: any
    agent: str | None = None  # pattern for the sub-agent's name, with * and ?; None: any

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


def policy_indices(policies: Iterable[str]) -> dict[str, int]:
    """Return the index of each policy, and so of its adapter or weights, in order of `policies`."""
    return {name: index for index, name in enumerate(policies)}


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
    _check_initial(policies, roles, model)


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
    named = {role.policy for role in roles.values()} - {None}
    for name in policies:
        if named and name not in named:
            raise InvalidValue(
                f"policies.{name} has no role, although roles name {_listed(named)}; correct its "
                f"name, or, if agents request it as their model, add roles.{name}={{model: {name}, "
                f"policy: {name}}}.",
                reason="unused",
                key=f"policies.{name}",
            )


def _check_initial(
    policies: Mapping[str, PolicyConfig], roles: Mapping[str, RoleConfig], model: ModelConfig
) -> None:
    """Raise ValueError if a role asks for the initial weights but policies start differently."""
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
