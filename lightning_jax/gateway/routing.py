"""Routing of a call: its role, and the policy or server that answers it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_jax.gateway.errors import ApiError
from lightning_jax.models.config import policy_indices
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.roles import Policies, Roles, find_role, select_policy

NO_TRAITS = {"agent": "", "model": "", "system": ""}
PLAIN = RoleConfig(agent="*")


@dataclass(frozen=True)
class Route:
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

    def role_of(self, traits: Mapping[str, str]) -> tuple[str, RoleConfig]:
        """Return (name, role) for a call's agent, model and system prompt, or ("", PLAIN) if none
        matches.
        """
        name = find_role(self.roles, **traits)
        return name, self.roles[name] if name else PLAIN

    def route_of(self, traits: Mapping[str, str]) -> Route:
        """Return the role and policy for a call that this process answers.

        Raise ApiError if there are several policies and nothing selects one.
        """
        name, role = self.role_of(traits)
        if not self.policies:
            return Route(name)
        if role.served_by != "policy":
            return Route(name, adapter=0)  # before the first step all policies are equal
        policy = select_policy(self.policies, role, traits["model"])
        if policy:
            return Route(name, policy, policy_indices(self.policies)[policy])
        caller = f"agent {traits['agent']!r}" if traits["agent"] else "an unnamed agent"
        raise ApiError(
            404,
            "model_not_found",
            f"model is {traits['model']!r}, requested by {caller}, but there are several "
            f"policies; request one of {', '.join(self.policies)}, or add a role to the settings "
            "that matches the call and names a policy.",
            param="model",
        )
