"""Credit and advantages of a step's calls, recomputed as in `rl/prepare.py`. Pure functions.

They are not stored. They match the trainer's as long as the run's settings are those of that step.
"""

from collections.abc import Sequence

from lightning_jax.models.policies import SINGLE, PolicyTable
from lightning_jax.rl.advantages import (
    equal_groups,
    learners,
    make_pairs,
    pair_signs,
    step_advantages,
)
from lightning_jax.rl.config import AlgorithmConfig, is_custom
from lightning_jax.rl.credit import CUT_SHORT, assign_credit, punish_overlong
from lightning_jax.rl.token_weights import drop_stale
from lightning_jax.studio.records import CallCredit, StepCredit
from lightning_jax.types import FINISHED, Rollout, Trajectory

EQUAL_GROUP = "not trained: all returns of its group are equal"
PAIR_SIGNS = "advantages are signs: 1 for the preferred rollout of a pair, -1 for the other"


def trained_on(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return one attempt for each rollout of a step: the newest finished one, else the newest.

    Superseded attempts are used only if there are no others.
    """

    def rank(rollout: Rollout) -> tuple[bool, bool, int]:
        return not rollout.superseded, rollout.status in FINISHED, rollout.attempt

    ordered = sorted(rollouts, key=rank)
    newest = {(rollout.group_id, rollout.index): rollout for rollout in ordered}
    return [newest[key] for key in sorted(newest)]


def step_credit(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    *,
    step: int,
    policies: PolicyTable = SINGLE,
) -> StepCredit:
    """Return the credit of a training step's trajectories, or of those finished so far.

    With learned credit the result is only a note, because it needs the critic's values at that
    step. The same holds for a custom function, because showing a run must not run its code.
    """
    for name in ("credit", "baseline"):
        if is_custom(getattr(algorithm, name)):
            return StepCredit(
                notes=(
                    f"no credit or advantages: algorithm.{name} is a custom function, and showing "
                    "a run does not run its code",
                )
            )
    if algorithm.has_critic:
        return StepCredit(
            notes=(
                f"no credit or advantages: algorithm.credit is {algorithm.credit}, and the "
                "critic's values that they need are not stored",
            )
        )
    by_call: dict[str, CallCredit] = {}
    notes, learning = [], learners(algorithm, policies)
    if algorithm.max_sampling_rounds > 1:
        equal = equal_groups(assign_credit(trajectories, algorithm))
        left_out = [trajectory for trajectory in trajectories if trajectory.group_id in equal]
        for part in [policy.calls(left_out) for policy in learning]:
            by_call |= _of_calls(
                punish_overlong(part, algorithm)[0], algorithm, step, set(), EQUAL_GROUP
            )
        trajectories = [
            trajectory for trajectory in trajectories if trajectory.group_id not in equal
        ]
    fresh, _, _ = drop_stale(
        trajectories,
        [trajectory.transitions for trajectory in trajectories],
        policy_version=step,
        max_staleness=algorithm.max_staleness,
    )
    trained = {call.call_id for trajectory in fresh for call in trajectory.transitions}
    stale = f"not trained: more than {algorithm.max_staleness} steps old"
    for part in [policy.calls(trajectories) for policy in learning]:
        by_call |= _of_calls(punish_overlong(part, algorithm)[0], algorithm, step, trained, stale)
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        notes.append("advantages are shown without each token's KL penalty")
    if algorithm.loss == "dpo":
        notes.append(PAIR_SIGNS)
    return StepCredit(by_call, tuple(notes))


def _of_calls(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    step: int,
    trained: set[str],
    otherwise: str,
) -> dict[str, CallCredit]:
    """Return credit by call id. `otherwise` is the note for calls that are not in `trained`."""
    credit = assign_credit(trajectories, algorithm)
    if algorithm.loss == "dpo":
        pairs, _ = make_pairs(credit, algorithm, policy_version=step)
        advantages = pair_signs(trajectories, pairs)
    else:
        advantages, _ = step_advantages(credit, algorithm)
    by_call = {}
    for trajectory, *of_calls in zip(trajectories, credit.calls, advantages, strict=True):
        for call, earned, advantage in zip(trajectory.transitions, *of_calls, strict=True):
            assert not isinstance(earned, tuple) and not isinstance(advantage, tuple), "no critic"
            note = "" if call.call_id in trained else otherwise
            if not note and algorithm.overlong_filter and call.finish_reason == CUT_SHORT:
                note = "not trained: cut at its token limit"
            by_call[call.call_id] = CallCredit(float(earned), float(advantage), note)
    return by_call
