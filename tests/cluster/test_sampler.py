"""Tests of a sampler in this process: it serves, and its spans wait for the run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import jax
import openai
import pytest
import toy_agent

from lightning_jax.cluster.delivery import Receipt, store_parcel
from lightning_jax.cluster.sampler import Sampler, SamplerSpec
from lightning_jax.engine.config import ServeConfig
from lightning_jax.gateway.app import RolloutSettings
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.sessions import open_rollouts
from lightning_jax.models.reshard import copy_to_host
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout

MODEL = tiny_model(num_layers=1)
TASK = {"id": "t", "question": "a"}
SPEC = SamplerSpec(
    name="tiny",
    config=MODEL.config,
    tokenizer=MODEL.tokenizer,
    serve=ServeConfig(slots=4, max_len=64, prefill_buckets=(32,), api_key="the run's"),
    dtype="float32",
    tensor=1,
    routing=Routing(),
    num_requests=1,
)


@pytest.fixture
async def sampler() -> AsyncIterator[Sampler]:
    made = Sampler(SPEC, "127.0.0.1", 100, [(3, [copy_to_host(MODEL.params, "float32")])])
    await made.start()
    yield made
    await made.stop()


async def _drain(sampler: Sampler, store: Store) -> None:
    """Store the sampler's spans, as a run does."""
    receipts: list[Receipt] = []
    while True:
        parcel = await sampler.take(receipts)
        receipts = await store_parcel(store, parcel.deliveries)


@contextlib.asynccontextmanager
async def drained(sampler: Sampler, store: Store) -> AsyncIterator[None]:
    draining = asyncio.create_task(_drain(sampler, store))
    try:
        yield
    finally:
        draining.cancel()


def _store(folder: Path, *rollout_ids: str) -> Store:
    store = Store(folder / "store.sqlite")
    for rollout_id in rollout_ids:
        store.add_rollout(Rollout(rollout_id, "t", "g", "train", 3, 0, 1, "queued"))
    return store


async def test_calls_of_a_rollout_reach_the_runs_store(sampler: Sampler, tmp_path: Path) -> None:
    with closing(_store(tmp_path, "r")) as store:
        opened = await sampler.open(RolloutSettings("r", seed=1), "g")
        llm = opened.llm
        async with drained(sampler, store):
            assert 0.0 <= await toy_agent.run(TASK, llm) <= 1.0
            await toy_agent.posts_reward(TASK, llm)
            assert await sampler.posted_reward("r") == 0.75
            lost = await sampler.lost("r")
            assert lost.total_s > lost.latest_s == 0.0  # its call got its first token
            await sampler.expire("r")
            with pytest.raises(openai.NotFoundError):
                await toy_agent.run(TASK, llm)
            traffic = await sampler.close("r")
        (call,) = store.spans("r")
        assert call.parent_span_id == opened.root.span_id and call.sequence == 101
        assert call.attributes[attributes.POLICY_VERSIONS] == (3, 3, 3, 3)
        assert traffic.unanswered == () and traffic.loss is None


async def test_rollouts_that_are_over_are_in_the_parcels(
    sampler: Sampler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_rollouts, "MAX_REFUSED", 2)
    with closing(_store(tmp_path, "r", "other")) as store:
        opened = await sampler.open(RolloutSettings("r", seed=1), "g")
        await sampler.open(RolloutSettings("other", seed=1), "g")
        client = openai.AsyncOpenAI(base_url=opened.llm.base_url, api_key=opened.llm.api_key)
        async with drained(sampler, store):
            for _ in range(2):
                assert sampler.gateway.over() == frozenset()
                with pytest.raises(openai.BadRequestError):
                    await client.completions.create(model="policy", prompt=[5] * 1000)
        assert (await sampler.take([])).over == {opened.root.span_id}
        await client.close()


async def test_a_call_waits_for_the_store(sampler: Sampler, tmp_path: Path) -> None:
    with closing(_store(tmp_path, "r")) as store:
        llm = (await sampler.open(RolloutSettings("r", seed=1), "g")).llm
        asking = asyncio.create_task(toy_agent.run(TASK, llm))
        parcel = await sampler.take([])
        while not parcel.deliveries:
            parcel = await sampler.take([])
        await asyncio.sleep(0.05)
        assert not asking.done() and parcel.stats["serve/requests"] == 1.0
        receipts = await store_parcel(store, parcel.deliveries)
        taking = asyncio.create_task(sampler.take(receipts))
        await asking
        await taking


async def test_new_weights_answer_under_their_version(sampler: Sampler, tmp_path: Path) -> None:
    with closing(_store(tmp_path, "one", "two")) as store:
        async with drained(sampler, store):
            for rollout_id, version in (("one", 4), ("two", 5)):
                newer = jax.tree.map(lambda leaf: leaf * 1.5, MODEL.params)
                sent = copy_to_host(newer, "float32") if rollout_id == "one" else None
                assert await sampler.load(0, sent, version) == version
                llm = (await sampler.open(RolloutSettings(rollout_id, seed=1), "g")).llm
                await toy_agent.run(TASK, llm)
                await sampler.close(rollout_id)
        one, two = (store.spans(rollout_id)[0].attributes for rollout_id in ("one", "two"))
        assert (one[attributes.POLICY_VERSIONS], two[attributes.POLICY_VERSIONS]) == (
            (4,) * 4,
            (5,) * 4,
        )
        assert one[attributes.BEHAVIOR_LOGPROBS] == pytest.approx(
            two[attributes.BEHAVIOR_LOGPROBS], abs=1e-5
        )
