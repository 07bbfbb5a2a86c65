"""Records of training data before packing: sequences, and states for a critic."""

from dataclasses import dataclass

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
    teacher_coef: float = 0.0  # weight of the teacher's advantages (rl/distill.py); 0: no teacher
    teacher_logprobs: tuple[float, ...] = ()  # of the response, by the teacher; (): not scored yet
    teacher_prompt_ids: tuple[int, ...] = ()  # prompt that the teacher reads; (): the policy's

    # Of the response, in the distribution that was sampled. (): not known.
    sampling_logprobs: tuple[float, ...] = ()
    grammar: str | None = None  # that alone shaped the samples (rl/masks.py); None: no such grammar
    # Packed masks of the response's tokens, 8 tokens a byte. (): none, or not replayed yet.
    masks: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        fill_default(self, "loss_mask", True, like="response_token_ids")
        known = [
            name
            for name in ("teacher_logprobs", "sampling_logprobs", "masks")
            if getattr(self, name)
        ]
        check_same_length(self, "response_token_ids", "behavior_logprobs", "loss_mask", *known)
