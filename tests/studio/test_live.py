"""Tests of the live page: its API over stores, changes as events, keys and hostile texts."""

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import view_records as records
from aiohttp import ClientResponse, ClientSession
from chromium import CHROMIUM, open_browser
from live_page import live

from lightning_jax.cli.commands.studio import Studio, serve_live
from lightning_jax.cli.main import main
from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import UserError
from lightning_jax.gateway.app import Gateway
from lightning_jax.gateway.calls.remote import RemoteEngine
from lightning_jax.gateway.sessions.open_rollouts import Activity, RolloutActivity
from lightning_jax.settings import ConfigError
from lightning_jax.studio.live import answers
from lightning_jax.studio.live.catalog import Catalog
from lightning_jax.studio.live.overview import WINDOW_S, Throughput
from lightning_jax.studio.live.server import ASSETS, LiveServer, page_of
from lightning_jax.studio.records import CallView, RolloutView, SpanView, TokenView, as_json
from lightning_jax.traces.listing import Filter
from lightning_jax.traces.store import Store

FIRST = "train-00003-000-00-1"
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>\x1b[2J\u202eabc"


def add_rows(run: Path, *rows: dict[str, float]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# The API


async def test_runs_have_status_rewards_and_settings_that_differ(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "2")):
        run = records.make_run(tmp_path / name)
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("seed: 0", f"seed: {seed}"))
        add_rows(
            run, {"step": 0, "rollout/reward_mean": 0.25}, {"step": 1, "eval/reward_mean": 1.0}
        )
    async with live(tmp_path) as page:
        found = await page.get("/api/runs")
    assert {(run["name"], run["first"], run["best"]) for run in found["runs"]} == {
        ("a/run", 1, 1),
        ("b/run", 1, 1),
    }
    assert all(run["rollouts"] == {"scored": 4, "agent_failure": 1} for run in found["runs"])
    values = {row["name"]: row["values"] for row in found["settings"]}
    assert sorted(values["seed"]) == ["1", "2"] and "model.dtype" not in values


