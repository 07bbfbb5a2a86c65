"""Files that the live page offers: the page that `view --html` writes, and JSON lines."""

from collections.abc import Mapping, Sequence

from pydantic_core import to_json

from lightning_jax.studio import DEFAULT_LIMIT
from lightning_jax.studio.live.answers import rollout_lines
from lightning_jax.studio.live.catalog import WatchedRun
from lightning_jax.studio.page import render_page
from lightning_jax.system.text import printable
from lightning_jax.traces.listing import Filter

LINES = 200  # read at once


def run_page(run: WatchedRun, wanted: Filter) -> str:
    """Return one HTML page with the newest rollouts of a phase or a step, and their details."""
    with run.reader() as reader:
        view = reader.run(phase=wanted.phase, step=wanted.step, limit=DEFAULT_LIMIT)
        return render_page(view, [reader.rollout(row.rollout.rollout_id) for row in view.rows])


def rollout_page(run: WatchedRun, rollout_id: str) -> str:
    """Return one HTML page with one rollout."""
    with run.reader() as reader:
        return render_page(None, [reader.rollout(rollout_id)])


def jsonl_keys(run: WatchedRun, wanted: Filter) -> list[Sequence[int]]:
    """Return the keys of the matching rollouts in parts for `jsonl_lines`."""
    with run.listing() as listing:
        keys = listing.keys(wanted)
    return [keys[start : start + LINES] for start in range(0, len(keys), LINES)]


def jsonl_lines(run: WatchedRun, keys: Sequence[int]) -> bytes:
    """Return the rollouts with these keys as lines of JSON."""
    with run.listing() as listing:
        rollouts = listing.by_keys(keys)
        tasks = listing.tasks([rollout.rollout_id for rollout in rollouts])
        lines = rollout_lines(listing, rollouts)
    return b"".join(
        to_json(line | {"task": _task(tasks, line["rollout_id"])}, inf_nan_mode="null") + b"\n"
        for line in lines
    )


def _task(tasks: Mapping[str, Mapping[str, str]], rollout_id: str) -> dict[str, str]:
    fields = tasks.get(rollout_id, {})
    return {printable(name): printable(text) for name, text in fields.items()}
