"""Short constructors of records for tests."""

from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Advantage, Trajectory, Transition


def transition(
    prompt: list[int],
    response: list[int],
    *,
    reward: float = 0.0,
    version: int = 0,
    forced: tuple[bool, ...] = (),
    trains: bool = True,
) -> Transition:
    """Return a call that ended by itself, with log-probs -0.1, -0.2, ..."""
    size = len(response)
    logprobs = tuple(-0.1 * (i + 1) for i in range(size))
    return Transition(
        call_id=f"call-{prompt}-{response}",
        rollout_id="r",
        prompt_token_ids=tuple(prompt),
        response_token_ids=tuple(response),
        behavior_logprobs=logprobs,
        sampling_logprobs=logprobs,
        policy_versions=(version,) * size,
        finish_reason="stop",
        reward=reward,
        forced=forced,
        trains=trains,
    )


def trajectory(
    *transitions: Transition, reward: float = 0.0, group: str = "g", rollout: str = "r"
) -> Trajectory:
    """Return a scored rollout of these calls."""
    return Trajectory(rollout, group, transitions, reward)


def sequence(
    prompt: list[int],
    response: list[int],
    *,
    advantage: Advantage = 1.0,
    weight: float = 0.1,
    loss_mask: tuple[bool, ...] = (),
) -> TrainingSequence:
    """Return a response to train on, with behavior log-probs -0.5, -0.75, ..."""
    return TrainingSequence(
        prompt_token_ids=tuple(prompt),
        response_token_ids=tuple(response),
        behavior_logprobs=tuple(-0.5 - 0.25 * i for i in range(len(response))),
        advantage=advantage,
        weight=weight,
        loss_mask=loss_mask,
    )
