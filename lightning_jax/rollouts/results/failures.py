"""Failed rollouts: grouped by reason, reported when they first occur, and fatal if all failed."""

import logging
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_jax.errors import UserError
from lightning_jax.rl.credit import CUT_SHORT
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout

log = logging.getLogger(__name__)

MAX_DETAIL_CHARS = 240  # of a failure's detail
MIN_WORDS_CHARS = 60  # of it, beside a long place
_PLACE = re.compile(r" \(at .+:\d+ in \S+\)\Z")  # where an agent raised; see `outcome._detail`
MIN_OF_WORKER = 3  # failures that make a worker worth naming


@dataclass(frozen=True)
class Failure:
    """Group of rollouts that failed with the same status and reason."""

    status: str
    reason: str
    count: int
    example: str  # a rollout id
    detail: str = ""  # detail of the example's failure, on one line
    num_cut: int = 0  # rollouts of them with a response that ended at the token limit


def failures(rollouts: Sequence[Rollout], cut: Collection[str] = ()) -> tuple[Failure, ...]:
    """Group failed rollouts by status and reason, most frequent first.

    The example is the first rollout of a group. `cut` are ids of rollouts with responses that
    ended at the token limit.
    """
    alike: dict[tuple[str, str], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reason is not None:
            alike[rollout.status, rollout.reason].append(rollout)
    groups = [
        Failure(
            *key,
            len(those),
            those[0].rollout_id,
            _detail(those),
            sum(rollout.rollout_id in cut for rollout in those),
        )
        for key, those in alike.items()
    ]
    return tuple(sorted(groups, key=lambda failure: -failure.count))


class BrokenAgent(UserError, RuntimeError):
    """Failure of too many rollouts for reasons of the agent: there is nothing to learn from."""


class FailureWatch:
    """Warning about each kind of failed rollout when it first occurs.

    `max_share` is `rollout.max_agent_failures`.
    """

    def __init__(self, store: Store, max_share: float = 1.0) -> None:
        self._store, self._max_share = store, max_share
        self._known_failures: set[tuple[str, str]] = set()
        # Reason of most failures in the last set of rollouts, and what they were.
        self._last: tuple[str, str] | None = None

    def observe(self, rollouts: Sequence[Rollout], what: str) -> None:
        """Read the finished rollouts of `what`, such as "step 3".

        Raises BrokenAgent if all failed by the agent and the policy answered none of their calls,
        or if too many failed by the agent for one reason, for the second time in a row. If
        `max_share` is below 1, raises it also if all training rollouts were scored and none called
        the policy. A fixed agent runs them again.
        """
        failed = [rollout.rollout_id for rollout in rollouts if rollout.reason is not None]
        groups = failures(rollouts, set(filter(self._was_cut, failed)))
        if rollouts and all(
            rollout.status == "agent_failure" and not self._answered(rollout)
            for rollout in rollouts
        ):
            self._store.mark_for_repeat(rollouts[0].step)
            raise BrokenAgent(
                f"{what}: all {len(rollouts)} rollouts failed before the policy answered a call, "
                f"such as {_such_as(groups[0])}; fix the agent, its tasks or the setting in that "
                "message, then run the same command again.",
                reason="all_failed",
                key=groups[0].example,
            )
        self._check_calls(rollouts, what)
        self._check_share(groups, rollouts, what)
        for failure in groups:
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
            self._store.mark_for_repeat(rollouts[0].step)
            raise BrokenAgent(
                f"{what}: all {len(rollouts)} rollouts were scored without a call to the policy, "
                f"such as {rollouts[0].rollout_id}, so there is nothing to learn from; turn off "
                "the agent framework's cache of answers, check that it calls llm.base_url, then "
                "run the same command to resume.",
                reason="no_calls",
                key=rollouts[0].rollout_id,
            )

    def _check_share(
        self, groups: Sequence[Failure], rollouts: Sequence[Rollout], what: str
    ) -> None:
        by_agent = [failure for failure in groups if failure.status == "agent_failure"]
        worst = by_agent[0] if by_agent else None
        if worst is None or worst.count <= self._max_share * len(rollouts):
            self._last = None
            return
        if self._last is not None and worst.reason == self._last[0]:
            self._store.mark_for_repeat(rollouts[0].step)
            raise BrokenAgent(
                f"{what}: {worst.count} of {len(rollouts)} rollouts failed by the agent, for the "
                f"same reason as in {self._last[1]}, such as {_such_as(worst)}; fix the agent, or "
                f"raise rollout.max_agent_failures={self._max_share:g} if it may fail, then run "
                "the same command again.",
                reason="too_many_failures",
                key=worst.example,
            )
        self._last = worst.reason, what

    def _was_cut(self, rollout_id: str) -> bool:
        """Return True if one of the rollout's responses ended at the token limit."""
        return any(
            CUT_SHORT in span.attributes.get(attributes.RESPONSE_FINISH_REASONS, ())
            and not span.attributes.get(attributes.LATE)
            for span in self._store.spans(rollout_id)
        )

    def _answered(self, rollout: Rollout) -> bool:
        """Return True if the policy answered one of the rollout's calls."""
        spans = self._store.spans(rollout.rollout_id)
        return any(attributes.POLICY in span.attributes and span.error is None for span in spans)


def _such_as(failure: Failure) -> str:
    text = f"{failure.example}: {failure.reason}: {failure.detail}".rstrip(": .")
    if not failure.num_cut:
        return text
    return (
        f"{text} (in {failure.num_cut} of the {failure.count} a reply was cut at the token limit; "
        "if the agent cannot use a part of a reply, raise rollout.max_tokens and its own "
        "max_tokens)"
    )


def _detail(alike: Sequence[Rollout]) -> str:
    """Return the detail of the first failure on one line, and the worker that has most of several.

    It is shortened, but keeps the place of an error.
    """
    text = alike[0].detail or ""
    match = _PLACE.search(text)
    place = match[0] if match else ""
    width = max(MAX_DETAIL_CHARS - len(place), MIN_WORDS_CHARS)
    detail = textwrap.shorten(text.removesuffix(place), width, placeholder=" ...") + place
    ((worker, number),) = Counter(rollout.worker for rollout in alike).most_common(1)
    if worker is None or number < MIN_OF_WORKER or 2 * number <= len(alike):
        return detail
    return f"{detail} ({number} in worker {worker})".strip()
