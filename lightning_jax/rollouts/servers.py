"""Servers that rollouts are opened at: the run's own gateway, or one of several elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_jax.gateway.app import Gateway, RolloutSettings, Traffic
from lightning_jax.gateway.sessions.waits import Lost
from lightning_jax.traces.context import OpenSpan
from lightning_jax.types import LLM


@dataclass(frozen=True)
class OpenedRollout:
    """Open rollout: what its agent needs to call the policy, and its root span.

    `loss` returns how its server was lost, or None while the server works.
    """

    llm: LLM
    root: OpenSpan
    loss: Callable[[], str | None] = lambda: None


@runtime_checkable
class RolloutServer(Protocol):
    """Server of the policy, where each rollout has its own URL."""

    async def open(self, settings: RolloutSettings, group_id: str) -> OpenedRollout:
        """Open a rollout, if possible where others of its group are."""
        ...

    async def posted_reward(self, rollout_id: str) -> float | None:
        """Return the reward posted for the open rollout, or None if there is none."""
        ...

    def is_over(self, rollout_id: str) -> bool:
        """Return True if the server is known to answer no more calls of the open rollout."""
        ...

    async def lost(self, rollout_id: str) -> Lost:
        """Return the seconds that the open rollout has lost to waiting. See `Gateway.lost`."""
        ...

    async def expire(self, rollout_id: str) -> None:
        """End the open rollout's responses at its deadline. See `Gateway.expire_rollout`."""
        ...

    async def close(self, rollout_id: str) -> Traffic:
        """Close the rollout, which cancels its calls in flight, and return its traffic."""
        ...


@dataclass(frozen=True)
class GatewayServer:
    """Gateway as the server of rollouts."""

    gateway: Gateway

    async def open(self, settings: RolloutSettings, group_id: str) -> OpenedRollout:
        llm = self.gateway.open_rollout(settings)
        return OpenedRollout(llm, self.gateway.root_of(settings.rollout_id))

    async def posted_reward(self, rollout_id: str) -> float | None:
        return self.gateway.posted_reward(rollout_id)

    def is_over(self, rollout_id: str) -> bool:
        return self.gateway.is_over(rollout_id)

    async def lost(self, rollout_id: str) -> Lost:
        return self.gateway.lost(rollout_id)

    async def expire(self, rollout_id: str) -> None:
        await self.gateway.expire_rollout(rollout_id)

    async def close(self, rollout_id: str) -> Traffic:
        return self.gateway.close_rollout(rollout_id)
