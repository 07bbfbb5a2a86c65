"""Generalized advantage estimation over the states of a rollout, from a critic's values.

A state is the text that the policy has read when it chooses. It is the prompt of a call (credit
"learned"), or everything before a trained token (credit "learned_token"). Rewards, values and
returns are in reward units.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rl.sequence import StateValues, TrainingSequence
from lightning_jax.rl.token_weights import num_trained
from lightning_jax.types import Trajectory

# Values of the states of one call in order, or None if they were not computed.
CallValues = tuple[float, ...] | None


def gae(
    rewards: Sequence[float], values: Sequence[float | None], *, discount: float, lam: float
) -> tuple[list[float], list[float]]:
    """Return (advantages, returns) of the states of one rollout, in order (GAE, arXiv 1506.02438).

    The return is G_t = r_t + discount * ((1 - lam) * V_{t+1} + lam * G_{t+1}), with 0 after the
    last state. The advantage is G_t - V_t, which equals the paper's sum over k of
    (discount * lam)^k * (r_{t+k} + discount * V_{t+k+1} - V_{t+k}). If a value is None, the state
    before uses the return instead, and the advantage equals the return.
    """
    advantages, returns = [], []
    later_value = later_return = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        later_return = reward + discount * ((1.0 - lam) * later_value + lam * later_return)
        later_value = later_return if value is None else value
        returns.append(later_return)
        advantages.append(later_return if value is None else later_return - value)
    return advantages[::-1], returns[::-1]


def rollout_gae(
    trajectory: Trajectory,
    values: Sequence[CallValues] | None,
    *,
    per_token: bool,
    discount: float,
    lam: float,
) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the (advantages, returns) of each call's states. Without `values`, every value is 0.

    A call's reward is earned in its last state, the rollout's reward in the last state of all. A
    call without a trained token is one state without a value.
    """
    counts = [max(num_trained(t), 1) if per_token else 1 for t in trajectory.transitions]
    values_of = [(0.0,) * count for count in counts] if values is None else values
    rewards: list[float] = []
    flat: list[float | None] = []
    for call, count, of_call in zip(trajectory.transitions, counts, values_of, strict=True):
        rewards += [0.0] * (count - 1) + [call.reward]
        flat += (None,) * count if of_call is None else of_call
    if rewards:
        rewards[-1] += trajectory.reward
    both = gae(rewards, flat, discount=discount, lam=lam)
    cuts = list(itertools.accumulate(counts, initial=0))
    return [
        (tuple(both[0][start:end]), tuple(both[1][start:end]))
        for start, end in itertools.pairwise(cuts)
    ]


def state_sequences(
    trajectories: Sequence[Trajectory],
    *,
    per_token: bool,
    adapters: Mapping[str, int] | None = None,
) -> list[TrainingSequence]:
    """Build one sequence per call, in order, whose targets mark the ends of the call's states.

    Only the places of the targets matter. The state of a whole call is its prompt, so the model
    then reads a response only if a later prompt repeats it. `adapters` are the adapter indices of
    several policies.
    """
    return [
        TrainingSequence(
            prompt_token_ids=call.prompt_token_ids,
            response_token_ids=call.response_token_ids if per_token else (0,),
            behavior_logprobs=call.behavior_logprobs if per_token else (0.0,),
            advantage=0.0,
            weight=0.0,
            loss_mask=tuple(not forced for forced in call.forced) if per_token else (True,),
            adapter=adapters[call.answered_by] if adapters else None,
        )
        for trajectory in trajectories
        for call in trajectory.transitions
    ]


def learnable_states(
    trajectories: Sequence[Trajectory],
    values: Sequence[Sequence[CallValues]],
    algorithm: AlgorithmConfig,
) -> tuple[list[tuple[StateValues | None, ...]], dict[str, float]]:
    """Return (the critic's training states of each call, metrics of the step).

    `train/value_explained_variance` is 1 - Var(G - V) / Var(G), where G are the discounted rewards
    that followed. It is omitted if they are all equal. Calls without a value are not trained on,
    and counted in `train/calls_without_value`.
    """
    per_token, discount = algorithm.credit == "learned_token", algorithm.discount
    states, pairs, num_missing = [], [], 0
    for trajectory, values_of in zip(trajectories, values, strict=True):
        knobs = {"per_token": per_token, "discount": discount}
        returns = rollout_gae(trajectory, values_of, lam=algorithm.gae_lambda, **knobs)
        earned = rollout_gae(trajectory, values_of, lam=1.0, **knobs)
        calls: list[StateValues | None] = []
        for call, of_call, (_, target), (_, followed) in zip(
            trajectory.transitions, values_of, returns, earned, strict=True
        ):
            if of_call is None:
                calls.append(None)
                num_missing += 1
                continue
            trained = tuple(i for i, forced in enumerate(call.forced) if not forced)
            positions = trained if per_token else (0,)
            calls.append(StateValues(positions, of_call, target))
            pairs += zip(of_call, followed, strict=True)
        states.append(tuple(calls))
    return states, _fit(pairs) | {"train/calls_without_value": float(num_missing)}


def _fit(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the metrics of (value, return) pairs."""
    if not pairs:
        return {}
    values, returns = np.asarray(pairs, np.float64).T
    metrics = {"train/value_mean": float(values.mean())}
    if np.ptp(returns) > 1e-6 * max(1.0, np.abs(returns).max()):  # more than rounding
        unexplained = (returns - values).var() / returns.var()
        metrics["train/value_explained_variance"] = float(1.0 - unexplained)
    return metrics
