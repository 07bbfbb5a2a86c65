"""Records of training data before packing: sequences, and states for a critic."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lightning_jax.errors import InvalidValue
from lightning_jax.types import Advantage, check_same_length, fill_default


@dataclass(frozen=True)
class StateValues:
    """States of one sequence that a critic learns from, at most one per trained token.

    State i is the context before response token `positions[i]`; position 0 is the prompt.
    """

    positions: tuple[int, ...]
    values: tuple[float, ...]  # of the critic, before the step's first update
    returns: tuple[float, ...]  # targets of the values
    weight: float = 1.0  # of each state in the loss

    def __post_init__(self) -> None:
        check_same_length(self, "positions", "values", "returns")


class LikelyTokens(NamedTuple):
    """Tokens that a teacher finds likeliest at each of T response tokens, best first.

    Rows of tokens that are not trained are meaningless.
    """

    ids: Int[np.ndarray, "T K"]
    logprobs: Float[np.ndarray, "T K"]


@dataclass(frozen=True, eq=False)
class TeacherScores:
    """Log-probabilities of a response by a teacher, in nats at the temperature of the call."""

    logprobs: tuple[float, ...]  # of the sampled tokens, 0 where not trained
    top: LikelyTokens | None = None  # None: only the sampled tokens were scored


@dataclass(frozen=True)
class TrainingSequence:
    """Prompt and response to learn from, with the advantage and weight of the response's tokens.

    By default `loss_mask` is all True.
    """

    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    advantage: Advantage
    weight: float  # of each trained token; see rl/token_weights.py
    loss_mask: tuple[bool, ...] = ()  # False: the token is context only
    states: StateValues | None = None  # for a critic
    # Index of the policy that learns, and so of its adapter or weights. None: a single policy, or
    # sequences of one policy only.
    adapter: int | None = None
    pair: int | None = None  # for DPO: index of the rollout's pair in the step
    # Indices of the rollout and its group in the step. None: not from a rollout.
    rollout: int | None = None
    group: int | None = None
    # Divisor of the logits of the policy that learns. Log-probabilities are at this temperature.
    temperature: float = 1.0
    # Of the trained tokens, by the trainer before the step's first update. (): not measured.
    old_logprobs: tuple[float, ...] = ()
    teacher_coef: float = 0.0  # weight of the teacher (rl/distill.py); 0: no teacher
    teacher_kl: str = "forward"  # or reverse: `DistillConfig.kl`, if the teacher named tokens
    teacher_scores: TeacherScores | None = None  # None: not scored yet
    teacher_prompt_ids: tuple[int, ...] = ()  # prompt that the teacher reads; (): the policy's

    # Of the response, in the distribution that was sampled. (): not known.
    sampling_logprobs: tuple[float, ...] = ()
    grammar: str | None = None  # that alone shaped the samples (batches/masks.py); None: none
    # Packed masks of the response's tokens, 8 tokens a byte. (): none, or not replayed yet.
    masks: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        fill_default(self, "loss_mask", True, like="response_token_ids")
        measured = [name for name in ("sampling_logprobs", "masks") if getattr(self, name)]
        check_same_length(self, "response_token_ids", "behavior_logprobs", "loss_mask", *measured)
        scored = self.teacher_scores
        if scored is not None and len(scored.logprobs) != len(self.response_token_ids):
            raise InvalidValue.mismatch(
                "teacher_scores",
                f"teacher_scores has {len(scored.logprobs)} log-probabilities for "
                f"{len(self.response_token_ids)} response tokens; pass one for each.",
            )
