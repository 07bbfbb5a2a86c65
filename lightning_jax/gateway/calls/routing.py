"""Route of a call: its role, who answers it, and whether it trains."""

from dataclasses import dataclass, field
from typing import Any

from lightning_jax.gateway.errors import ApiError
from lightning_jax.models.policies import ALL, SINGLE, Policy, PolicyTable
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.roles import Roles, find_role, is_trained, select_policy

PLAIN = RoleConfig(agent="*")


@dataclass(frozen=True)
class Route:
    """Decision about one call. It is made when the call comes in, and stored in the call's span."""

    agent: str = ""  # sub-agent that makes the call
    model: str = ""  # model that it requests
    role_name: str = ""  # "": no role matches
    role: RoleConfig = PLAIN
    policy: Policy | None = ALL  # that answers; None: another server does, or nobody
    trains: bool = True

    @property
    def attributes(self) -> dict[str, Any]:
        name = "" if self.policy is None or self.policy.is_fixed else self.policy.name
        return {
            attributes.ROLE: self.role_name or None,
            attributes.ANSWERED_BY: name or None,
            attributes.TRAINS: self.trains,
        }


@dataclass(frozen=True)
class Routing:
    """Roles and policies of a run."""

    roles: Roles = field(default_factory=dict)
    policies: PolicyTable = SINGLE
    fallback: RoleConfig = PLAIN  # of calls that match no role

    def __bool__(self) -> bool:
        """Return whether calls have to be inspected to route them."""
        return bool(self.roles or self.policies.named or self.fallback != PLAIN)

    def route(self, *, agent: str, model: str, system: str, message: str) -> Route:
        """Return the route of a call, given its `read_traits`."""
        name = find_role(self.roles, agent=agent, model=model, system=system, message=message)
        role = self.roles.get(name, self.fallback)
        policy = select_policy(self.policies, role, model)
        return Route(agent, model, name, role, policy, is_trained(role, policy))

    def check(self, route: Route) -> None:
        """Raise ApiError if no policy answers the call."""
        if route.policy is not None:
            return
        caller = f"agent {route.agent!r}" if route.agent else "an unnamed agent"
        raise ApiError(
            404,
            "model_not_found",
            f"model is {route.model!r}, requested by {caller}, but there are several policies; "
            f"request one of {', '.join(self.policies.named)}, or add a role to the settings that "
            "matches the call and names a policy.",
            param="model",
        )
