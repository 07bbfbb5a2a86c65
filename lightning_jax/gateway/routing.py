"""Routing of a call: its role, and the policy or server that answers it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_jax.config import RoleConfig
from lightning_jax.config_roles import policy_indices
from lightning_jax.gateway.errors import ApiError
from lightning_jax.tracing.roles import Policies, Roles, choose_policy, find_role

NOTHING_SAID = {"agent": "", "model": "", "system": ""}
PLAIN = RoleConfig(agent="*")


@dataclass(frozen=True)
class Part:
    """Role of a call, and the policy that answers it."""

    role: str = ""  # "": no role matches
    answered_by: str = ""  # "": the only policy, or the initial weights
    adapter: int | None = None  # index of the policy's adapter; None: there is only one policy


@dataclass(frozen=True)
class Routing:
    """Roles and policies of a run. The order of the policies gives their adapter indices."""

    roles: Roles = field(default_factory=dict)
    policies: Policies = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether calls have to be inspected to route them."""
        return bool(self.roles or self.policies)

    def role_of(self, said: Mapping[str, str]) -> tuple[str, RoleConfig]:
        """Return (name, role) for a call's agent, model and system prompt, or ("", PLAIN) if none
        matches.
        """
        name = find_role(self.roles, **said)
        return name, self.roles[name] if name else PLAIN

    def part_of(self, said: Mapping[str, str]) -> Part:
        """Return the role and policy for a call that this process answers.

        Raise ApiError if there are several policies and nothing selects one.
        """
        name, role = self.role_of(said)
        if not self.policies:
            return Part(name)
        if role.served_by != "policy":
            return Part(name, adapter=0)  # before the first step all policies are equal
        policy = choose_policy(self.policies, role, said["model"])
        if policy:
            return Part(name, policy, policy_indices(self.policies)[policy])
        caller = f"agent {said['agent']!r}" if said["agent"] else "an agent without a name"
        raise ApiError(
            404,
            "model_not_found",
            f"model is {said['model']!r}, asked for by {caller}, and there are several policies; "
            f"expected one of {', '.join(self.policies)}, or a role in the settings that fits the "
            "call and names one.",
            param="model",
        )
