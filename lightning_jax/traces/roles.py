"""Role of each call, which decides who answers it and whether it trains. All functions are pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from lightning_jax.models.config import PolicyConfig
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.tree import Agents
from lightning_jax.types import Span, Trajectory, Transition, keep_calls

Roles = Mapping[str, RoleConfig]  # in order: a call has the first role that matches
Policies = Mapping[str, PolicyConfig]  # in the order of their indices; empty if there is only one


def find_role(roles: Roles, *, agent: str, model: str, system: str) -> str:
    """Return the name of the first role whose patterns all match, or "" if none does."""
    return next((name for name, role in roles.items() if _fits(role, agent, model, system)), "")


def select_policy(policies: Policies, role: RoleConfig | None, model: str) -> str:
    """Return the policy that a call's role names, else the one that its model names, else ""."""
    if role is not None and role.policy is not None:
        return role.policy
    name = model.removesuffix(":latest")  # Ollama's clients append it
    return name if name in policies else ""


def assign_roles(
    spans: Sequence[Span],
    transitions: Sequence[Transition],
    roles: Roles,
    policies: Policies | None = None,
) -> tuple[Transition, ...]:
    """Return the calls with their agents, their roles and whether they train.

    A call's agent is the one named by the spans above it. The gateway recorded the role that a call
    had on arrival. An earlier role that matches only names may fit better once the tree is known,
    unless the policy did not answer the call. Calls of a frozen policy do not train.
    """
    by_id = {span.span_id: span for span in spans}
    frozen = {name for name, policy in (policies or {}).items() if not policy.trains}
    agents = Agents(by_id)
    assigned = (
        _assigned(call, by_id[call.call_id], agents.of(by_id[call.call_id]), roles)
        for call in transitions
    )
    return tuple(
        replace(call, trains=call.trains and call.answered_by not in frozen) for call in assigned
    )


def only_trained(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without the calls that do not train, which are environment."""
    return keep_calls(trajectory, lambda call: call.trains)


def _assigned(call: Transition, span: Span, agent: str, roles: Roles) -> Transition:
    noted = str(span.attributes.get(attributes.ROLE, ""))
    role = noted
    if noted not in roles or roles[noted].served_by == "policy":
        for name, candidate in roles.items():
            unread = candidate.system is not None  # the span does not hold the system prompt
            if name == noted or (not unread and _fits(candidate, agent, call.policy, "")):
                role = name
                break
    trains = roles[role].trains if role in roles else True
    return replace(call, agent=agent, role=role, trains=trains)


def _fits(role: RoleConfig, agent: str, model: str, system: str) -> bool:
    return (
        (role.agent is None or fnmatchcase(agent, role.agent))
        # Ollama's clients write NAME:latest.
        and (role.model is None or fnmatchcase(model.removesuffix(":latest"), role.model))
        and (role.system is None or re.search(role.system, system) is not None)
    )
