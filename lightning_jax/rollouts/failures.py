"""Failed rollouts: grouped by reason, reported when they first occur, and fatal if all failed."""

import logging
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_jax.errors import UserError
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout

log = logging.getLogger(__name__)

MAX_DETAIL_CHARS = 240  # of a failure's detail
MIN_OF_WORKER = 3  # failures that make a worker worth naming


@dataclass(frozen=True)
class Failure:
    """Group of rollouts that failed with the same status and reason."""

    status: str
    reason: str
    count: int
    example: str  # a rollout id
    detail: str = ""  # detail of the example's failure, on one line


def failures(rollouts: Sequence[Rollout]) -> tuple[Failure, ...]:
    """Group failed rollouts by status and reason, most frequent first.

    The example is the first rollout of a group.
    """
    alike: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reason is not None:
            alike[rollout.status, rollout.reason].append(rollout)
    found = [
        Failure(*key, len(those), those[0].rollout_id, _detail(those))
        for key, those in alike.items()
    ]
    return tuple(sorted(found, key=lambda failure: -failure.count))


class BrokenAgent(UserError, RuntimeError):
    """Failure of too many rollouts for reasons of the agent: there is nothing to learn from."""


class FailureWatch:
    """Warning about each kind of failed rollout when it first occurs.

    `max_share` is `rollout.max_agent_failures`.
    """

    def __init__(self, store: Store, max_share: float = 1.0) -> None:
        self._store, self._max_share = store, max_share
        self._known_failures: set[tuple[str, str]] = set()
        self._last_reason: str | None = None  # of most failures in the last set of rollouts

    def observe(self, rollouts: Sequence[Rollout], what: str) -> None:
        """Read the finished rollouts of `what`, such as "step 3".

        Raises BrokenAgent if all failed by the agent and the policy answered none of their calls,
        or if too many failed by the agent for one reason, for the second time in a row. If
        `max_share` is below 1, raises it also if all training rollouts were scored and none called
        the policy. A fixed agent runs them again.
        """
        found = failures(rollouts)
        if rollouts and all(
            rollout.status == "agent_failure" and not self._answered(rollout)
            for rollout in rollouts
        ):
            self._store.supersede(rollouts[0].step)
            raise BrokenAgent(
                f"{what}: all {len(rollouts)} rollouts failed before the policy answered a call, "
                f"such as {_such_as(found[0])}; fix the agent, its tasks or the setting in that "
                "message, then run the same command again.",
                reason="all_failed",
                key=found[0].example,
            )
        self._check_calls(rollouts, what)
        self._check_share(found, rollouts, what)
        for failure in found:
            if (failure.status, failure.reason) not in self._known_failures:
                self._known_failures.add((failure.status, failure.reason))
                who = failure.status.removesuffix("_failure")
                log.warning(
                    "%s: %d of %d rollouts failed by the %s, such as %s",
                    *(what, failure.count, len(rollouts), who, _such_as(failure)),
                    extra={
                        "event": "rollouts_failed",
                        "what": what,
                        "failure": failure,
                        "total": len(rollouts),
                    },
                )

    def _check_calls(self, rollouts: Sequence[Rollout], what: str) -> None:
        trained = [r for r in rollouts if r.phase == "train" and r.status == "scored"]
        if self._max_share == 1.0 or len(trained) < len(rollouts) or not rollouts:
            return
        if not any(self._answered(rollout) for rollout in rollouts):
            self._store.supersede(rollouts[0].step)
            raise BrokenAgent(
                f"{what}: all {len(rollouts)} rollouts were scored without a call to the policy, "
                f"such as {rollouts[0].rollout_id}, so there is nothing to learn from; turn off "
                "the agent framework's cache of answers, check that it calls llm.base_url, then "
                "run the same command to resume.",
                reason="no_calls",
                key=rollouts[0].rollout_id,
            )

    def _check_share(
        self, found: Sequence[Failure], rollouts: Sequence[Rollout], what: str
    ) -> None:
        by_agent = [failure for failure in found if failure.status == "agent_failure"]
        worst = by_agent[0] if by_agent else None
        if worst is None or worst.count <= self._max_share * len(rollouts):
            self._last_reason = None
            return
        if worst.reason == self._last_reason:
            self._store.supersede(rollouts[0].step)
            raise BrokenAgent(
                f"{what}: {worst.count} of {len(rollouts)} rollouts failed by the agent as in the "
                f"step before, such as {_such_as(worst)}; fix the agent, or raise "
                f"rollout.max_agent_failures={self._max_share:g} if it may fail, then run the same "
                "command again.",
                reason="too_many_failures",
                key=worst.example,
            )
        self._last_reason = worst.reason

    def _answered(self, rollout: Rollout) -> bool:
        """Return True if the policy answered one of the rollout's calls."""
        spans = self._store.spans(rollout.rollout_id)
        return any(attributes.POLICY in span.attributes and span.error is None for span in spans)


def _such_as(failure: Failure) -> str:
    return f"{failure.example}: {failure.reason}: {failure.detail}".rstrip(": .")


def _detail(alike: Sequence[Rollout]) -> str:
    """Return the detail of the first failure, and the worker that has most of several."""
    detail = _one_line(alike[0].detail or "")
    ((worker, number),) = Counter(rollout.worker for rollout in alike).most_common(1)
    if worker is None or number < MIN_OF_WORKER or 2 * number <= len(alike):
        return detail
    return f"{detail} ({number} in worker {worker})".strip()


def _one_line(text: str) -> str:
    return textwrap.shorten(text, MAX_DETAIL_CHARS, placeholder=" ...")
