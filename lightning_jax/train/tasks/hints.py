"""Hints of a run: a function's text for each task, placed in the prompts that the teacher reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.config import DistillConfig
from lightning_jax.rl.distill import TokenIds, insert_hints, weigh_teacher, with_hints
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.settings.loading import load_function
from lightning_jax.system.text import has_words
from lightning_jax.train.hook import Hook, UpdateInput
from lightning_jax.types import Metrics, Task, Trajectory

KEY = "distill.hint"
BREAK = "\n\n"  # between the message and the hint


class HintError(UserError, ValueError):
    """Error raised when a hint cannot be used. The message is one sentence."""


@dataclass(frozen=True)
class Hints:
    """Function that gives a task's hint, and the tokenizer that places it."""

    reference: str  # FILE:FUNCTION
    function: Callable[[Task], Any]
    tokenizer: Tokenizer
    end_id: int  # ends a message of the chat template

    def text(self, task: Task) -> str:
        """Return the stripped hint of a task, "" if the task has none.

        Raises HintError if the function raises or returns no string.
        """
        try:
            text = self.function(task)
        except Exception as error:  # foreign code
            raise HintError(
                f"{self.reference} raised {type(error).__name__} for the task {task.get('id')!r}: "
                f"{str(error) or 'no message'}; let it return a string for every task.",
                reason="failed",
                key=KEY,
            ) from error
        if not isinstance(text, str):
            raise HintError.wrong_type(
                KEY,
                f"{self.reference} returned a {type(text).__name__} for the task "
                f"{task.get('id')!r}; let it return a string, empty for a task without a hint.",
            )
        return text.strip()

    def add(
        self,
        sequences: Sequence[TrainingSequence],
        trajectories: Sequence[Trajectory],
        tasks: Mapping[str, Task],
    ) -> tuple[list[TrainingSequence], Metrics]:
        """Return (the sequences with the prompts that the teacher reads, metrics).

        `trajectories` are those that the sequences were made from, and `tasks` the task of each
        group. Raises HintError for a hint in the first prompt of a rollout.
        """
        texts = {group: self.text(tasks[group]) for group in {t.group_id for t in trajectories}}
        hinted: dict[tuple[int, TokenIds], TokenIds] = {}
        num_known = 0
        for index, trajectory in enumerate(trajectories):
            prompts = [call.prompt_token_ids for call in trajectory.transitions]
            text = texts[trajectory.group_id]
            if not (prompts and text):
                continue
            in_prompts = [has_words(self.tokenizer.decode(prompt), text) for prompt in prompts]
            if in_prompts[0]:
                self._refuse(tasks[trajectory.group_id])
            num_known += sum(in_prompts)
            hint_ids = self.tokenizer.encode(BREAK + text, special=False)
            for prompt, with_hint in zip(
                prompts, insert_hints(prompts, hint_ids, self.end_id), strict=True
            ):
                if with_hint is not None:
                    hinted[index, prompt] = with_hint
        hinted_sequences = with_hints(sequences, hinted)
        num_without = sum(not sequence.teacher_prompt_ids for sequence in hinted_sequences)
        return hinted_sequences, {
            "train/without_hint": float(num_without),
            "train/hints_in_prompts": float(num_known),
        }

    def _refuse(self, task: Task) -> None:
        raise HintError(
            f"the hint that {self.reference} returned for the task {task.get('id')!r} is in the "
            "prompt that the policy itself read, so the teacher knows nothing more; keep it out of "
            "the agent's messages, or write it as a sentence of its own.",
            reason="leak",
            key=KEY,
        )


class TeacherWeights(Hook):
    """Weights of a teacher's scores beside the rewards, and its hints, in each policy step.

    Nothing changes without a teacher.
    """

    def __init__(self, distill: DistillConfig, first_step: int, hints: Hints | None) -> None:
        """`first_step` is the first policy step."""
        self._distill, self._first_step, self._hints = distill, first_step, hints

    def before_update(
        self, step: int, update: UpdateInput
    ) -> tuple[Sequence[TrainingSequence], Metrics]:
        distill = self._distill
        if step < self._first_step or not distill.has_teacher:
            return update.sequences, {}
        coef = distill.coef_at(step - self._first_step)
        sequences = weigh_teacher(
            update.sequences, coef=coef, reward_coef=distill.reward_coef, kl=distill.kl
        )
        metrics: Metrics = {"train/teacher_coef": coef}
        if self._hints is not None and coef > 0:
            sequences, of_hints = self._hints.add(sequences, update.trajectories, update.tasks)
            metrics |= of_hints
        return sequences, metrics


def make_hints(reference: str | None, tokenizer: Tokenizer, tasks: Sequence[Task]) -> Hints | None:
    """Load the function that `distill.hint` names, or return None without one.

    Try it on the first task. Raises UserError if the function or the chat template is unsuitable.
    """
    if reference is None:
        return None
    hints = Hints(reference, load_function(reference), tokenizer, end_of_message(tokenizer))
    for task in tasks[:1]:
        hints.text(task)
    return hints


def end_of_message(tokenizer: Tokenizer) -> int:
    """Return the token that the chat template puts after a user's message.

    Raises HintError if that is not a token of its own.
    """
    words = "end-of-message"
    text = tokenizer.render_chat([{"role": "user", "content": words}])
    after = tokenizer.encode(text.rpartition(words)[2])
    if not after or after[0] not in tokenizer.added_ids:
        raise HintError.unsupported(
            KEY,
            "the chat template ends a user's message with ordinary text, so a hint has no certain "
            "place in a prompt; use a model whose template ends messages with a special token.",
        )
    return after[0]
