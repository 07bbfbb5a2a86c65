"""Answers of the live page's API as values for JSON. All texts in them are safe to print."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_jax.gateway.sessions.open_rollouts import RolloutActivity
from lightning_jax.rollouts.results.failures import Failure
from lightning_jax.studio.build import task_name
from lightning_jax.studio.compare_runs import settings_table
from lightning_jax.studio.live.catalog import Catalog, WatchedRun
from lightning_jax.studio.live.overview import find_worst_group, learning, task_names
from lightning_jax.studio.page import MAX_ATTRIBUTE_CHARS, MAX_CHARS, MAX_SPANS, MAX_TOKENS
from lightning_jax.studio.parts import earning_calls
from lightning_jax.studio.records import CallView, RolloutView, SpanView
from lightning_jax.studio.runs import RunSummary, rewards_of
from lightning_jax.studio.search import search_transcripts
from lightning_jax.studio.terminal import facts
from lightning_jax.studio.text import cut
from lightning_jax.system.text import printable
from lightning_jax.traces.listing import Filter, Order, StoreListing
from lightning_jax.train.curves import warmup_steps
from lightning_jax.types import PHASES, Rollout

Json = dict[str, Any]

MAX_PAGE = 200  # rows of one answer
MAX_ATTEMPTS = 64  # of a group that are read in full
MAX_TOKEN_CHARS = 500
MAX_RESPONSE_CHARS = 100_000
MAX_SHARED_CHARS = 2000
MAX_NAME_CHARS = 300  # of ids, reasons and names of numbers
MAX_ANSWER_CHARS = 1500
MAX_RUNNING = 20


# Runs


def runs_answer(catalog: Catalog) -> Json:
    """Return all runs, newest first, and the settings in which they differ."""
    pairs = catalog.summaries()
    runs = [run_line(run, summary) for run, summary in pairs]
    differing: list[Json] = []
    if len(pairs) > 1:
        # Unique names: two folders may hold runs of one name.
        table = settings_table([[summary] for _, summary in pairs], [run["key"] for run in runs])
        differing = [{"name": name, "values": values} for name, *values in table.rows]
    return {"runs": runs, "settings": differing}


def run_line(run: WatchedRun, summary: RunSummary) -> Json:
    """Return the status and the rewards of one run."""
    rewards, is_evaluated = rewards_of(summary)
    return {
        "key": run.key,
        "name": summary.name,
        "status": summary.status,
        "why": summary.why,
        "steps": summary.num_steps,
        "total_steps": summary.total_steps,
        "minutes": summary.minutes,
        "started_s": summary.started_s,
        "model": printable(str(summary.settings.get("model.name", ""))),
        "rollouts": dict(summary.rollouts),
        "failed_share": summary.failed_share,
        "is_evaluated": is_evaluated,
        "first": rewards[0] if rewards else None,
        "best": max(rewards, default=None),
        "last": rewards[-1] if rewards else None,
    }


def run_answer(run: WatchedRun) -> Json:
    """Return one run: its summary, settings, steps, and failures by reason."""
    summary = run.summary()
    with run.listing() as listing:
        worst_group = find_worst_group(listing, summary)
        steps = {phase: listing.steps(phase) for phase in PHASES}
        failures = [
            Failure(status, _name(reason), number, example, printable(cut(detail or "", 300)))
            for status, reason, number, example, detail in listing.failures()
        ]
    return run_line(run, summary) | {
        "learning": learning(summary),
        "warmup_steps": warmup_steps(summary.rows),
        "worst_group": worst_group,
        "metrics": sorted({name for row in summary.rows for name in row} - {"step"}),
        "train_steps": steps["train"],
        "eval_steps": steps["eval"],
        "sampled_steps": steps["sampled"],
        "probe_steps": steps["probe"],
        "prompt_steps": steps["prompt"],
        "failures": [asdict(failure) for failure in failures],
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
        if rollouts is not None:
            shown = [_open(listing, rollout, now_ns) for rollout in rollouts[:MAX_RUNNING]]
            running = [line for line in shown if line is not None]
        else:
            running = [
                _rollout(rollout) | {"seconds": None if start is None else (now_ns - start) / 1e9}
                for rollout, start in listing.running(MAX_RUNNING)
            ]
        number = len(running) if rollouts is None else len(rollouts)
        if rollouts is None and number == MAX_RUNNING:
            number = listing.number(Filter(status="running"))
    return {
        "status": summary.status,
        "running": running,
        "num_running": number,
        "server": server,
        "last": summary.rows[-1] if summary.rows else {},
    }


def _open(listing: StoreListing, activity: RolloutActivity, now_ns: int) -> Json | None:
    """Return one open rollout, or None if the store does not have it."""
    found = listing.rollout(activity.rollout_id)
    return found and _rollout(found) | {
        "seconds": max(now_ns - activity.start_ns, 0) / 1e9,
        "calls": activity.num_calls,
        "tokens": activity.num_tokens,
    }


# Lists of a run


def search_answer(run: WatchedRun, text: str, wanted: Filter, cursor: int | None) -> Json:
    """Search transcripts for a few seconds. With the cursor, a later request continues."""
    with run.listing() as listing:
        found = search_transcripts(run.reader, listing, text, wanted, cursor=cursor)
        with run.reader() as reader:
            _, why_no_text = reader.tokenizer
        rollouts = [listing.rollout(match.rollout_id) for match in found.matches]
        lines = rollout_lines(listing, [rollout for rollout in rollouts if rollout])
        by_id = {line["rollout_id"]: line for line in lines}
        return {
            "matches": [
                by_id[match.rollout_id] | asdict(match)
                for match in found.matches
                if match.rollout_id in by_id
            ],
            "searched": found.num_searched,
            "cut": found.num_cut,
            "cursor": found.cursor,
            "total": listing.number(wanted),
            "notes": [why_no_text] if why_no_text else [],
        }


def groups_answer(
    run: WatchedRun, wanted: Filter, order: Order, *, limit: int, offset: int
) -> Json:
    """Return a page of groups with the rewards of all their attempts."""
    with run.listing() as listing:
        rows = listing.groups(wanted, order, limit=limit, offset=offset)
        groups = []
        for row in rows:
            attempts = listing.rollouts(Filter(group_id=row.group_id), limit=MAX_ATTEMPTS)
            names = task_names(listing, attempts[:1])
            groups.append(
                asdict(row)
                | {
                    "task_name": names.get(attempts[0].rollout_id, "") if attempts else "",
                    "attempts": [_short(attempt) for attempt in attempts],
                }
            )
        return {"groups": groups, "total": listing.num_groups(wanted), "offset": offset}


def rollouts_answer(run: WatchedRun, wanted: Filter, *, limit: int, offset: int) -> Json:
    """Return a page of rollouts, newest step first, without their transcripts."""
    with run.listing() as listing:
        rollouts = listing.rollouts(wanted, limit=limit, offset=offset)
        return {
            "rollouts": rollout_lines(listing, rollouts),
            "total": listing.number(wanted),
            "offset": offset,
        }


def rollout_lines(listing: StoreListing, rollouts: Sequence[Rollout]) -> list[Json]:
    """Return the rollouts with their tasks' names and how long they took."""
    names = task_names(listing, rollouts)
    seconds = listing.seconds([rollout.rollout_id for rollout in rollouts])
    return [
        _rollout(rollout)
        | {
            "task_name": names.get(rollout.rollout_id, ""),
            "seconds": seconds.get(rollout.rollout_id),
        }
        for rollout in rollouts
    ]


