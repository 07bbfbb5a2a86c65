"""Tests of comparisons in the live page: tasks won and lost, seeds, settings and transcripts."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
import view_records as records
from chromium import CHROMIUM, open_browser
from live_page import Live, live

from lightning_jax.traces.store import Store

HOSTILE = "<img src=x onerror=alert(1)>\u202e"


def make_evaluated_run(folder: Path, rewards: Sequence[float], seed: int = 0) -> Path:
    """Write a run whose evaluation of step 5 has a task for each reward."""
    run = records.make_run(folder)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("seed: 0", f"seed: {seed}"))
    with closing(Store(run / "store.sqlite")) as store:
        for index, reward in enumerate(rewards):
            task = {"id": f"task_{index}", "question": f"question {index} {HOSTILE}"}
            done = records.rollout(0, reward, phase="eval", step=5, task_index=index)
            answer = f"answer of seed {seed}"
            records.add(store, done, records.conversation(answer=answer), task)
    (run / "metrics.jsonl").write_text(
        f'{{"step": 5, "eval/reward_mean": {sum(rewards) / len(rewards)}}}\n'
    )
    return run


def keys(page: Live) -> dict[str, str]:
    return {run.name.partition("/")[0]: run.key for run in page.catalog.runs()}


async def test_comparison_has_tasks_won_and_lost_with_rollouts(tmp_path: Path) -> None:
    make_evaluated_run(tmp_path / "a", [0.0] * 8 + [1.0])
    make_evaluated_run(tmp_path / "b", [1.0] * 8 + [0.5], seed=1)
    async with live(tmp_path) as page:
        key = keys(page)
        found = await page.get(f"/api/compare?group={key['a']}&group={key['b']}")
    (pair,) = found["pairs"]
    assert (pair["num_won"], pair["num_lost"], pair["num_equal"]) == (8, 1, 0)
    assert pair["p_value"] == pytest.approx(20 / 512) and pair["verdict"]["sign"] == 1
    assert len(pair["tasks"]) == 9 and pair["tasks"][-1]["change"] == -0.5
    first = pair["tasks"][0]
    assert [row["key"] for row in first["before_rollouts"]] == [key["a"]]
    assert [row["key"] for row in first["after_rollouts"]] == [key["b"]]
    assert first["after_rollouts"][0]["rollout_id"].startswith("eval-00005-")
    assert "\u202e" not in str(found)
    assert pair["seeds"] is None and ["seed", "0", "1"] in found["settings"]["rows"]


async def test_few_differences_are_not_called_better(tmp_path: Path) -> None:
    make_evaluated_run(tmp_path / "a", [0.0, 0.0, 1.0])
    make_evaluated_run(tmp_path / "b", [1.0, 1.0, 1.0])
    async with live(tmp_path) as page:
        key = keys(page)
        found = await page.get(f"/api/compare?group={key['a']}&group={key['b']}")
    assert found["pairs"][0]["verdict"]["sign"] == 0
    assert found["pairs"][0]["p_value"] == 0.5


async def test_seeds_of_one_group_have_a_standard_error(tmp_path: Path) -> None:
    for name, rewards in (("a", 0.0), ("b", 0.2), ("c", 0.5), ("d", 0.7)):
        make_evaluated_run(tmp_path / name, [rewards] * 2, seed=ord(name))
    async with live(tmp_path) as page:
        key = keys(page)
        groups = f"group={key['a']}.{key['b']}&group={key['c']}.{key['d']}"
        found = await page.get(f"/api/compare?{groups}")
    (pair,) = found["pairs"]
    assert [row[1:] for row in pair["seeds"]["rows"]] == [
        ["2", "0.100", "0.100"],
        ["2", "0.600", "0.100"],
    ]
    assert "0.500 ± 0.141" in pair["seeds"]["notes"][0]
    assert len(pair["tasks"][0]["before_rollouts"]) == 2
    assert found["settings"]["rows"] == [] or found["settings"]["rows"][0][0] != "seed"


async def test_unusable_comparisons_are_refused(tmp_path: Path) -> None:
    make_evaluated_run(tmp_path / "a", [0.0])
    make_evaluated_run(tmp_path / "b", [1.0])
    async with live(tmp_path) as page:
        a, b = keys(page)["a"], keys(page)["b"]
        alone = await page.get(f"/api/compare?group={a}", 400)
        again = await page.get(f"/api/compare?group={a}&group={a}", 400)
        gone = await page.get(f"/api/compare?group={a}&group=none", 404)
        (tmp_path / "b" / "run" / "store.sqlite").unlink()
        empty = await page.get(f"/api/compare?group={a}&group={b}")
    assert alone["error"]["key"] == "group" and again["error"]["reason"] == "repeated"
    assert gone["error"]["reason"] == "unknown_run"
    assert empty["pairs"][0]["missing"].startswith("b/run has no evaluation")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_browser_shows_both_transcripts_of_a_lost_task(tmp_path: Path) -> None:
    make_evaluated_run(tmp_path / "runs" / "a", [1.0] * 3)
    make_evaluated_run(tmp_path / "runs" / "b", [0.0, 1.0, 1.0], seed=1)
    async with live(tmp_path / "runs") as served, open_browser(tmp_path / "profile") as page:
        a, b = keys(served)["a"], keys(served)["b"]
        base = str(served.client.make_url("/"))
        await page.open(f"{base}#/", "document.querySelector('a.button')")
        assert "compare" in await page.run("document.querySelector('a.button').textContent")
        await page.open(f"{base}#/compare/{quote(a)}/{quote(b)}", "document.querySelector('td')")
        facts = await page.run("document.querySelector('.facts').textContent")
        assert facts == "0tasks won1tasks lost2equal"
        await page.run("document.querySelector('a[href*=beside]').click()")
        await page.wait_for("document.querySelectorAll('.beside .turn').length > 5")
        texts = await page.run(
            "[...document.querySelectorAll('.beside article')].map((node) => node.textContent)"
        )
        assert await page.run("document.querySelectorAll('img').length") == 0
    assert "answer of seed 0" in texts[0] and "reward 1" in texts[0]
    assert "answer of seed 1" in texts[1] and "reward 0" in texts[1]
