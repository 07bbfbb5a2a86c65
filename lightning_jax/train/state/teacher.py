"""Teacher of a run: a model that scores what the policy sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from lightning_jax.models.formats.load import LoadedModel, load_model
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.sharding import param_shardings, put_on_mesh
from lightning_jax.models.transformer import Params
from lightning_jax.rl.distill import Scores, TeacherScorer, make_scorer
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.updater import Updater
from lightning_jax.train.config import Config


@runtime_checkable
class ScoresTokens(Protocol):
    """Teacher, wherever it is."""

    def score(self, sequences: Sequence[TrainingSequence]) -> Scores:
        """Return the scores of each sequence."""
        ...

    def close(self) -> None:
        """Release what the teacher holds outside of this process."""
        ...


@dataclass(frozen=True)
class Teacher:
    """Weights of the teacher on the training mesh, and its forward pass."""

    params: Params
    scorer: TeacherScorer

    def score(self, sequences: Sequence[TrainingSequence]) -> Scores:
        """Return the scores of each sequence. The teacher has no adapters for several policies."""
        return self.scorer(self.params, [replace(item, adapter=None) for item in sequences])

    def close(self) -> None:
        """Do nothing: it holds nothing outside of this process."""


def load_teacher(config: Config, model: LoadedModel) -> ScoresTokens | None:
    """Load the teacher that `distill` names or connect to it. Return None if it names none.

    It may have another shape than `model`. Raises ModelError if it has another vocabulary, and
    TeacherError if a server cannot score tokens.
    """
    if config.distill.teacher_url is not None:
        from lightning_jax.train.state.remote_teacher import connect  # imports openai

        return connect(config.distill, model.tokenizer, model.config.shape.vocab_size)
    name = config.teacher_model
    if name is None:
        return None
    teacher = load_model(name, config.model.dtype, config.model.activation_dtype)
    check_vocabulary(teacher, model)
    mesh = make_mesh(config.mesh)
    params = put_on_mesh(teacher.params, param_shardings(teacher.config, mesh), donate=True)
    scorer = make_scorer(
        teacher.config,
        config.batch,
        mesh=mesh,
        dtype=config.model.dtype,
        top_k=config.distill.num_top,
        num_ids=model.config.shape.vocab_size,
    )
    return Teacher(params, scorer)


def score_by_policy(
    learner: Updater, params: Params, sequences: Sequence[TrainingSequence], top_k: int
) -> Scores:
    """Return the scores of each sequence by the policy's own weights, which read the hints."""
    scorer = TeacherScorer(learner.functions.scores_fn, learner.batch, learner.mesh, top_k)
    return scorer(params, sequences)


def check_vocabulary(teacher: LoadedModel, model: LoadedModel) -> None:
    """Raise ModelError unless the teacher reads the token ids of `model` as the same tokens."""
    is_same = teacher.tokenizer.vocabulary == model.tokenizer.vocabulary
    if not is_same or teacher.config.shape.vocab_size < model.config.shape.vocab_size:
        raise ModelError(
            f"the teacher {teacher.name!r} has another vocabulary than {model.name!r}, so it "
            "cannot score its tokens; set distill.teacher to a model with the same tokenizer.",
            reason="mismatch",
            key="distill.teacher",
        )
