"""Record of what searches for prompts chose: PROMPTS in the run directory."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

from lightning_jax.system.files import write_whole
from lightning_jax.train.directory import PROMPTS
from lightning_jax.train.state.resume import first_discarded


@dataclass(frozen=True)
class Chosen:
    """Prompts that a search chose, and their mean reward on its dev tasks before and after.

    A number is None if the search did not get that far. The fresh tasks compare the earlier prompts
    with the best of the search.
    """

    step: int
    prompts: Mapping[str, str]
    score_before: float | None = None
    score_after: float | None = None
    num_fresh_tasks: int | None = None
    fresh_before: float | None = None
    fresh_after: float | None = None
    p_value: float | None = None  # of the sign test: that equal prompts win so often


def read_chosen(directory: Path) -> list[Chosen]:
    """Return what the searches of a run chose, by step."""
    try:
        entries = yaml.safe_load((directory / PROMPTS).read_text()) or []
    except FileNotFoundError:
        return []
    return [Chosen(**entry) for entry in entries]


def write_chosen(directory: Path, chosen: Sequence[Chosen]) -> None:
    """Save what the searches of a run chose."""
    text = yaml.safe_dump([asdict(entry) for entry in chosen], sort_keys=False, allow_unicode=True)
    write_whole(directory / PROMPTS, text)


def forget_chosen(directory: Path, changed: Sequence[str], step: int) -> None:
    """Delete what searches chose for steps and prompts of another run.

    `changed` are the settings and sources that changed before the run resumes at `step`. Steps
    whose stored rollouts are discarded are searched again. A prompt with a new text in the settings
    begins with that text.
    """
    names = {key.removeprefix("prompts.") for key in changed if key.startswith("prompts.")}
    first, entries = first_discarded(changed, step), read_chosen(directory)
    kept = [
        replace(entry, prompts={k: text for k, text in entry.prompts.items() if k not in names})
        for entry in entries
        if entry.step < first
    ]
    if changed and kept != entries:
        write_chosen(directory, kept)


def present_prompts(
    prompts: Mapping[str, str], chosen: Sequence[Chosen], step: int | None = None
) -> dict[str, str]:
    """Return the prompts of the settings, with those chosen up to `step`, by default the last."""
    present = dict(prompts)
    for entry in chosen:
        if step is None or entry.step <= step:
            present |= {name: text for name, text in entry.prompts.items() if name in present}
    return present
