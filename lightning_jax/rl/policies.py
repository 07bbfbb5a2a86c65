"""What each of several policies learns from: its own calls, or the calls of all of them together.

With `policy_updates` "independent" the calls of the other policies are part of the environment, as
in Agent Lightning (arXiv 2508.03680): a policy has groups, advantages and weights of its own, those
that it would have if the others were frozen. With "joint" a rollout is one sequence of calls,
whoever made them: credit runs through all of it to the common return, and the step has one set of
weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightning_jax.config import AlgorithmConfig, PolicyConfig
from lightning_jax.config_roles import policy_places
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rl.values import CallValues
from lightning_jax.types import TrainingSequence, Trajectory, Transition


def keep_calls(trajectory: Trajectory, keep: Callable[[Transition], bool]) -> Trajectory:
    """The trajectory with some of its calls; the others are part of the environment.

    What those earned goes to the kept call before them, whose consequence they are, and before the
    first of those to that. Without a kept call there is none, and their rewards are lost with the
    rollout.
    """
    kept: list[Transition] = []
    early = 0.0
    for call in trajectory.transitions:
        if keep(call):
            kept.append(replace(call, reward=call.reward + early) if early else call)
            early = 0.0
        elif kept and call.reward:
            kept[-1] = replace(kept[-1], reward=kept[-1].reward + call.reward)
        else:
            early += call.reward
    return replace(trajectory, transitions=tuple(kept))


def own_calls(trajectories: Sequence[Trajectory], policy: str) -> list[Trajectory]:
    """All trajectories, each with the calls of one policy only."""
    return [keep_calls(each, lambda call: call.answered_by == policy) for each in trajectories]


def learning_parts(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    policies: Mapping[str, PolicyConfig],
) -> dict[str, list[Trajectory]]:
    """What is learned from apart, by the policy that learns; "" is all of them, or the only one."""
    if not policies or algorithm.policy_updates == "joint":
        return {"": list(trajectories)}
    return {name: own_calls(trajectories, name) for name, each in policies.items() if each.trains}


def prepare_policies(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    policies: Mapping[str, PolicyConfig],
    *,
    policy_version: int,
    values: Sequence[Sequence[CallValues]] | None = None,
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """As `prepare_step`, of several policies, whose places are their order here; empty: of the only
    one. Metrics of a policy's own part are named like `train/num_groups/policy=writer`.
    """
    places = policy_places(policies)
    sequences, metrics = [], {}
    for policy, part in learning_parts(trajectories, algorithm, policies).items():
        known = values
        if policy and values is not None:
            known = _own_values(trajectories, values, policy)
        made, of_part = prepare_step(
            part, algorithm, policy_version=policy_version, values=known, adapters=places
        )
        sequences += made
        suffix = f"/policy={policy}" if policy else ""
        metrics |= {f"{name}{suffix}": value for name, value in of_part.items()}
    return sequences, metrics


def _own_values(
    trajectories: Sequence[Trajectory], values: Sequence[Sequence[CallValues]], policy: str
) -> list[tuple[CallValues, ...]]:
    """Those of the calls that `own_calls` keeps."""
    return [
        tuple(
            value
            for call, value in zip(trajectory.transitions, of_calls, strict=True)
            if call.answered_by == policy
        )
        for trajectory, of_calls in zip(trajectories, values, strict=True)
    ]
