"""Who answers a call: what its role and the model that it asks for make of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_jax.config import RoleConfig
from lightning_jax.config_roles import policy_places
from lightning_jax.gateway.errors import ApiError
from lightning_jax.tracing.roles import Policies, Roles, choose_policy, find_role

NOTHING_SAID = {"agent": "", "model": "", "system": ""}
PLAIN = RoleConfig(agent="*")


@dataclass(frozen=True)
class Part:
    """The role of a call, and which of several policies answers it."""

    role: str = ""  # "": none fits
    answered_by: str = ""  # "": the only policy, or the initial weights
    adapter: int | None = None  # its place; None: there is one policy


@dataclass(frozen=True)
class Routing:
    """The roles of a run and its policies, whose places are in their order."""

    roles: Roles = field(default_factory=dict)
    policies: Policies = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether calls need to be read for it."""
        return bool(self.roles or self.policies)

    def role_of(self, said: Mapping[str, str]) -> tuple[str, RoleConfig]:
        """(name, role) of a call by what it says; that of one without a role is plain."""
        name = find_role(self.roles, **said)
        return name, self.roles[name] if name else PLAIN

    def part_of(self, said: Mapping[str, str]) -> Part:
        """Which policy answers a call that this process answers. Raises ApiError where nothing says
        which of several.
        """
        name, role = self.role_of(said)
        if not self.policies:
            return Part(name)
        if role.served_by != "policy":
            return Part(name, adapter=0)  # before the first step all policies are alike
        policy = choose_policy(self.policies, role, said["model"])
        if policy:
            return Part(name, policy, policy_places(self.policies)[policy])
        caller = f"agent {said['agent']!r}" if said["agent"] else "an agent without a name"
        raise ApiError(
            404,
            "model_not_found",
            f"model is {said['model']!r}, asked for by {caller}, and there are several policies; "
            f"expected one of {', '.join(self.policies)}, or a role in the settings that fits the "
            "call and names one.",
            param="model",
        )