def group_answer(run: WatchedRun, group_id: str) -> Json:
    """Return all attempts of a group beside one another, without their transcripts."""
    with run.listing() as listing:
        attempts = listing.rollouts(Filter(group_id=group_id), limit=MAX_ATTEMPTS)
        tasks = listing.tasks([attempt.rollout_id for attempt in attempts[:1]])
        fields = next(iter(tasks.values()), {})
        return {
            "group_id": printable(group_id),
            "task": [
                [_name(name), printable(cut(text, MAX_CHARS))] for name, text in fields.items()
            ],
            "attempts": rollout_lines(listing, attempts),
        }


def group_texts_answer(run: WatchedRun, group_id: str) -> Json:
    """Return the responses that tell a group's attempts apart, and the advantages of each."""
    with run.listing() as listing:
        attempts = listing.rollouts(Filter(group_id=group_id), limit=MAX_ATTEMPTS)
    views = {}
    for attempt in attempts:
        with run.reader() as reader:
            views[attempt.rollout_id] = reader.rollout(attempt.rollout_id)
    shown = earning_calls(views)
    found = {}
    for rollout_id, view in views.items():
        credits = [call.credit for call in view.calls if call.credit is not None]
        found[rollout_id] = {
            "parts": [_part(call) for call in shown[rollout_id]],
            "num_calls": len(view.calls),
            "advantages": [credit.advantage for credit in credits],
            "notes": list(view.notes),
        }
    return {"attempts": found}


