"""Test of what a gateway reports about its open rollouts."""

from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.app import Gateway, RolloutSettings
from lightning_jax.gateway.calls.remote import RemoteEngine


async def test_open_rollouts_are_reported_longest_first() -> None:
    engine = RemoteEngine("policy", ServeConfig(), num_slots=4)
    async with Gateway(engine, records=False) as gateway:
        for name in ("first", "second"):
            gateway.open_rollout(RolloutSettings(name, seed=0))
        found = gateway.activity()
        gateway.close_rollout("first")
        left = gateway.activity()
    assert found.num_slots == 4 and "serve/spans" in found.stats
    assert [rollout.rollout_id for rollout in found.rollouts] == ["first", "second"]
    assert [(rollout.num_calls, rollout.num_tokens) for rollout in found.rollouts] == [(0, 0)] * 2
    assert [rollout.rollout_id for rollout in left.rollouts] == ["second"]
