"""Activity of a gateway at one moment, for pages that people watch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutActivity:
    """One open rollout."""

    rollout_id: str
    start_ns: int  # since the epoch
    num_calls: int  # in flight
    num_tokens: int  # in the prompts and responses of all its calls


@dataclass(frozen=True)
class Activity:
    """Slots and counters of the engine, and the open rollouts with the longest first."""

    num_slots: int  # 0 if the engine is elsewhere
    stats: Mapping[str, float]  # as `Gateway.stats` returns them
    rollouts: tuple[RolloutActivity, ...]


ReadActivity = Callable[[], Activity]  # in the thread of the gateway's event loop
