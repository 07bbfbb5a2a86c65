"""Messages about work that others run: workers of a run, and programs outside of it.

A worker imports this module, so it needs neither JAX nor the rest of the gateway.
"""

from typing import Annotated, Any, Literal, Protocol, Self, runtime_checkable

from pydantic import Field, field_validator, model_validator

from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.fields import Fields, FiniteNumber, Integer, Listed, Name
from lightning_jax.types import LLM, Rollout

VERSION = 1  # of the messages; a server and a worker of different ones refuse each other
BEATS = 5  # heartbeats in the time after which a silent lease is lost, at least
MAX_BEAT_S = 2.0  # deadlines wait for a worker's next heartbeat
MAX_CHARS = 2000  # of a reported detail; the rest is cut
# Reasons of failures. A silent worker is one that its run replaces.
LOST, SILENT, STOPPED = "worker_lost", "worker_silent", "worker_stopped"
# Of rollouts from outside.
REPORTED, DISCARDED, EXPIRED = "reported_error", "discarded", "expired"

# Shown in logs, so without control characters.
WorkerName = Annotated[
    str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")
]
Reason = Annotated[str, Field(min_length=1, max_length=100)]


def beat_s(lease_s: float) -> float:
    """Return the time between two heartbeats."""
    return min(lease_s / BEATS, MAX_BEAT_S)


class TakeFields(Fields):
    """Request of a worker for work."""

    worker: WorkerName
    agent: dict[str, str]  # a digest of each setting of the worker's agent
    version: Integer = 0  # of the protocol; workers before version 1 do not say theirs


class HeartbeatFields(Fields):
    leases: Listed[str]


class Report(Fields):
    """Outcome of work, as who ran it reports it.

    `kind` is "lost_gateway" if the agent's connection to the gateway failed, and "no_reward" if it
    returned no reward and may have posted one.
    """

    kind: Literal["outcome", "lost_gateway", "no_reward"] = "outcome"
    status: Literal["scored", "agent_failure", "infrastructure_failure"]
    reward: FiniteNumber | None = None
    reason: Reason | None = None
    detail: str | None = None
    metrics: dict[str, Any] | None = None  # the run drops and counts what is no finite number

    @field_validator("detail")
    @classmethod
    def _cut(cls, detail: str | None) -> str | None:
        return detail and detail[:MAX_CHARS]

    @model_validator(mode="after")
    def _check(self) -> Self:
        name = "reward" if self.status == "scored" else "reason"
        if getattr(self, name) is None:
            message = f"{name} is missing; add it to a report with status {self.status}."
            raise invalid(message, name, reason="missing")
        return self


class OpenFields(Fields):
    """Rollout to open, for a task of the caller or one of the run's training tasks."""

    task: dict[str, Any] | None = None
    task_id: Name | None = None
    group: Name | None = None  # rollouts of one group are attempts at one task

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.task is None) == (self.task_id is None):
            number = "neither" if self.task is None else "both"
            raise invalid(
                f"task and task_id: {number} is set; send one of them.", "task", reason="conflict"
            )
        return self


class EndFields(Fields):
    """End of a rollout: its reward, unless one was posted, or why there is none."""

    reward: FiniteNumber | None = None
    metrics: dict[str, Any] | None = None  # what is no finite number is dropped and counted
    error: Name | None = None  # how the agent failed
    discard: bool = False  # True: nothing is learned from the rollout

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.reward is not None) + (self.error is not None) + self.discard > 1:
            raise invalid(
                "reward, error and discard are set together; send one of them.",
                "reward",
                reason="conflict",
            )
        return self


@runtime_checkable
class ExternalRollouts(Protocol):
    """Run that takes rollouts from outside."""

    async def open(self, fields: OpenFields) -> tuple[str, LLM]:
        """Return the id of a new rollout and how to call the policy. Raise ApiError if refused.

        If cancelled, because the caller hung up, end the rollout.
        """
        ...

    async def end(self, rollout_id: str, fields: EndFields) -> Rollout:
        """End an open rollout and return it. Raise ApiError if it is not from outside."""
        ...
