"""Agreements between a run's server and its workers. A worker imports it without the gateway."""

VERSION = 1  # of the messages; a server and a worker of different ones refuse each other
BEATS = 5  # heartbeats in the time after which a silent lease is lost, at least
MAX_BEAT_S = 2.0  # deadlines wait for a worker's next heartbeat


def beat_s(lease_s: float) -> float:
    """Return the time between two heartbeats."""
    return min(lease_s / BEATS, MAX_BEAT_S)