def _part(call: CallView) -> Json:
    return {
        "number": call.number,
        "who": _name(call.role or call.agent or call.answered_by),
        "reward": call.reward,
        "response": cut(call.response, MAX_ANSWER_CHARS),
    }


def _short(rollout: Rollout) -> Json:
    return {
        "rollout_id": rollout.rollout_id,
        "status": rollout.status,
        "reward": rollout.reward,
        "reason": rollout.reason and _name(rollout.reason),
        "superseded": rollout.superseded,
    }


def _rollout(rollout: Rollout) -> Json:
    return _short(rollout) | {
        "task_id": _name(rollout.task_id),
        "group_id": rollout.group_id,
        "phase": rollout.phase,
        "step": rollout.step,
        "index": rollout.index,
        "attempt": rollout.attempt,
        "detail": rollout.detail and printable(cut(rollout.detail, MAX_CHARS)),
        "metrics": _numbers(rollout.metrics),
        "components": _numbers(rollout.components),
    }


def _numbers(numbers: Mapping[str, float]) -> dict[str, float]:
    return {_name(name): value for name, value in numbers.items()}


def _name(text: str) -> str:
    """Return a name of an agent or of its data, which is normally short, safe to print."""
    return printable(cut(text, MAX_NAME_CHARS))


# One rollout


def rollout_answer(run: WatchedRun, rollout_id: str) -> Json:
    """Return one rollout as a tree in time, with its task, rewards and neighbors."""
    with run.reader() as reader:
        view = reader.rollout(rollout_id)
    with run.listing() as listing:
        neighbors = listing.neighbors(view.rollout)
        group = listing.rollouts(Filter(group_id=view.rollout.group_id), limit=MAX_ATTEMPTS)
    attempts = [_short(attempt) for attempt in group]
    return as_json(view) | {"neighbors": neighbors, "attempts": attempts}


def as_json(view: RolloutView) -> Json:
    """Return a rollout's view. Long texts, responses and lists of spans are cut."""
    fields = dict(view.task)
    return _rollout(view.rollout) | {
        "task_name": task_name(view.rollout.task_id, fields),
        "task": [[_name(name), cut(text, MAX_CHARS)] for name, text in view.task],
        "reasons": [[_name(name), cut(text, MAX_CHARS)] for name, text in view.reasons],
        "notes": list(view.notes),
        "duration_s": view.duration_s,
        "spans": [_span(span) for span in view.spans[:MAX_SPANS]],
        "num_spans": len(view.spans),
    }


def _span(span: SpanView) -> Json:
    return {
        "kind": span.kind,
        "label": cut(span.label, MAX_ATTRIBUTE_CHARS),
        "depth": span.depth,
        "start_s": span.start_s,
        "duration_s": span.duration_s,
        "error": span.error and cut(span.error, MAX_CHARS),
        "input": cut(span.input, MAX_CHARS),
        "output": cut(span.output, MAX_CHARS),
        "attributes": [[name, cut(text, MAX_ATTRIBUTE_CHARS)] for name, text in span.attributes],
        "call": span.call and _call(span.call),
    }


def _tokens(call: CallView) -> Iterator[list[Any]]:
    """Yield [text, log-prob, version, forced] of the first tokens of a response."""
    left = MAX_RESPONSE_CHARS
    for token in call.tokens[:MAX_TOKENS]:
        text = cut(token.text, MAX_TOKEN_CHARS)
        left -= len(text)
        if left < 0:
            return
        yield [text, token.logprob, token.version, token.forced]


def _call(call: CallView) -> Json:
    return {
        "number": call.number,
        "facts": facts(call),
        "shares_with": call.shares_with,
        "shared_size": call.shared_size,
        "shared_text": cut(call.shared_text, MAX_SHARED_CHARS),
        "new_text": cut(call.new_text, MAX_CHARS),
        "text": cut(call.text, MAX_CHARS),
        "tokens": list(_tokens(call)),
        "num_tokens": len(call.tokens),
        "tool_calls": [[name, cut(arguments, MAX_CHARS)] for name, arguments in call.tool_calls],
        "reward": call.reward,
        "credit": call.credit and asdict(call.credit),
    }
