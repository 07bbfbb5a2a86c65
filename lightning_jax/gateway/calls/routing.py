"""Route of a call: its role, who answers it, and whether it trains."""

from dataclasses import dataclass, field
from typing import Any

from lightning_jax.gateway.errors import ApiError
from lightning_jax.models.config import policy_indices
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.roles import Policies, Roles, find_role, is_trained, select_policy

PLAIN = RoleConfig(agent="*")


@dataclass(frozen=True)
class Route:
    """Decision about one call. It is made when the call comes in, and stored in the call's span."""

    agent: str = ""  # sub-agent that makes the call
    model: str = ""  # model that it requests
    role_name: str = ""  # "": no role matches
    role: RoleConfig = PLAIN
    policy: str = ""  # policy that answers; "": the only one, or none of the run's
    adapter: int | None = None  # index of the policy's adapter; None: there is only one policy
    trains: bool = True

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            attributes.ROLE: self.role_name or None,
            attributes.ANSWERED_BY: self.policy or None,
            attributes.TRAINS: self.trains,
        }


@dataclass(frozen=True)
class Routing:
    """Roles and policies of a run. The order of the policies gives their adapter indices."""

    roles: Roles = field(default_factory=dict)
    policies: Policies = field(default_factory=dict)
    fallback: RoleConfig = PLAIN  # of calls that match no role

    def __bool__(self) -> bool:
        """Return whether calls have to be inspected to route them."""
        return bool(self.roles or self.policies or self.fallback != PLAIN)

    def route(self, *, agent: str, model: str, system: str) -> Route:
        """Return the route of a call, given its `read_traits`."""
        name = find_role(self.roles, agent=agent, model=model, system=system)
        role, policy, adapter = self.roles.get(name, self.fallback), "", None
        if self.policies and role.served_by == "policy":
            policy = select_policy(self.policies, role, model)
            adapter = policy_indices(self.policies).get(policy)
        elif self.policies:
            adapter = 0  # for the initial weights: before the first step all policies are equal
        trains = is_trained(role, self.policies.get(policy))
        return Route(agent, model, name, role, policy, adapter, trains)

    def check(self, route: Route) -> None:
        """Raise ApiError if there are several policies and the route has none."""
        if not self.policies or route.adapter is not None:
            return
        caller = f"agent {route.agent!r}" if route.agent else "an unnamed agent"
        raise ApiError(
            404,
            "model_not_found",
            f"model is {route.model!r}, requested by {caller}, but there are several "
            f"policies; request one of {', '.join(self.policies)}, or add a role to the settings "
            "that matches the call and names a policy.",
            param="model",
        )
