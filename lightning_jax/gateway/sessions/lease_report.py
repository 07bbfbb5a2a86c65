"""Report of a worker about one piece of work."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.fields import Fields, FiniteNumber

MAX_CHARS = 2000  # of a reported detail; the rest is cut
# Reasons of failures. A silent worker is one that its run replaces.
LOST, SILENT, STOPPED = "worker_lost", "worker_silent", "worker_stopped"

Reason = Annotated[str, Field(min_length=1, max_length=100)]


class Report(Fields):
    """Outcome of work, as a worker reports it.

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

    def check(self) -> None:
        """Raise ApiError if the reward or the reason is missing."""
        name = "reward" if self.status == "scored" else "reason"
        if getattr(self, name) is None:
            message = f"{name} is missing; add it to a report with status {self.status}."
            raise invalid(message, name, reason="missing")
