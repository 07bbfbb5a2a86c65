"""Tests of rollouts that programs outside open: their groups, their ends, and a killed run."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import toy_agent
from coded import raises_coded
from log_events import records
from toy_runs import ahead_config

from lightning_jax.gateway.sessions import leases
from lightning_jax.rl.config import AlgorithmConfig
from lightning_jax.rollouts.config import AgentConfig, RolloutConfig
from lightning_jax.settings import ConfigError, save_config
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config, EvalConfig
from lightning_jax.train.loop import external_groups
from lightning_jax.train.loop.check import check_agent, check_start
from lightning_jax.train.loop.startup import open_run
from lightning_jax.train.tasks.data import load_tasks
from lightning_jax.types import LLM, Rollout, Task

KEY = "owner-key"
CORRECTED = AlgorithmConfig(proximal="old", correction="truncate", max_staleness=2)
TASKS: list[Task] = [{"id": "known", "question": "a"}]
WHOLE = {"id": "whole", "text": "long" * 1000}


def _config(run_dir: Path, *, idle_s: float = 60.0, port: int = 0, **rollout: Any) -> Config:
    settings: dict[str, Any] = {"tasks_per_step": 2, "group_size": 2, "concurrency": 8}
    config = ahead_config(run_dir)
    return replace(
        config,
        num_steps=3,
        serve=replace(config.serve, api_key=KEY, port=port),
        agent=AgentConfig(external=True, idle_s=idle_s),
        rollout=RolloutConfig(**settings | rollout),
        algorithm=CORRECTED,
        eval=EvalConfig(),
    )


class Product:
    """Program outside of the run, which serves people with its policy."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http

    async def post(
        self, url: str, body: Any, key: str = KEY, *, expected: int = 200
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post(url, json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == expected, answer
            return answer | {"code": answer.get("error", {}).get("code")}

    async def open(self, *, expected: int = 201, **body: Any) -> dict[str, Any]:
        return await self.post(f"{self._url}/v1/rollouts", body, expected=expected)

    async def end(self, opened: dict[str, Any], *, expected: int = 200, **body: Any) -> Any:
        url = f"{opened['base_url']}/end"
        return await self.post(url, body, opened["api_key"], expected=expected)

    async def answer(self, opened: dict[str, Any], question: str = "a") -> float:
        """Make one call and return the share of good tokens."""
        llm = LLM(opened["base_url"], opened["api_key"], opened["model"])
        return await toy_agent.run({"question": question}, llm)

    async def serve(self, **body: Any) -> dict[str, Any]:
        """Open a rollout, call the policy, and end it with a reward."""
        opened = await self.open(**body)
        return await self.end(opened, reward=await self.answer(opened))


@asynccontextmanager
async def _serving(config: Config, tasks: list[Task] = TASKS) -> AsyncIterator[tuple[Any, Product]]:
    """Yield a run that takes rollouts but makes no step, and a product."""
    async with open_run(config, tasks, TASKS) as run, aiohttp.ClientSession() as http:
        yield run.collector.groups, Product(run.gateway.url, http)
        await run.collector.groups.close()


async def test_rollout_is_not_ended_at_its_url_for_calls_alone(tmp_path: Path) -> None:
    async with _serving(_config(tmp_path)) as (groups, product):
        step = await _taking(groups, 0, 1)
        opened = await product.open(task={"id": "a", "question": "a"})
        tools = {"base_url": opened["calls_url"], "api_key": opened["calls_key"]}
        assert (await product.end(tools, reward=1000.0, expected=403))["code"] == "calls_alone"
        await product.answer({**opened, **tools})
        assert (await product.end(opened, reward=0.5))["reward"] == 0.5
        step.cancel()


async def _taking(groups: Any, step: int, number: int) -> asyncio.Task[list[Any]]:
    """Return a step that waits for groups, once it has begun."""
    taking = asyncio.create_task(groups.take(step, number))
    async with asyncio.timeout(20):
        while groups._present.step != step:
            await asyncio.sleep(0.01)
    return taking


def _ids(groups: list[Any]) -> list[list[str]]:
    return [[rollout.rollout_id for rollout in group.rollouts] for group in groups]


async def test_live_traffic_trains_the_policy(tmp_path: Path) -> None:
    config = _config(tmp_path)
    async with open_run(config, [], []) as run, aiohttp.ClientSession() as http:
        product = Product(run.gateway.url, http)
        assert (await product.open(task={"id": "a"}, expected=503))["code"] == "not_open"

        async def traffic() -> None:
            for number in range(1000):
                with contextlib.suppress(AssertionError):  # not open yet, or no more
                    await product.serve(task={"question": "a"}, group=f"g{number // 2}")
                await asyncio.sleep(0.02)

        users = asyncio.create_task(traffic())
        rows = [await run.one_step() for _ in range(3)]
        await run.collector.groups.close()
        users.cancel()
        await asyncio.gather(users, return_exceptions=True)
    assert [row["rollout/num_rollouts"] for row in rows] == [4.0] * 3
    assert rows[0]["train/num_updates"] == 1  # later ones may have only equal rewards
    assert max(row["train/staleness_max"] for row in rows) <= 2
    assert rows[0]["rollout/num_external_expired"] == 0
    with contextlib.closing(Store(tmp_path / "store.sqlite", read_only=True)) as store:
        trained = [group for step in range(3) for group in store.step_groups(step)]
        assert len(set(trained)) == 6
        rollouts = [r for group in trained for r in store.rollouts(group_id=group)]
        assert {rollout.status for rollout in rollouts} == {"scored"}
        assert {(r.step, r.phase) for r in rollouts} <= {(step, "train") for step in range(3)}


async def test_rollouts_of_one_name_are_a_group_and_a_full_one_is_followed_by_another(
    tmp_path: Path,
) -> None:
    config = replace(_config(tmp_path), prompts={"writer": "be brief"})
    async with _serving(config) as (groups, product):
        taking = await _taking(groups, 0, 2)
        first = await product.open(task={"question": "q", "id": "x"})
        assert first["prompts"] == {"writer": "be brief"}
        other = await product.open(task_id="known")
        joined = await product.open(task={"question": "q", "id": "x"})
        third = await product.open(task={"question": "q", "id": "x"})
        assert [o["rollout_id"] for o in (first, other, joined, third)] == [
            "train-00000-000-00-1",
            "train-00000-001-00-1",
            "train-00000-000-01-1",
            "train-00000-002-00-1",
        ]
        for number, opened in enumerate((joined, first, third)):
            await product.answer(opened)
            ended = await product.end(opened, reward=0.25 * number, metrics={"f1": 1.0, "em": None})
            assert (ended["status"], ended["reward"]) == ("scored", 0.25 * number)
        assert not taking.done()
        last = await product.open(task_id="known")
        for opened in (other, last):
            await product.end(opened, error="the user's browser crashed")
        taken = await taking
        assert _ids(taken) == [
            ["train-00000-000-00-1", "train-00000-000-01-1"],
            ["train-00000-001-00-1", "train-00000-001-01-1"],
        ]
        assert [rollout.reward for rollout in taken[0].rollouts] == [0.25, 0.0]
        assert [rollout.metrics for rollout in taken[0].rollouts] == [
            {"f1": 1.0, "dropped_metrics/null/em": 1.0}
        ] * 2
        assert taken[1].task == TASKS[0]
        assert {(r.status, r.reason) for r in taken[1].rollouts} == {
            ("agent_failure", "reported_error")
        }
        assert groups.num_finished == 1  # of the third group


async def test_one_name_for_different_tasks_is_a_group_of_each(tmp_path: Path) -> None:
    async with _serving(_config(tmp_path)) as (groups, product):
        taking = await _taking(groups, 0, 2)
        alice = {"question": "q", "answer": "secret of A"}
        bodies = [
            {"task": alice, "group": "g"},
            {"task": {"question": "q", "answer": "B"}, "group": "g"},
            {"task": dict(reversed(alice.items())), "group": "g"},  # equal
            {"task": {"id": "known", "question": "mine"}},
            {"task_id": "known"},
        ]
        opened = [await product.open(**body) for body in bodies]
        assert [o["rollout_id"] for o in opened] == [
            "train-00000-000-00-1",
            "train-00000-001-00-1",
            "train-00000-000-01-1",
            "train-00000-002-00-1",
            "train-00000-003-00-1",
        ]
        assert {group.name for group in groups._open} == {"g", "known"}
        taking.cancel()


async def test_group_goes_on_with_its_task_after_a_crash(tmp_path: Path) -> None:
    task = {"id": "x", "numbers": [1, 2.5, None], "é": {"b": True, "a": 1}}
    for index in range(2):
        async with _serving(_config(tmp_path)) as (groups, product):
            taking = await _taking(groups, 0, 1)
            rollout_id = (await product.serve(task=task))["rollout_id"]
            assert rollout_id == f"train-00000-000-0{index}-1"
            taking.cancel()


async def test_lost_answers_do_not_lock_a_product_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "UNUSED_S", 0.5)
    async with _serving(_config(tmp_path, concurrency=2)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        used = await product.open(task={"id": "a"})
        await product.answer(used)
        await product.open(task={"id": "b"})  # its answer is lost
        assert (await product.open(task={"id": "b"}, expected=429))["code"] == "too_many_rollouts"
        await asyncio.sleep(0.6)
        again = await product.open(task={"id": "b"})
        assert again["rollout_id"] == "train-00000-001-00-2"
        assert groups.take_metrics()["rollout/num_external_expired"] == 1
        await product.answer(again)
        await asyncio.sleep(0.6)  # both have had requests, so both stay
        assert (await product.open(task={"id": "b"}, expected=429))["code"] == "too_many_rollouts"
        for opened in (used, again):
            await product.end(opened, reward=1.0)
        taking.cancel()


async def test_opener_that_hangs_up_leaves_no_rollout(tmp_path: Path) -> None:
    async with _serving(_config(tmp_path, concurrency=1)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        ordinary, is_slow = groups._run, asyncio.Event()

        async def run_late(*arguments: Any) -> None:
            is_slow.set()
            await asyncio.sleep(0.3)
            await ordinary(*arguments)

        groups._run = run_late
        for _ in range(3):
            is_slow.clear()
            opening = asyncio.create_task(product.open(task={"id": "a"}))
            await is_slow.wait()
            opening.cancel()
            await asyncio.wait({opening})
            async with asyncio.timeout(10):
                while groups._running:
                    await asyncio.sleep(0.02)
        assert groups.take_metrics()["rollout/num_external_unfinished"] == 3
        taking.cancel()


async def test_groups_that_nobody_completes_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(external_groups, "MANY_GROUPS", 4)
    async with _serving(_config(tmp_path)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        for number in range(9):
            opened = await product.open(task={"time": number}, group="of one name")
            await product.end(opened, reward=1.0)
        assert [record.number for record in records(caplog, "groups_incomplete")] == [4, 8]
        taking.cancel()


async def test_end_without_a_reward_uses_the_posted_one(tmp_path: Path) -> None:
    async with _serving(_config(tmp_path)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        opened = await product.open(task={"id": "x"})
        refused = await product.end(opened, expected=400)
        assert refused["error"]["param"] == "reward"
        await product.post(f"{opened['base_url']}/reward", {"reward": 0.75})
        ended = await product.end(opened)
        assert (ended["status"], ended["reward"]) == ("scored", 0.75)
        assert (await product.end(opened, reward=1, expected=404))["code"] == "rollout_not_found"
        taking.cancel()


@pytest.mark.parametrize("posted", [None, 0.5])
async def test_idle_rollout_expires_and_frees_its_place(
    tmp_path: Path, posted: float | None
) -> None:
    async with _serving(_config(tmp_path, idle_s=1.0, tasks_per_step=1)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        left = await product.open(task={"id": "x"})
        for _ in range(4):  # requests keep it open for longer than idle_s
            await product.answer(left)
            await asyncio.sleep(0.3)
        if posted is not None:
            await product.post(f"{left['base_url']}/reward", {"reward": posted})
        await asyncio.sleep(1.5)
        assert (await product.end(left, reward=1.0, expected=404))["code"] == "rollout_not_found"
        served = [await product.serve(task={"id": "x"}) for _ in range(2 - (posted is not None))]
        (group,) = await taking
        expired = float(posted is None)
        assert groups.take_metrics()["rollout/num_external_expired"] == expired
        again = "train-00000-000-00-2" if posted is None else "train-00000-000-00-1"
        assert [rollout.rollout_id for rollout in group.rollouts] == [again, "train-00000-000-01-1"]
        assert {answer["rollout_id"] for answer in served} <= set(_ids([group])[0])
        assert posted is None or group.rollouts[0].reward == posted


async def test_discarded_rollout_is_counted_and_not_trained(tmp_path: Path) -> None:
    async with _serving(_config(tmp_path)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        opened = await product.open(task={"id": "x"})
        ended = await product.end(opened, discard=True)
        assert (ended["status"], ended["reason"]) == ("infrastructure_failure", "discarded")
        assert groups.take_metrics()["rollout/num_external_unfinished"] == 1
        taking.cancel()


async def test_group_that_a_crash_left_without_its_first_rollout_is_filled(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path / "store.sqlite")) as store:
        store.add_external_group("train-00000-000", 0, "x", {"id": "x"})
        store.add_rollout(Rollout("r", "x", "train-00000-000", "train", 0, 1, 1, "queued"))
    async with _serving(_config(tmp_path)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        ids = [(await product.serve(task={"id": "x"}))["rollout_id"] for _ in range(2)]
        assert ids == ["train-00000-000-00-1", "train-00000-000-01-2"]
        assert _ids(await taking) == [ids]


async def test_groups_that_nobody_completes_are_dropped_once_too_old(tmp_path: Path) -> None:
    async with _serving(_config(tmp_path)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        await product.serve(task={"id": "half"})
        for step in range(3):
            for _ in range(2):
                await product.serve(task={"id": f"whole-{step}"})
            (group,) = await taking
            assert group.task["id"] == f"whole-{step}"
            assert groups.take_metrics()["rollout/num_external_groups_too_old"] == 0
            taking = await _taking(groups, step + 1, 1)
        assert groups.take_metrics()["rollout/num_external_groups_too_old"] == 1
        assert groups.num_finished == 0
        taking.cancel()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "invalid_value"),
        ({"task": {"id": "a"}, "task_id": "known"}, 400, "invalid_value"),
        ({"task": "text"}, 400, "invalid_type"),
        ({"task": {"id": 7}}, 400, "invalid_type"),
        ({"task": {"question": "without a name"}}, 400, "invalid_value"),
        ({"task_id": "other"}, 404, "task_not_found"),
        ({"task": {"id": "a"}, "group": ""}, 400, "invalid_type"),
    ],
)
async def test_bad_requests_get_a_sentence(
    tmp_path: Path, body: dict[str, Any], status: int, code: str
) -> None:
    async with _serving(_config(tmp_path)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        assert (await product.open(**body, expected=status))["code"] == code
        taking.cancel()


async def test_limits_keys_and_contradictory_ends(tmp_path: Path) -> None:
    async with _serving(_config(tmp_path, concurrency=1)) as (groups, product):
        taking = await _taking(groups, 0, 1)
        opened = await product.open(task={"id": "a"})
        assert (await product.open(task={"id": "a"}, expected=429))["code"] == "too_many_rollouts"
        url = opened["base_url"].split("/rollout/")[0] + "/v1/rollouts"
        body = {"task": {"id": "a"}}
        refused = await product.post(url, body, opened["api_key"], expected=401)
        assert refused["code"] == "invalid_api_key"
        await product.end(opened, reward=1.0, error="both", expected=400)
        await product.end(opened, reward=1e9, expected=400)
        await product.end(opened, reward=1.0)
        taking.cancel()


async def test_other_runs_take_no_rollouts(tmp_path: Path) -> None:
    config = replace(_config(tmp_path), agent=AgentConfig(f"{toy_agent.__file__}:run"))
    async with open_run(config, TASKS, TASKS) as run, aiohttp.ClientSession() as http:
        product = Product(run.gateway.url, http)
        assert (await product.open(task={}, expected=404))["code"] == "no_external_rollouts"


def test_settings_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    rollout = config.rollout
    for changes, reason, key in (
        ({"algorithm": AlgorithmConfig()}, "conflict", "algorithm.correction"),
        (
            {"algorithm": replace(CORRECTED, max_staleness=0)},
            "out_of_range",
            "algorithm.max_staleness",
        ),
        ({"rollout": replace(rollout, ahead=1)}, "conflict", "rollout.ahead"),
        ({"rollout": replace(rollout, group_size=1)}, "conflict", "algorithm.baseline"),
        (
            {
                "rollout": replace(rollout, group_size=1),
                "algorithm": replace(CORRECTED, baseline="batch_mean"),
            },
            "conflict",
            "algorithm.normalize",
        ),
    ):
        with raises_coded(ValueError, reason, key):
            replace(config, **changes)
    check_start(config)
    assert load_tasks(config) == ([], [])
    with raises_coded(ConfigError, "missing", "agent.function"):
        check_agent(config)  # of `try` and `eval`


SCRIPT = """
import asyncio, sys
from lightning_jax.settings import load_config
from lightning_jax.train.config import Config
from lightning_jax.train.loop.trainer import train
asyncio.run(train(load_config(Config, [sys.argv[1]]), [], []))
"""


def _start(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(path)])


async def _until_open(product: Product) -> dict[str, Any]:
    """Return a rollout, once the run takes some."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return await product.open(task=WHOLE)
        except (aiohttp.ClientError, AssertionError):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_killed_run_trains_on_what_was_finished(tmp_path: Path, unused_tcp_port: int) -> None:
    """Kill a run with one whole group, half of a second one, and a rollout that runs."""
    path = tmp_path / "config.yaml"
    config = _config(tmp_path / "run", port=unused_tcp_port)
    config = replace(config, serve=replace(config.serve, host="127.0.0.1"))
    save_config(config, path)
    text = path.read_text().replace("???", KEY)
    path.write_text(text)

    process = _start(path)
    try:
        async with aiohttp.ClientSession() as http:
            product = Product(f"http://127.0.0.1:{unused_tcp_port}", http)
            opened = await _until_open(product)
            await product.end(opened, reward=await product.answer(opened))
            await product.serve(task=WHOLE)
            await product.serve(task={"id": "half"})
            await product.open(task={"id": "half"})  # runs when the trainer dies
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process = _start(path)
            opened = await _until_open(product)  # of a third group, also named "whole"
            await product.end(opened, discard=True)
            ended = await product.serve(task={"id": "half"})
            assert ended["rollout_id"] == "train-00000-001-01-2"
            for number in range(4):
                for _ in range(2):
                    with contextlib.suppress(AssertionError, aiohttp.ClientError):
                        await product.serve(task={"id": f"more-{number}"})
            assert await asyncio.to_thread(process.wait, 120) == 0
    finally:
        process.kill()
        process.wait()
    with contextlib.closing(Store(tmp_path / "run/store.sqlite", read_only=True)) as store:
        assert store.step_groups(0) == ["train-00000-000", "train-00000-001"]
        ids = [r.rollout_id for r in store.rollouts(group_id="train-00000-001")]
        assert ids == ["train-00000-001-00-1", "train-00000-001-01-1", "train-00000-001-01-2"]
        whole = store.external_groups(0, 0)[0]
        assert whole.task["text"] == "long" * 1000  # not shortened


async def test_a_run_without_an_agent_evaluates_nothing(tmp_path: Path) -> None:
    async with open_run(_config(tmp_path), TASKS, TASKS) as run:
        assert await run.evaluate() == {}
