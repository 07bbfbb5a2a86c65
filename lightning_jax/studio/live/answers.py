"""Answers of the live page's API as values for JSON. All texts in them are safe to print."""

import time
from collections.abc import Mapping, Sequence

from pydantic_core import to_json

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.sessions.open_rollouts import RolloutActivity
from lightning_jax.rollouts.results.failures import Failure
from lightning_jax.studio import DEFAULT_LIMIT
from lightning_jax.studio.comparison import compare_groups, settings_table
from lightning_jax.studio.live.catalog import Catalog, WatchedRun
from lightning_jax.studio.live.overview import find_worst_group, learning, task_names
from lightning_jax.studio.live.search import search_transcripts
from lightning_jax.studio.page import render_page
from lightning_jax.studio.records import (
    MAX_NAME_CHARS,
    CallView,
    Json,
    RolloutRow,
    RolloutView,
    as_json,
    attempt_view,
    cut,
)
from lightning_jax.system.text import printable
from lightning_jax.traces.listing import Filter, Order, StoreListing
from lightning_jax.train.watch.curves import warmup_steps
from lightning_jax.types import PHASES, Rollout

MAX_PAGE = 200  # rows of one answer
MAX_ATTEMPTS = 64  # of a group that are read in full
MAX_ANSWER_CHARS = 1500
MAX_RUNNING = 20
MAX_RUNS = 16  # in a comparison
MAX_CALLS = 6  # last ones of an attempt that are compared
LINES = 200  # of a file, read at once


# Runs


def runs_answer(catalog: Catalog) -> Json:
    """Return all runs, newest first, and the settings in which they differ."""
    runs = catalog.summaries()
    differing: list[Json] = []
    if len(runs) > 1:
        # Unique names: two folders may hold runs of one name.
        table = settings_table([[run] for run in runs], [run.key for run in runs])
        differing = [{"name": name, "values": values} for name, *values in table.rows]
    return {"runs": as_json(runs), "settings": differing}


def run_answer(run: WatchedRun) -> Json:
    """Return one run: its summary, settings, steps, and failures by reason."""
    summary = run.summary()
    with run.listing() as listing:
        worst_group = find_worst_group(listing, summary)
        steps = {f"{phase}_steps": listing.steps(phase) for phase in PHASES}
        failures = [
            Failure(status, reason, number, example, cut(detail or "", 300))
            for status, reason, number, example, detail in listing.failures()
        ]
    return as_json(summary) | {
        "learning": as_json(learning(summary)),
        "warmup_steps": warmup_steps(summary.rows),
        "worst_group": worst_group,
        "metrics": sorted({name for row in summary.rows for name in row} - {"step"}),
        **steps,
        "failures": as_json(failures),
        "settings": [
            {"name": name, "value": printable(str(value))}
            for name, value in summary.settings.items()
        ],
    }


def metrics_answer(run: WatchedRun, names: Sequence[str]) -> Json:
    """Return columns of the run's metrics, with None where a row lacks one, and the axes."""
    summary = run.summary()
    return {
        "steps": [row["step"] for row in summary.rows],
        "samples": summary.spent("samples"),
        "minutes": summary.spent("minutes"),
        "columns": {name: [row.get(name) for row in summary.rows] for name in names},
    }


def live_answer(
    run: WatchedRun,
    server: Json | None = None,
    rollouts: Sequence[RolloutActivity] | None = None,
) -> Json:
    """Return what runs now: rollouts, longest first, and the numbers of the last step.

    `server` has the numbers of the run's own server, and `rollouts` those that are open there, if
    this is that server. Otherwise running rollouts come from the store, which has the start of a
    rollout only once a call or tool of it has ended.
    """
    summary, now_ns = run.summary(), time.time_ns()
    with run.listing() as listing:
        if rollouts is None:
            running = [(rollout, start, {}) for rollout, start in listing.running(MAX_RUNNING)]
            is_whole = len(running) < MAX_RUNNING
            number = len(running) if is_whole else listing.number(Filter(status="running"))
        else:
            running = [
                (rollout, now.start_ns, {"calls": now.num_calls, "tokens": now.num_tokens})
                for now in rollouts[:MAX_RUNNING]
                if (rollout := listing.rollout(now.rollout_id)) is not None
            ]
            number = len(rollouts)
        names = task_names(listing, [rollout for rollout, _, _ in running])
    ages = [None if start is None else max(now_ns - start, 0) / 1e9 for _, start, _ in running]
    return {
        "status": summary.status,
        "running": [
            as_json(RolloutRow(rollout, names[rollout.rollout_id], age)) | more
            for (rollout, _, more), age in zip(running, ages, strict=True)
        ],
        "num_running": number,
        "server": server,
        "last": summary.rows[-1] if summary.rows else {},
    }


