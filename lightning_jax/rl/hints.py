"""Places of hints in prompts: the teacher reads them, the policy never does.

A hint stands at the end of the last message before a conversation's first response, which is the
question. Later calls of the conversation have it at the same place, so the teacher's sequences of a
rollout share their beginnings like the policy's:

    policy    [system][user ... <end>][assistant response]
    teacher   [system][user ... HINT <end>][assistant response]

Only the prompt ids change. Response ids stay those that the policy sampled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_jax.rl.sequence import TrainingSequence

TokenIds = tuple[int, ...]
# Prompt that the teacher reads, by rollout of the step and the prompt that the policy read.
HintedPrompts = Mapping[tuple[int, TokenIds], TokenIds]


def hint_places(prompts: Sequence[TokenIds], end_id: int) -> list[int | None]:
    """Return the index at which a hint goes into each prompt of a rollout, None if nowhere.

    `prompts` are in the order of the calls. `end_id` ends a message.
    """
    begun: list[TokenIds] = []  # conversations, up to the end of the message before a response
    places: list[int | None] = []
    for prompt in prompts:
        known = [start for start in begun if prompt[: len(start)] == start]
        if known:
            places.append(max(map(len, known)) - 1)
        elif end_id in prompt:
            place = len(prompt) - 1 - prompt[::-1].index(end_id)
            begun.append(prompt[: place + 1])
            places.append(place)
        else:  # not made of messages
            places.append(None)
    return places


def insert_hints(
    prompts: Sequence[TokenIds], hint_ids: Sequence[int], end_id: int
) -> list[TokenIds | None]:
    """Return each prompt of a rollout with the hint in it, None if it has no place for one."""
    return [
        None if place is None else (*prompt[:place], *hint_ids, *prompt[place:])
        for prompt, place in zip(prompts, hint_places(prompts, end_id), strict=True)
    ]


def with_hints(
    sequences: Sequence[TrainingSequence], hinted: HintedPrompts
) -> list[TrainingSequence]:
    """Return the sequences with the teacher's prompts. Without one, a sequence has no teacher."""
    return [_with_hint(sequence, hinted) for sequence in sequences]


def _with_hint(sequence: TrainingSequence, hinted: HintedPrompts) -> TrainingSequence:
    if sequence.rollout is None:
        return replace(sequence, teacher_coef=0.0)
    prompt = hinted.get((sequence.rollout, sequence.prompt_token_ids))
    if prompt is None:
        return replace(sequence, teacher_coef=0.0)
    return replace(sequence, teacher_prompt_ids=prompt)
