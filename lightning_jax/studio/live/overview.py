"""Answers to the first questions about a run: does it learn, where does it fail, how fast is it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

from lightning_jax.gateway.sessions.open_rollouts import Activity
from lightning_jax.rollouts.results.compare_tasks import sign_test
from lightning_jax.studio.build import task_name
from lightning_jax.studio.comparison import SIGNIFICANT
from lightning_jax.studio.records import Json, Verdict, as_json
from lightning_jax.studio.runs import RunSummary
from lightning_jax.traces.listing import Filter, StoreListing
from lightning_jax.train.watch.curves import warmup_steps
from lightning_jax.train.watch.metrics import Row
from lightning_jax.types import Rollout

WINDOW_S = 10.0  # over which the rate is measured
MIN_GAP_S = 1.0  # between two readings that are kept
TOKENS = "serve/tokens_generated"


def learning(summary: RunSummary) -> list[Verdict]:
    """Return whether the rewards rise, as sentences with 1, -1 or 0 for not clear.

    The warm-up and the steps after it have a sentence each, since a change after the warm-up is
    measured from its end.
    """
    rows = [row for row in summary.evaluations if "eval/change_mean" in row]
    if rows:
        by_start = {row["eval/change_since_step"]: row for row in rows}  # the last one of each
        end = warmup_steps(summary.rows)
        names = {start: f"warm-up, steps 0 to {end - 1}: " for start in by_start if start < end}
        return [_change(row, names.get(start, "")) for start, row in sorted(by_start.items())]
    return [_of_training(summary)]


def _change(row: Row, name: str) -> Verdict:
    """Return what an evaluation says about the steps since an earlier one."""
    better, worse = int(row["eval/num_better"]), int(row["eval/num_worse"])
    p = sign_test(better, worse)
    sign = 0 if p >= SIGNIFICANT else 1 if better > worse else -1
    state = ("no clear change", "learning", "getting worse")[sign]
    change, last = row["eval/change_mean"], row["eval/reward_mean"]
    return Verdict(
        sign,
        f"{name}{state}: reward {last - change:.3f} to {last:.3f} ({change:+.3f} ± "
        f"{row['eval/change_stderr']:.3f}) on the dev tasks since step "
        f"{row['eval/change_since_step']:.0f}, {better} better, {worse} worse "
        f"(sign test, p = {p:.2g})",
    )


def _of_training(summary: RunSummary) -> Verdict:
    """Return what the training rollouts say, before there are two evaluations."""
    rewards = [row["rollout/reward_mean"] for row in summary.rows if "rollout/reward_mean" in row]
    if len(rewards) < 2:
        return Verdict(0, "not known yet whether it learns: too few steps have ended")
    size = max(len(rewards) // 4, 1)
    first, last = fmean(rewards[:size]), fmean(rewards[-size:])
    return Verdict(
        0,
        f"no second evaluation yet; training rollouts earned {first:.3f} in the first "
        f"{_steps(size)} and {last:.3f} in the last {_steps(size)}",
    )


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def find_worst_group(listing: StoreListing, summary: RunSummary) -> Json | None:
    """Return the group with the lowest mean reward of the last step that has ended, if any."""
    steps = [int(row["step"]) for row in summary.rows if "rollout/reward_mean" in row]
    if not steps:
        return None
    for group in listing.groups(Filter(phase="train", step=max(steps)), "worst", limit=1):
        names = task_names(listing, listing.rollouts(Filter(group_id=group.group_id), limit=1))
        return as_json(group) | {"task_name": next(iter(names.values()), "")}
    return None


def task_names(listing: StoreListing, rollouts: Sequence[Rollout]) -> dict[str, str]:
    """Return the readable name of each rollout's task by rollout id."""
    tasks = listing.tasks([rollout.rollout_id for rollout in rollouts])
    return {
        rollout.rollout_id: task_name(rollout.task_id, tasks.get(rollout.rollout_id, {}))
        for rollout in rollouts
    }


class Throughput:
    """Rate of sampled tokens, measured between the requests of the page. Use it in one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: deque[tuple[float, float]] = deque()  # (time in seconds, total of tokens)

    def observe(self, activity: Activity) -> Json:
        """Return what the server does now. A number that it does not count is None.

        The rate is None until there are two readings with at least MIN_GAP_S between them.
        """
        stats, now = activity.stats, self._clock()
        total = stats.get(TOKENS)
        while self._readings and now - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()
        rate = seconds = None
        if total is not None:
            if self._readings and now - self._readings[0][0] >= MIN_GAP_S:
                seconds = now - self._readings[0][0]
                rate = max(total - self._readings[0][1], 0.0) / seconds
            if not self._readings or now - self._readings[-1][0] >= MIN_GAP_S:
                self._readings.append((now, total))
        return {
            "slots": activity.num_slots or None,
            "slots_used": stats.get("serve/running"),
            "queue": stats.get("serve/queue_depth"),
            "compiling": stats.get("serve/compiling"),
            "open_requests": stats.get("serve/open"),
            "tokens_per_s": rate,
            "window_s": seconds,
        }
