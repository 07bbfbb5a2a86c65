"""Role of each call, which decides who answers it and whether it trains. All functions are pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from lightning_jax.models.policies import INITIAL, SINGLE, Policy, PolicyTable
from lightning_jax.traces import attributes
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.tree import Agents
from lightning_jax.types import Span, Trajectory, Transition, keep_calls

Roles = Mapping[str, RoleConfig]  # in order: a call has the first role that matches


def find_role(roles: Roles, *, agent: str, model: str, system: str, message: str) -> str:
    """Return the name of the first role whose patterns all match, or "" if none does."""
    names = (name for name, role in roles.items() if _fits(role, agent, model, system, message))
    return next(names, "")


def select_policy(policies: PolicyTable, role: RoleConfig, model: str) -> Policy | None:
    """Return the policy that a call's role names, else the one that its model names, if any.

    The only policy of a run answers to any name.
    """
    if role.is_external:
        return None
    if name := INITIAL if role.served_by == INITIAL else role.policy:
        return policies.row(name)
    if not policies.named:
        return policies.rows[0]
    return policies.named.get(model.removesuffix(":latest"))  # Ollama's clients append it


def is_trained(role: RoleConfig | None, policy: Policy | None) -> bool:
    """Return whether a call with this role trains the policy that answered it."""
    return (role is None or role.trains) and (policy is None or policy.trains)


def assign_roles(
    spans: Sequence[Span],
    transitions: Sequence[Transition],
    roles: Roles,
    policies: PolicyTable = SINGLE,
) -> tuple[Transition, ...]:
    """Return the calls with their agents, roles and whether they train.

    The gateway decided the role and whether the call trains when it came in, and its span says so.
    If the spans above a call name its agent, an earlier role that matches that name may still keep
    the call from training. Calls of an older store are decided by the settings.
    """
    by_id = {span.span_id: span for span in spans}
    agents = Agents(by_id)
    return tuple(
        _assigned(call, by_id[call.call_id], agents.of(by_id[call.call_id]), roles, policies)
        for call in transitions
    )


def only_trained(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without the calls that do not train, which are environment."""
    return keep_calls(trajectory, lambda call: call.trains)


def _assigned(
    call: Transition, span: Span, agent: str, roles: Roles, policies: PolicyTable
) -> Transition:
    role = str(span.attributes.get(attributes.ROLE, ""))
    decided = span.attributes.get(attributes.TRAINS)  # None: by an older version
    in_settings = is_trained(roles.get(role), policies.named.get(call.answered_by))
    trains = in_settings if decided is None else decided
    if trains and (decided is None or agent != call.agent):
        for name, candidate in roles.items():
            if name == role:
                break
            # By names only, because the span does not hold the request's texts.
            texts = (candidate.system, candidate.message)
            if texts == (None, None) and _fits(candidate, agent, call.policy, "", ""):
                role, trains = name, candidate.trains
                break
    return replace(call, agent=agent, role=role, trains=trains)


def _fits(role: RoleConfig, agent: str, model: str, system: str, message: str) -> bool:
    return (
        (role.agent is None or fnmatchcase(agent, role.agent))
        # Ollama's clients write NAME:latest.
        and (role.model is None or fnmatchcase(model.removesuffix(":latest"), role.model))
        and (role.system is None or re.search(role.system, system) is not None)
        and (role.message is None or re.search(role.message, message) is not None)
    )