# Lists of a run


def search_answer(run: WatchedRun, text: str, query: Filter, cursor: int | None) -> Json:
    """Search transcripts for a few seconds. With the cursor, a later request continues."""
    with run.listing() as listing:
        result = search_transcripts(run.reader, listing, text, query, cursor=cursor)
        with run.reader() as reader:
            _, why_no_text = reader.tokenizer
        rollouts = [listing.rollout(match.rollout_id) for match in result.matches]
        rows = rollout_rows(listing, [rollout for rollout in rollouts if rollout])
        by_id = {row.rollout.rollout_id: as_json(row) for row in rows}
        return {
            "matches": [
                by_id[match.rollout_id] | as_json(match)
                for match in result.matches
                if match.rollout_id in by_id
            ],
            "searched": result.num_searched,
            "cut": result.num_cut,
            "cursor": result.cursor,
            "total": listing.number(query),
            "notes": [why_no_text] if why_no_text else [],
        }


def groups_answer(run: WatchedRun, query: Filter, order: Order, *, limit: int, offset: int) -> Json:
    """Return a page of groups with the rewards of all their attempts."""
    with run.listing() as listing:
        rows = listing.groups(query, order, limit=limit, offset=offset)
        groups = []
        for row in rows:
            attempts = listing.rollouts(Filter(group_id=row.group_id), limit=MAX_ATTEMPTS)
            name = next(iter(task_names(listing, attempts[:1]).values()), "")
            views = list(map(attempt_view, attempts))
            groups.append(as_json(row) | as_json({"task_name": name, "attempts": views}))
        return {"groups": groups, "total": listing.num_groups(query), "offset": offset}


def rollouts_answer(run: WatchedRun, query: Filter, *, limit: int, offset: int) -> Json:
    """Return a page of rollouts, newest step first, without their transcripts."""
    with run.listing() as listing:
        rollouts = listing.rollouts(query, limit=limit, offset=offset)
        return {
            "rollouts": as_json(rollout_rows(listing, rollouts)),
            "total": listing.number(query),
            "offset": offset,
        }


def rollout_rows(listing: StoreListing, rollouts: Sequence[Rollout]) -> list[RolloutRow]:
    """Return the rollouts with their tasks' names and how long they took."""
    names = task_names(listing, rollouts)
    seconds = listing.seconds(list(names))
    return [
        RolloutRow(rollout, names[rollout.rollout_id], seconds.get(rollout.rollout_id))
        for rollout in rollouts
    ]


def group_answer(run: WatchedRun, group_id: str) -> Json:
    """Return all attempts of a group beside one another, without their transcripts."""
    with run.listing() as listing:
        attempts = listing.rollouts(Filter(group_id=group_id), limit=MAX_ATTEMPTS)
        tasks = listing.tasks([attempt.rollout_id for attempt in attempts[:1]])
        rows = rollout_rows(listing, attempts)
    fields = next(iter(tasks.values()), {})
    task = [(cut(name, MAX_NAME_CHARS), text) for name, text in fields.items()]
    return as_json({"group_id": group_id, "task": task, "attempts": rows})


def group_texts_answer(run: WatchedRun, group_id: str) -> Json:
    """Return the responses that tell a group's attempts apart, and the advantages of each."""
    with run.listing() as listing:
        attempts = listing.rollouts(Filter(group_id=group_id), limit=MAX_ATTEMPTS)
    views = {}
    for attempt in attempts:
        with run.reader() as reader:
            views[attempt.rollout_id] = reader.rollout(attempt.rollout_id)
    earning = earning_calls(views)
    return {
        "attempts": {
            rollout_id: {
                "parts": [
                    {
                        "number": call.number,
                        "who": cut(call.role or call.agent or call.answered_by, MAX_NAME_CHARS),
                        "reward": call.reward,
                        "response": cut(call.response, MAX_ANSWER_CHARS),
                    }
                    for call in earning[rollout_id]
                ],
                "num_calls": len(view.calls),
                "advantages": [call.credit.advantage for call in view.calls if call.credit],
                "notes": list(view.notes),
            }
            for rollout_id, view in views.items()
        }
    }