async def test_run_has_metrics_and_failures_with_an_example(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    add_rows(run, {"step": 0, "a/x": 1.0, "rollout/num_rollouts": 8.0, "time/step_s": 60.0})
    add_rows(run, {"step": 1, "a/x": float("nan")}, {"step": 2, "b/y": 2.0})
    async with live(tmp_path) as page:
        found = await page.get("")
        columns = await page.get("/metrics", names="a/x,b/y,absent")
    assert found["metrics"] == ["a/x", "b/y", "rollout/num_rollouts", "time/step_s"]
    assert (found["train_steps"], found["eval_steps"]) == ([3], [3])
    (failure,) = found["failures"]
    assert (failure["reason"], failure["count"]) == ("deadline", 1)
    assert failure["example"] == "train-00003-001-00-1"
    assert columns["columns"]["a/x"] == [1.0, None, None]
    assert columns["columns"]["b/y"] == [None, None, 2.0]
    assert columns["columns"]["absent"] == [None] * 3
    assert (columns["samples"], columns["minutes"]) == ([0, 8, 8], [0, 1, 1])


@pytest.mark.parametrize(("better", "worse", "sign"), [(9, 1, 1), (1, 9, -1), (3, 1, 0), (0, 0, 0)])
async def test_run_says_whether_it_learns(
    tmp_path: Path, better: int, worse: int, sign: int
) -> None:
    row = {"eval/reward_mean": 0.5, "eval/change_mean": 0.1, "eval/change_stderr": 0.05}
    counts = {"eval/num_better": better, "eval/num_worse": worse, "eval/change_since_step": 0}
    add_rows(records.make_run(tmp_path), {"step": 3, **row, **counts, "rollout/reward_mean": 0.4})
    async with live(tmp_path) as page:
        found = await page.get("")
    assert [verdict["sign"] for verdict in found["learning"]] == [sign]
    assert found["warmup_steps"] == 0
    assert found["worst_group"]["group_id"] == "train-00003-000"
    assert found["worst_group"]["reward_mean"] == pytest.approx(1 / 3)


async def test_run_without_steps_does_not_say_that_it_learns(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        found = await page.get("")
    assert [verdict["sign"] for verdict in found["learning"]] == [0]
    assert found["worst_group"] is None


async def test_a_run_says_what_its_warmup_and_the_steps_after_it_did(tmp_path: Path) -> None:
    def evaluation(step: int, since: int, reward: float, change: float, better: int) -> dict:
        return {
            **{"step": step, "eval/reward_mean": reward, "eval/change_mean": change},
            **{"eval/change_stderr": 0.05, "eval/change_since_step": since},
            **{"eval/num_better": better, "eval/num_worse": 1},
        }

    add_rows(
        records.make_run(tmp_path),
        {"step": 0, "eval/reward_mean": 0.025, "warmup/loss": 2.0},
        {"step": 9, "warmup/loss": 1.0},
        evaluation(10, 0, 0.375, 0.35, 15),
        evaluation(15, 10, 0.4, 0.025, 2),
        evaluation(20, 10, 0.375, 0.0, 1),
    )
    async with live(tmp_path) as page:
        found = await page.get("")
    assert found["warmup_steps"] == 10
    warmup, after = found["learning"]
    assert (warmup["sign"], after["sign"]) == (1, 0)
    assert "0.025 to 0.375" in warmup["text"] and "since step 0" in warmup["text"]
    assert "0.375 to 0.375" in after["text"] and "since step 10" in after["text"]


async def test_group_has_attempts_with_rewards_and_advantages(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        worst = await page.get("/groups", order="worst", phase="train")
        group = await page.get("/groups/train-00003-000")
        texts = (await page.get("/groups/train-00003-000/texts"))["attempts"]
        failed = await page.get("/groups/train-00003-001")
    assert [row["group_id"] for row in worst["groups"]] == ["train-00003-000", "train-00003-001"]
    assert [attempt["reward"] for attempt in group["attempts"]] == [1.0, 0.0, 0.0]
    shown = [[part["response"] for part in text["parts"]] for text in texts.values()]
    assert [len(responses) for responses in shown] == [1, 1, 1]  # earlier ones are equal, too
    assert all(response.startswith("Paris") for (response,) in shown)
    assert texts[FIRST]["advantages"] == pytest.approx([2**0.5] * 2, rel=1e-3)
    assert failed["task"] == [["question", "Which river?"], ["answer", '["Loire"]']]


async def test_rollout_has_tokens_credit_task_and_neighbors(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        found = await page.get(f"/rollouts/{FIRST}")
        failed = await page.get("/rollouts/train-00003-001-00-1")
        unknown = await page.get("/rollouts/nothing", 404)
    assert [span["kind"] for span in found["spans"]] == ["agent", "llm", "tool", "llm"]
    call = found["spans"][3]["call"]
    text, logprob, version, is_forced = call["tokens"][0]
    assert (logprob, version, is_forced) == (-0.1, 3, False) and "Paris".startswith(text)
    assert call["credit"]["advantage"] == pytest.approx(2**0.5, rel=1e-3)
    assert call["shares_with"] == 1
    assert found["neighbors"] == {
        "next_attempt": "train-00003-000-01-1",
        "next_group": "train-00003-001-00-1",
    }
    assert failed["task"][0] == ["question", "Which river?"]
    assert failed["task_name"] == "task_1: Which river?"
    assert failed["neighbors"] == {"previous_group": FIRST}
    assert unknown["error"]["reason"] == "unknown_rollout"


async def test_search_finds_tasks_and_failures_in_any_case(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        for text, number in (("which RIVER", 1), ("too long", 1), ("100%", 0), ("task_0", 4)):
            assert (await page.get("/rollouts", text=text))["total"] == number, text


async def test_running_rollouts_come_longest_first(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        for index, at in ((5, 0.0), (6, -60.0)):
            spans = [records.call("first", "Hi", "Ho", at=at)]
            records.add(store, records.rollout(index, status="running"), spans)
    async with live(tmp_path) as page:
        running = (await page.get("/live"))["running"]
    assert [rollout["index"] for rollout in running] == [6, 5]


async def test_server_of_a_training_reports_slots_queue_and_rate(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        for index in (5, 6):
            records.add(store, records.rollout(index, status="running"), [])
    ids = [f"train-00003-000-0{index}-1" for index in (6, 5)]
    open_now = tuple(RolloutActivity(name, 10**18, 2, 70) for name in (*ids, "not in the store"))
    stats = {"serve/running": 3.0, "serve/queue_depth": 2.0, "serve/tokens_generated": 100.0}
    stats["serve/compiling"] = 1.0
    async with live(tmp_path, activity=lambda: Activity(4, stats, open_now)) as page:
        now = 0.0
        page.server._throughput = Throughput(lambda: now)
        first = await page.get("/live")
        stats["serve/tokens_generated"], now = 140.0, 2.0
        second = await page.get("/live")
        open_now = ()
        third = await page.get("/live")
    assert first["server"]["tokens_per_s"] is None
    assert second["server"] == {
        **{"slots": 4, "slots_used": 3.0, "queue": 2.0, "open_requests": None},
        **{"tokens_per_s": 20.0, "window_s": 2.0, "compiling": 1.0},
    }
    assert [rollout["rollout_id"] for rollout in second["running"]] == ids
    assert (second["running"][0]["calls"], second["running"][0]["tokens"]) == (2, 70)
    assert second["num_running"] == 3 and third["running"] == []  # the store is behind the server


async def test_page_of_a_folder_knows_no_slots(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        assert (await page.get("/live"))["server"] is None


def test_rate_is_of_the_last_seconds() -> None:
    now, total, found = 0.0, 0.0, {}
    throughput = Throughput(lambda: now)
    for _ in range(30):  # 5 tokens a second, then 100
        total += 5.0 if now < 15.0 else 100.0
        now += 1.0
        found = throughput.observe(Activity(1, {"serve/tokens_generated": total}, ()))
    assert found["tokens_per_s"] == 100.0 and found["window_s"] == WINDOW_S
    now += 1000.0
    assert (
        throughput.observe(Activity(1, {"serve/tokens_generated": total}, ()))["tokens_per_s"]
        is None
    )


@pytest.mark.parametrize("query", [{"step": "x"}, {"order": "none"}, {"limit": "1e3"}])
async def test_wrong_query_is_refused(tmp_path: Path, query: dict[str, str]) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        found = await page.get("/groups", 400, **query)
    assert found["error"]["key"] in query


async def test_downloads_are_a_page_and_json_lines(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        for path in ("/page.html?step=3", f"/rollouts/{FIRST}/page.html"):
            async with page.client.get(page.run + path) as response:
                assert response.status == 200 and FIRST in await response.text()
                assert response.headers["Content-Disposition"].startswith("attachment")
        async with page.client.get(page.run + "/rollouts.jsonl?phase=train") as response:
            rows = [json.loads(line) for line in (await response.text()).splitlines()]
    assert len(rows) == 4 and rows[3]["task"]["question"] == "Which river?"


# Large, old, hostile and vanishing runs


async def test_a_download_sorts_the_rollouts_once(tmp_path: Path) -> None:
    records.add_rollouts(records.make_run(tmp_path), num_steps=30)
    statements: list[str] = []
    async with live(tmp_path) as page:
        (run,) = Catalog([tmp_path]).runs()
        with run.listing() as listing:
            expected = [rollout.rollout_id for rollout in listing.rollouts(Filter(), limit=10_000)]
            listing._db.set_trace_callback(statements.append)
        parts = answers.jsonl_keys(run, Filter())
        lines = [line for keys in parts for line in answers.jsonl_lines(run, keys).splitlines()]
        run.close()
        async with page.client.get(page.run + "/rollouts.jsonl") as response:
            assert (await response.read()).splitlines() == lines
    assert [json.loads(line)["rollout_id"] for line in lines] == expected
    assert len(parts) > 10 and sum("ORDER BY step" in text for text in statements) == 1


async def test_store_of_10_000_rollouts_is_read_in_pages(tmp_path: Path) -> None:
    records.add_rollouts(records.make_run(tmp_path), num_steps=100)
    async with live(tmp_path) as page:
        first = await page.get("/rollouts", phase="train", limit=100_000)
        last = await page.get("/rollouts", phase="train", limit=50, offset=10_000)
        groups = await page.get("/groups", phase="train", order="spread", limit=25)
        of_step = await page.get("/groups", phase="train", step=50)
        summary = await page.get("")
        neighbors = (await page.get("/rollouts/train-00050-005-05-1"))["neighbors"]
    assert (len(first["rollouts"]), first["total"]) == (answers.MAX_PAGE, 10_004)
    assert first["rollouts"][0]["step"] == 109
    assert [row["step"] for row in last["rollouts"]] == [3] * 4
    assert (len(groups["groups"]), groups["total"]) == (25, 1002)
    assert of_step["total"] == 10 and len(of_step["groups"][0]["attempts"]) == 10
    assert summary["rollouts"]["scored"] == 10_004 and len(summary["train_steps"]) == 101
    assert neighbors["next_step"] == "train-00051-000-00-1"
    assert neighbors["previous_attempt"] == "train-00050-005-04-1"


async def test_store_of_an_older_version_is_shown_and_not_changed(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    with contextlib.closing(sqlite3.connect(run / "store.sqlite")) as db:
        for column in ("components", "reasons", "worker"):
            db.execute(f"ALTER TABLE rollouts DROP COLUMN {column}")
        db.execute("DROP TABLE judge_verdicts")
        db.execute("PRAGMA user_version = 6")
        db.execute("PRAGMA journal_mode = DELETE")
    before = (run / "store.sqlite").read_bytes()
    async with live(tmp_path) as page:
        assert (await page.get("/rollouts"))["total"] == 5
        assert (await page.get(f"/rollouts/{FIRST}"))["reward"] == 1.0
    assert (run / "store.sqlite").read_bytes() == before


def make_hostile_run(folder: Path) -> None:
    run = records.make_run(folder)
    hostile: dict[str, Any] = {"status": "agent_failure", "reason": HOSTILE, "detail": HOSTILE}
    spans = [
        *records.conversation(answer=HOSTILE),
        records.tool("u", HOSTILE, "x" * 2**20, at=2.5),
    ]
    task = {"id": "task_9", HOSTILE: HOSTILE}
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        records.add(store, records.rollout(0, task_index=9, **hostile), spans, task)


async def test_hostile_texts_have_no_control_signs_and_are_cut(tmp_path: Path) -> None:
    make_hostile_run(tmp_path)
    rollout = "train-00003-009-00-1"
    paths = ("", "/groups", "/rollouts", f"/rollouts/{rollout}", "/groups/train-00003-009")
    async with live(tmp_path) as page:
        for path in (*paths, "/rollouts.jsonl"):
            async with page.client.get(page.run + path) as response:
                text = await response.text()
            decoded = str([json.loads(line) for line in text.splitlines()])
            assert "\x1b" not in decoded and "\\x1b" not in decoded and "\\u202e" not in decoded
            assert "\u202e" not in decoded and len(text) < 200_000
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.content_type != "text/html"


async def test_megabytes_in_names_tasks_and_failures_are_cut(tmp_path: Path) -> None:
    run, long = records.make_run(tmp_path), "x" * 2**20
    failed: dict[str, Any] = {"status": "agent_failure", "reason": long, "detail": long}
    task = {"id": "task_9", "question": long, long: "name"}
    with contextlib.closing(Store(run / "store.sqlite")) as store:
        failed["metrics"] = {long: 1.0}
        records.add(store, records.rollout(0, task_index=9, **failed), [], task)
    rollout, group = "train-00003-009-00-1", "train-00003-009"
    paths = ("", "/groups", "/rollouts", f"/rollouts/{rollout}", f"/groups/{group}")
    async with live(tmp_path) as page:
        for path in (*paths, f"/groups/{group}/texts", "/live"):
            async with page.client.get(page.run + path) as response:
                assert response.status == 200 and len(await response.text()) < 100_000, path


def test_megabyte_in_one_token_is_cut() -> None:
    tokens = (TokenView("x" * 2**20, -1.0), *[TokenView("y" * 1000, -1.0)] * 5000)
    call = CallView(1, 5, "", "z" * 2**20, tokens, (("f", "w" * 2**20),), "stop", -1.0, (3,), 0.0)
    span = SpanView("llm", "1 chat", 0, 0.0, 1.0, None, call, "", "", ())
    found = as_json(RolloutView(records.rollout(), 1.0, (span,)))
    (shown,) = found["spans"]
    assert len(shown["call"]["tokens"][0][0]) < 1000
    assert shown["call"]["num_tokens"] == 5001 and len(json.dumps(found)) < 500_000


async def test_vanished_run_is_a_404_and_leaves_the_list(tmp_path: Path) -> None:
    run = records.make_run(tmp_path / "a")
    records.make_run(tmp_path / "b")
    async with live(tmp_path) as page:
        keys = {found.name: found.key for found in page.catalog.runs()}
        gone = f"/api/runs/{keys['a/run']}"
        await page.get(f"{gone}/rollouts")
        shutil.rmtree(run)
        for path in ("", "/rollouts", f"/rollouts/{FIRST}", "/metrics"):
            await page.get(gone + path, 404)
        assert [found["name"] for found in (await page.get("/api/runs"))["runs"]] == ["b/run"]
        page.catalog.scan()
        assert (await page.get(gone, 404))["error"]["reason"] == "unknown_run"


def test_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError) as caught:
        Catalog([tmp_path])
    assert caught.value.reason == "empty"
    assert main(["studio", str(tmp_path / "nothing")]) == 1
    assert "nothing" in capsys.readouterr().err


# Changes as events


async def next_event(response: ClientResponse) -> tuple[str, dict[str, int]]:
    """Return the id and the numbers of the next event."""
    async with asyncio.timeout(10):
        fields = {}
        while line := (await response.content.readline()).decode().strip():
            name, _, value = line.partition(": ")
            fields[name] = value
        return fields["id"], json.loads(fields["data"])["runs"]


async def test_ten_clients_get_changes_from_one_poll(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    async with live(tmp_path) as page, contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(page.client.get("/api/events")) for _ in range(10)
        ]
        before = [await next_event(stream) for stream in streams]
        task = page.server.watch._task
        add_rows(run, {"step": 0})
        after = [await next_event(stream) for stream in streams]
        assert page.server.watch._task is task and page.server.watch.num_clients == 10
        assert streams[0].headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert len({found for found, _ in before}) == len({found for found, _ in after}) == 1
    assert sum(after[0][1].values()) == sum(before[0][1].values()) + 1


async def test_ten_clients_share_one_answer(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        page.server.answers.max_age_s = 60.0
        found = await asyncio.gather(*(page.get("") for _ in range(10)))
        before = page.server.answers.num_computed
        again = await page.get("")
        other = await page.get("", x="1")
    assert before == 1 and all(answer == again for answer in found) and other == again
    assert page.server.answers.num_computed == 2


async def test_failed_answer_is_not_kept(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        page.server.answers.max_age_s = 60.0
        (tmp_path / "run" / "store.sqlite").rename(tmp_path / "away")
        await page.get("/rollouts", 404)
        (tmp_path / "away").rename(tmp_path / "run" / "store.sqlite")
        assert (await page.get("/rollouts"))["total"] == 5


async def test_client_that_reconnects_learns_of_missed_changes(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    async with live(tmp_path) as page:
        async with page.client.get("/api/events") as stream:
            first, numbers = await next_event(stream)
        while page.server.watch.num_clients:
            await asyncio.sleep(0.01)
        assert page.server.watch._task is None  # nothing polls while nobody looks
        add_rows(run, {"step": 0})
        async with page.client.get("/api/events", headers={"Last-Event-ID": first}) as stream:
            async with asyncio.timeout(10):
                while (found := (await next_event(stream))[1]) == numbers:
                    pass
    assert sum(found.values()) == sum(numbers.values()) + 1


# Keys, hosts and headers


async def test_key_guards_the_api_but_not_the_page(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path, key="secret") as page:
        for path in ("/", "/app.js", "/style.css"):
            async with page.client.get(path) as response:
                assert response.status == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/api/runs", "/api/events", page.run + "/rollouts.jsonl"):
                async with page.client.get(path, headers=headers) as response:
                    assert response.status == 401
        async with page.client.get("/api/runs", headers={"x-api-key": "secret"}) as response:
            assert response.status == 200


async def test_other_host_names_are_refused_without_a_key(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        for host, status in (("evil.example:80", 403), ("localhost:1", 200), ("[::1]:1", 200)):
            async with page.client.get("/api/runs", headers={"Host": host}) as response:
                assert response.status == status


async def test_exposed_address_needs_a_key(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    server = LiveServer(Catalog([tmp_path]))
    with pytest.raises(UserError) as caught:
        await serve_live(server, "0.0.0.0", 0, None)
    assert (caught.value.reason, caught.value.key) == ("missing", "--key")
    runner = await serve_live(LiveServer(Catalog([tmp_path]), "k"), "0.0.0.0", 0, "k")
    await runner.cleanup()


async def test_every_answer_has_the_security_headers(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        paths = ("/", "/app.js", "/vendor/uplot.js", "/nothing", "/../server.py", "/api/runs")
        for path in paths:
            async with page.client.get(path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert response.headers["Referrer-Policy"] == "no-referrer"


async def test_server_of_a_run_shows_the_page(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    gateway = Gateway(RemoteEngine("policy", ServeConfig()), records=False)
    gateway.show_page(page_of(run, "secret", gateway.activity), "")
    async with gateway, ClientSession() as client:
        async with client.get(f"{gateway.local_url}/") as response:
            assert str(response.url) == f"{gateway.local_url}/studio/"
            assert 'src="app.js"' in await response.text()
            assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        async with client.get(f"{gateway.local_url}/studio/api/runs") as response:
            assert response.status == 401
        headers = {"Authorization": "Bearer secret"}
        async with client.get(f"{gateway.local_url}/studio/api/runs", headers=headers) as response:
            assert response.status == 200
        async with client.get(f"{gateway.local_url}/healthz") as response:
            assert response.status == 200


def read_studio(runs: Path, *flags: str) -> tuple[str, int]:
    """Start `lightning-jax studio`; return its URL and the status of a request without a key."""
    command = [sys.executable, "-m", "lightning_jax", "studio", str(runs), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if "http://" in line).split()[-1]
        try:
            with urllib.request.urlopen(f"{url.partition('#')[0]}api/runs") as response:
                return url, response.status
        except urllib.error.HTTPError as error:
            return url, error.code
        finally:
            process.terminate()


def test_studio_has_a_key_unless_told_otherwise(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    url, status = read_studio(tmp_path)
    assert len(url.partition("#key=")[2]) >= 32 and status == 401
    url, status = read_studio(tmp_path, "--no-key")
    assert "key" not in url and status == 200


def test_page_sets_texts_only_as_text() -> None:
    own = [path for path in ASSETS.iterdir() if path.suffix in (".js", ".html")]
    assert len(own) >= 8
    for path in own:
        text = path.read_text()
        for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
            assert way not in text, path
        assert "style=" not in text and "http://" not in text and "https://" not in text
    index = (ASSETS / "index.html").read_text()
    assert index.count("<script") == 1 and 'type="module" src="app.js"' in index


WITHOUT_JAX_CODE = """
import sys
from pathlib import Path

from lightning_jax.studio.live import answers, server
from lightning_jax.studio.live.catalog import Catalog
from lightning_jax.traces.listing import Filter

catalog = Catalog([Path(sys.argv[1])])
(run,) = catalog.runs()
answers.runs_answer(catalog)
answers.run_answer(run)
answers.group_answer(run, "train-00003-000")
texts = answers.group_texts_answer(run, "train-00003-000")
assert all(len(attempt["advantages"]) == 2 for attempt in texts["attempts"].values())
spans = answers.rollout_answer(run, "train-00003-000-00-1")["spans"]
calls = [span["call"] for span in spans if span["call"]]
assert all(call["credit"] and call["tokens"][0][0] for call in calls) and len(calls) == 2
assert "train-00003-000-00-1" in answers.run_page(run, Filter())
assert "jax" not in sys.modules
"""


def test_answers_with_credit_need_no_jax(tmp_path: Path) -> None:
    assert not Studio.needs_jax
    records.make_run(tmp_path)
    subprocess.run([sys.executable, "-c", WITHOUT_JAX_CODE, str(tmp_path)], check=True)


# In a browser


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_browser_shows_hostile_texts_as_text(tmp_path: Path) -> None:
    make_hostile_run(tmp_path / "runs")
    async with live(tmp_path / "runs") as page:
        key = page.run.rpartition("/")[2]
        base = str(page.client.make_url("/"))
        shown = {}
        for part in ("", f"run/{key}", f"run/{key}/rollout/{quote('train-00003-009-00-1')}"):
            shown[part] = await dump(f"{base}#/{part}", tmp_path / "profile")
    assert "run</a>" in shown[""]
    assert "deadline" in shown[f"run/{key}"] and "<canvas" not in shown[f"run/{key}"]
    for dom in shown.values():
        assert "<title>taken" not in dom and "<img" not in dom and dom.count("<script") == 1
    rollout = list(shown.values())[-1]
    assert "&lt;script&gt;" in rollout and "onerror=alert(1)&gt;" in rollout


async def dump(url: str, profile: Path) -> str:
    """Return the page as the browser has it a few seconds after it was opened."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += [f"--user-data-dir={profile}", "--virtual-time-budget=8000", "--dump-dom", url]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    async with asyncio.timeout(60):
        return (await process.communicate())[0].decode()


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_pages_that_were_left_hold_no_connection(tmp_path: Path) -> None:
    records.make_run(tmp_path / "runs")
    async with live(tmp_path / "runs") as served, open_browser(tmp_path / "profile") as page:
        for _ in range(8):  # a browser allows six connections to a server
            await page.open(
                str(served.client.make_url("/")),
                "document.querySelector('#connection').className === 'on'",
                timeout_s=20.0,
            )


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_browser_connects_again_and_shows_what_it_missed(tmp_path: Path) -> None:
    run = records.make_run(tmp_path / "runs")
    runner = await serve_live(LiveServer(Catalog([tmp_path / "runs"])), "127.0.0.1", 0, None)
    port = runner.addresses[0][1]
    state = "document.querySelector('#connection').className"
    async with open_browser(tmp_path / "profile") as page:
        await page.open(f"http://127.0.0.1:{port}/", f"{state} === 'on'")
        await runner.cleanup()
        await page.wait_for(f"{state} === 'off'")
        add_rows(run, {"step": 6, "time/step_s": 1.0})
        runner = await serve_live(LiveServer(Catalog([tmp_path / "runs"])), "127.0.0.1", port, None)
        try:
            await page.wait_for(f"{state} === 'on'")
            await page.wait_for("document.querySelector('td.number').textContent.startsWith('7')")
        finally:
            await runner.cleanup()
