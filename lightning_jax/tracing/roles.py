"""Which part a call plays, and so whether it trains. Pure functions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from lightning_jax.config import RoleConfig
from lightning_jax.tracing import attributes as names
from lightning_jax.tracing.tree import agent_of
from lightning_jax.types import Span, Trajectory, Transition

Roles = Mapping[str, RoleConfig]  # in order: a call has the first that fits


def find_role(roles: Roles, *, agent: str, model: str, system: str) -> str:
    """The name of the first role whose patterns all fit, "" if none does."""
    return next((name for name, role in roles.items() if _fits(role, agent, model, system)), "")


def assign_roles(
    spans: Sequence[Span], transitions: Sequence[Transition], roles: Roles
) -> tuple[Transition, ...]:
    """The calls with the agents that the spans above them name, their roles, and whether they
    train.

    The gateway has written down the role that a call had when it came in. A role that comes first
    and asks for nothing but names may fit it better once the tree is known, unless the call's own
    was not answered by the policy.
    """
    by_id = {span.span_id: span for span in spans}
    return tuple(_assigned(call, by_id[call.call_id], by_id, roles) for call in transitions)


def only_trained(trajectory: Trajectory) -> Trajectory:
    """The trajectory without calls that do not train: they are part of the environment.

    What they earned goes to the trained call before them, whose consequence they are, and before
    the first of those to that. Without a trained call there is none, and their rewards are lost
    with the rollout.
    """
    kept: list[Transition] = []
    early = 0.0
    for call in trajectory.transitions:
        if call.trains:
            kept.append(replace(call, reward=call.reward + early) if early else call)
            early = 0.0
        elif kept and call.reward:
            kept[-1] = replace(kept[-1], reward=kept[-1].reward + call.reward)
        else:
            early += call.reward
    return replace(trajectory, transitions=tuple(kept))


def _assigned(call: Transition, span: Span, by_id: Mapping[str, Span], roles: Roles) -> Transition:
    agent = agent_of(span, by_id)
    noted = str(span.attributes.get(names.ROLE, ""))
    role = noted
    if noted not in roles or roles[noted].served_by == "policy":
        for name, candidate in roles.items():
            unread = candidate.system is not None  # the span does not keep the system prompt
            if name == noted or (not unread and _fits(candidate, agent, call.policy, "")):
                role = name
                break
    trains = roles[role].trains if role in roles else True
    return replace(call, agent=agent, role=role, trains=trains)


def _fits(role: RoleConfig, agent: str, model: str, system: str) -> bool:
    return (
        (role.agent is None or fnmatchcase(agent, role.agent))
        and (role.model is None or fnmatchcase(model, role.model))
        and (role.system is None or re.search(role.system, system) is not None)
    )
