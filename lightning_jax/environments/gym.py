"""Tasks of the `reasoning-gym` package, scored by its own verifiers.

A family makes any number of tasks from a seed, at levels of difficulty. `load` is a loader for
`data.load`, and `score` gives the reward of a reply. A task names its family, level, seed and
index, and `score` generates it again: verifiers read fields that JSON would change.

The package (extra `gym`) is imported when it is first used, which takes seconds.
"""

import contextlib
import difflib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_jax.errors import UserError
from lightning_jax.settings.loading import import_optional
from lightning_jax.types import Task

MAX_SIZE = 2**20  # tasks of a level; seeds of levels and splits are this far apart
DEV_SEED = 2**28  # added to the seed for evaluation
FIRST_LEVELS = (0, 1, 2)  # what `lightning-jax new --env gym:NAME` offers
COMBINED = {"composite"}  # needs a list of other families


def load(
    root: str | Path | None,
    split: str,
    cache_dir: Path,
    *,
    family: str,
    levels: Sequence[int] = FIRST_LEVELS,
    size: int = 200,
    dev_size: int = 20,
    seed: int = 0,
) -> tuple[list[Task], dict[str, int]]:
    """Return `size` tasks of each level, or `dev_size` for evaluation, and the numbers left out.

    Tasks have the fields `question`, `answer` and `level`. Repeated questions are used once, and
    questions of the dev split are not trained on. Raises UserError for an unknown family or level.
    """
    generated = _generate(family, levels, split, size, dev_size, seed)
    by_question: dict[str, Task] = {}
    for task in filter(None, generated):
        by_question.setdefault(task["question"], task)
    dropped = Counter(not_generated=generated.count(None))
    dropped["repeated"] = len(generated) - dropped["not_generated"] - len(by_question)
    if split == "train":
        dev_tasks = _generate(family, levels, "dev", size, dev_size, seed)
        for question in {task["question"] for task in dev_tasks if task} & by_question.keys():
            del by_question[question]
            dropped["in_dev"] += 1
    return list(by_question.values()), {k: number for k, number in dropped.items() if number}


def score(task: Mapping[str, Any], reply: str) -> float:
    """Return the reward of a reply, in [0, 1], by the family's own verifier.

    Raises UserError if this version of the package does not generate the task.
    """
    origin = task["gym"]
    dataset = _dataset(origin["family"], origin["level"], origin["seed"], origin["size"])
    entry = dataset[origin["index"]]
    if entry["question"] != task["question"]:
        raise UserError(
            f"reasoning-gym does not generate the task {task['id']!r} again; use the version with "
            "which the run began.",
            reason="changed",
            key=task["id"],
        )
    return float(dataset.score_answer(reply.strip(), entry))


def families() -> list[str]:
    """Return the names of all families."""
    return sorted(set(_package("reasoning_gym.factory").DATASETS) - COMBINED)


def num_levels(family: str) -> int:
    """Return the number of levels of a family, 1 if it has no curriculum."""
    _check_family(family)
    factory = _package("reasoning_gym.factory")
    if not factory.has_curriculum(family):
        return 1
    attributes = factory.create_curriculum(family).attributes.values()
    return max((len(attribute.levels) for attribute in attributes), default=1)


def descriptions() -> dict[str, str]:
    """Return the first line of each family's description, which may be empty, by its name."""
    datasets = _package("reasoning_gym.factory").DATASETS
    texts = {name: (datasets[name][0].__doc__ or "").strip() for name in families()}
    return {name: text.partition("\n")[0].rstrip(".:") for name, text in texts.items()}


def first_tasks(family: str) -> dict[int, list[Task]]:
    """Return a few tasks of each of the first levels that yield one."""
    by_level = {}
    for level in FIRST_LEVELS[: num_levels(family)]:
        with contextlib.suppress(UserError):
            by_level[level] = list(filter(None, _of_level(family, level, 0, 4, "train")))
    return by_level


def _generate(
    family: str, levels: Sequence[int], split: str, size: int, dev_size: int, seed: int
) -> list[Task | None]:
    """Return the tasks of a split, and None for those that the generator gave up on."""
    number = size if split == "train" else dev_size
    if not 0 < number <= MAX_SIZE:
        name = "size" if split == "train" else "dev_size"
        raise UserError.out_of_range(
            f"data.options.{name}", f"data.options.{name} is {number}; expected 1 to {MAX_SIZE}."
        )
    first = seed + (DEV_SEED if split == "dev" else 0)
    tasks: list[Task | None] = []
    for level in levels:
        tasks += _of_level(family, level, first + level * MAX_SIZE, number, split)
    return tasks


def _of_level(family: str, level: int, seed: int, size: int, split: str) -> list[Task | None]:
    """Return the tasks of a level. Raises UserError if the generator makes none of them."""
    dataset, tasks, failure = _dataset(family, level, seed, size), [], None
    for index in range(size):
        try:
            entry = dataset[index]
        except Exception as error:  # noqa: BLE001 - foreign code, such as no puzzle found
            failure = error
            tasks.append(None)
            continue
        answer = entry["answer"]
        origin = {"family": family, "level": level, "seed": seed, "size": size, "index": index}
        tasks.append(
            {
                "id": f"{family}-{split}-{level}-{index}",
                "question": entry["question"],
                "answer": answer if answer is None else str(answer),
                "level": level,
                "gym": origin,
            }
        )
    if failure is not None and not any(tasks):
        raise _unusable(family, level, failure) from failure
    return tasks


@lru_cache(maxsize=64)
def _dataset(family: str, level: int, seed: int, size: int) -> Any:
    """Return a family's data set at a level. It generates tasks when they are read."""
    highest = num_levels(family) - 1
    if not 0 <= level <= highest:
        raise UserError.out_of_range(
            "data.options.levels",
            f"{family} has no level {level}; use 0 to {highest} in data.options.levels.",
        )
    factory = _package("reasoning_gym.factory")
    dataset_class, config_class = factory.DATASETS[family]
    options = {"seed": seed, "size": size}
    try:
        if factory.has_curriculum(family):
            curricula = _package("reasoning_gym.coaching.base_curriculum")
            only_this = curricula.DefaultCurriculumContext(
                mode=curricula.RangeAttributeMode.UPPER_BOUND
            )
            curriculum = factory.create_curriculum(family)
            curriculum.set_global_level(level)
            config = curriculum.generate_configuration(options, context=only_this)
        else:
            config = config_class(**options)
        return dataset_class(config=config)
    except Exception as error:  # levels that the family's own check refuses
        raise _unusable(family, level, error) from error


def _check_family(family: str) -> None:
    names = families()
    if family in names:
        return
    close = difflib.get_close_matches(family, names, 3, cutoff=0.4)
    close = close or [name for name in names if family in name][:3]
    meant = f"did you mean {', '.join(close)}?" if close else "see the package's gallery."
    raise UserError.unknown(family, f"reasoning-gym has no task family {family!r}; {meant}")


def _unusable(family: str, level: int, error: Exception) -> UserError:
    text = str(error) or type(error).__name__
    return UserError(
        f"{family} makes no tasks at level {level} ({text}); leave it out of data.options.levels.",
        reason="unusable",
        key="data.options.levels",
    )


def _package(module: str) -> ModuleType:
    """Import a module of reasoning-gym. Raises UserError if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a requirement of it has old code
        import_optional("reasoning_gym", "reasoning-gym")  # registers the families
        return import_optional(module, "reasoning-gym")
