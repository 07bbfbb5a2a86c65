"""Teacher of a run: a model that scores what the policy sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from lightning_jax.models.config import ModelConfig
from lightning_jax.models.formats.load import LoadedModel, open_configured
from lightning_jax.models.lora import open_policy
from lightning_jax.models.model_files import ModelError
from lightning_jax.models.policies import Policy
from lightning_jax.models.sharding import param_shardings, put_on_mesh
from lightning_jax.rl.config import BatchConfig, DistillConfig
from lightning_jax.rl.distill import Scores, make_scorer
from lightning_jax.rl.sequence import TrainingSequence


@dataclass(frozen=True)
class Teacher:
    """Teacher, wherever it is. `close` releases what it holds outside of this process."""

    score: Callable[[Sequence[TrainingSequence]], Scores]
    close: Callable[[], None] = lambda: None


def load_teacher(
    model: LoadedModel,
    teacher: Policy | None,
    distill: DistillConfig,
    settings: ModelConfig,
    batch: BatchConfig,
    mesh: Mesh,
) -> Teacher | None:
    """Load the `teacher` or connect to the one that `distill` names. Return None without any.

    A policy that a run exported scores as that run served it, and the initial model as the trainer
    reads it. The teacher may have another shape than `model`. Raises ModelError if its vocabulary
    is another one, and TeacherError if a server cannot score tokens.
    """
    num_ids = model.config.shape.vocab_size
    if distill.teacher_url is not None:
        from lightning_jax.train.state.remote_teacher import connect  # imports openai

        remote = connect(distill, model.tokenizer, num_ids)
        return Teacher(remote.score, remote.close)
    if teacher is None:
        return None
    open_model = open_configured if teacher.base is None else open_policy
    named = ModelConfig(teacher.base or model.name, settings.dtype, settings.activation_dtype)
    loaded = open_model(named).load()
    check_vocabulary(loaded, model)
    params = put_on_mesh(loaded.params, param_shardings(loaded.config, mesh), donate=True)
    scorer = make_scorer(
        loaded.config,
        batch,
        mesh=mesh,
        dtype=settings.dtype,
        top_k=distill.num_top,
        num_ids=num_ids,
    )
    # It has no adapters for several policies.
    return Teacher(lambda items: scorer(params, [replace(item, adapter=None) for item in items]))


def check_vocabulary(teacher: LoadedModel, model: LoadedModel) -> None:
    """Raise ModelError unless the teacher reads the token ids of `model` as the same tokens."""
    is_same = teacher.tokenizer.vocabulary == model.tokenizer.vocabulary
    if not is_same or teacher.config.shape.vocab_size < model.config.shape.vocab_size:
        raise ModelError.mismatch(
            "distill.teacher",
            f"the teacher {teacher.name!r} has another vocabulary than {model.name!r}, so it "
            "cannot score its tokens; set distill.teacher to a model with the same tokenizer.",
        )