def earning_calls(attempts: Mapping[str, RolloutView]) -> dict[str, list[CallView]]:
    """Return the calls to show of each attempt, in order.

    These are the last call of each agent and role, and calls with a reward of their own. If they
    read the same in attempts with different rewards, such as a verdict at the end, add as many
    earlier calls as it takes until they differ.
    """

    def choose(number: int) -> dict[str, list[CallView]]:
        return {name: _last_calls(view, number) for name, view in attempts.items()}

    choices = map(choose, range(1, MAX_CALLS + 1))
    clear = (chosen for chosen in choices if not _is_ambiguous(chosen, attempts))
    return next(clear, None) or choose(1)


def _last_calls(view: RolloutView, number: int) -> list[CallView]:
    """Return the last calls, the last one of each agent and role, and those with a reward."""
    calls = sorted(view.calls, key=lambda call: call.number)
    last = {(call.agent, call.role, call.answered_by): call.number for call in calls}
    numbers = {*last.values(), *(call.number for call in calls[-number:])}
    return [call for call in calls if call.number in numbers or call.reward]


def _is_ambiguous(
    chosen: Mapping[str, list[CallView]], attempts: Mapping[str, RolloutView]
) -> bool:
    """Return whether the same texts earned different rewards."""
    rewards: dict[tuple[str, ...], set[float | None]] = {}
    for name, calls in chosen.items():
        texts = tuple(call.response for call in calls)
        rewards.setdefault(texts, set()).add(attempts[name].rollout.reward)
    return any(len(values) > 1 for values in rewards.values())


# One rollout


def rollout_answer(run: WatchedRun, rollout_id: str) -> Json:
    """Return one rollout as a tree in time, with its task, rewards and neighbors."""
    with run.reader() as reader:
        view = reader.rollout(rollout_id)
    with run.listing() as listing:
        neighbors = listing.neighbors(view.rollout)
        group = listing.rollouts(Filter(group_id=view.rollout.group_id), limit=MAX_ATTEMPTS)
    attempts = as_json(list(map(attempt_view, group)))
    return as_json(view) | {"neighbors": neighbors, "attempts": attempts}


# Comparisons


def compare_answer(groups: Sequence[Sequence[WatchedRun]]) -> Json:
    """Compare the groups with the first one. Runs of one group are seeds of one experiment.

    Raises InvalidValue for fewer than two groups or too many runs, ConfigError if a run is given
    twice.
    """
    num_runs = sum(map(len, groups))
    if len(groups) < 2 or num_runs > MAX_RUNS:
        raise InvalidValue.out_of_range(
            "group",
            f"{num_runs} runs in {len(groups)} groups cannot be compared; choose 2 to {MAX_RUNS} "
            "runs in at least two groups.",
        )
    return as_json(compare_groups([[run.summary() for run in group] for group in groups]))


# Files


def run_page(run: WatchedRun, query: Filter) -> str:
    """Return one HTML page with the newest rollouts of a phase or a step, and their details."""
    with run.reader() as reader:
        view = reader.run(phase=query.phase, step=query.step, limit=DEFAULT_LIMIT)
        return render_page(view, [reader.rollout(row.rollout.rollout_id) for row in view.rows])


def rollout_page(run: WatchedRun, rollout_id: str) -> str:
    """Return one HTML page with one rollout."""
    with run.reader() as reader:
        return render_page(None, [reader.rollout(rollout_id)])


def jsonl_keys(run: WatchedRun, query: Filter) -> list[Sequence[int]]:
    """Return the keys of the matching rollouts in parts for `jsonl_lines`."""
    with run.listing() as listing:
        keys = listing.keys(query)
    return [keys[start : start + LINES] for start in range(0, len(keys), LINES)]


def jsonl_lines(run: WatchedRun, keys: Sequence[int]) -> bytes:
    """Return the rollouts with these keys as lines of JSON."""
    with run.listing() as listing:
        rollouts = listing.by_keys(keys)
        tasks = listing.tasks([rollout.rollout_id for rollout in rollouts])
        rows = rollout_rows(listing, rollouts)
    lines = [
        as_json(row) | {"task": as_json(tasks.get(row.rollout.rollout_id, {}), max_chars=0)}
        for row in rows
    ]
    return b"".join(to_json(line, inf_nan_mode="null") + b"\n" for line in lines)
