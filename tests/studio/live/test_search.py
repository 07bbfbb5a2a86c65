"""Tests of the search in transcripts: what is searched, its limits, and its page."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import view_records as records
from chromium import CHROMIUM, open_browser
from live_page import live

from lightning_jax.studio.live import search
from lightning_jax.studio.live.catalog import WatchedRun
from lightning_jax.studio.live.search import SearchResult, search_transcripts
from lightning_jax.traces.listing import Filter
from lightning_jax.traces.store import Store

FIRST = "train-00003-000-00-1"


def find(run: Path, text: str, wanted: Filter | None = None, **limits: Any) -> SearchResult:
    watched = WatchedRun(run, "run")
    try:
        with watched.listing() as listing:
            return search_transcripts(watched.reader, listing, text, wanted or Filter(), **limits)
    finally:
        watched.close()


@pytest.mark.parametrize(
    ("text", "number", "where"),
    [
        ("capital OF france", 5, "prompt of call 1"),
        ("it says:", 5, "prompt of call 2"),
        ("paris", 5, "response of call 2"),
        ("a country", 5, "output of run"),
        ('"query"', 5, "input of run"),
        ("100%", 0, ""),
        (".*", 0, ""),  # a text and no pattern
    ],
)
def test_prompts_responses_and_tools_are_searched(
    tmp_path: Path, text: str, number: int, where: str
) -> None:
    found = find(records.make_run(tmp_path), text)
    assert (len(found.matches), found.num_searched, found.cursor) == (number, 5, None)
    for match in found.matches:
        assert match.where == where and match.text.lower() == text.lower()


def test_search_continues_where_it_stopped_and_keeps_conditions(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    found = find(run, "paris", Filter(phase="train"), max_s=0.0)
    ids, numbers = [], []
    while found.num_searched:
        numbers.append(found.num_searched)
        ids += [match.rollout_id for match in found.matches]
        found = find(run, "paris", Filter(phase="train"), cursor=found.cursor, max_s=0.0)
    assert found.cursor is None and numbers == [1] * 4
    assert len(set(ids)) == 4 and ids[-1] == FIRST


def test_rollout_with_too_much_text_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = records.make_run(tmp_path)
    spans = [records.tool("u", "x" * 2000, "y" * 2000 + "needle")]
    with closing(Store(run / "store.sqlite")) as store:
        records.add(store, records.rollout(0, 1.0, task_index=7), spans)
    assert len(find(run, "needle").matches) == 1
    monkeypatch.setattr(search, "MAX_ROLLOUT_CHARS", 3000)
    found = find(run, "needle")
    assert (found.matches, found.num_cut, found.num_searched) == ((), 1, 6)


def test_matches_are_safe_to_print(tmp_path: Path) -> None:
    run = records.make_run(tmp_path)
    spans = [records.tool("u", "x", "\x1b[2J needle \u202e")]
    with closing(Store(run / "store.sqlite")) as store:
        records.add(store, records.rollout(0, 1.0, task_index=7), spans)
    (match,) = find(run, "needle").matches
    assert match.before == "\u241b[2J " and match.after == " \ufffd"


async def test_search_needs_a_text_and_says_how_far_it_came(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    async with live(tmp_path) as page:
        empty = await page.get("/search", 400, text="")
        found = await page.get("/search", text="PARIS", phase="eval")
    assert empty["error"]["key"] == "text"
    assert (found["searched"], found["total"], found["cursor"]) == (1, 1, None)
    assert found["matches"][0]["reward"] == 0.5 and found["notes"] == []


async def test_run_without_its_tokenizer_says_what_is_not_searched(tmp_path: Path) -> None:
    records.make_run(tmp_path)
    for path in (tmp_path / "model").iterdir():
        path.unlink()
    async with live(tmp_path) as page:
        found = await page.get("/search", text="a country")
        nothing = await page.get("/search", text="paris")
    assert len(found["matches"]) == 5 and nothing["matches"] == []
    assert len(found["notes"]) == len(nothing["notes"]) == 1


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_browser_finds_a_text_and_opens_its_rollout(tmp_path: Path) -> None:
    records.make_run(tmp_path / "runs")
    async with live(tmp_path / "runs") as served, open_browser(tmp_path / "profile") as page:
        key = served.run.rpartition("/")[2]
        base = str(served.client.make_url("/"))
        await page.open(f"{base}#/run/{key}", "document.querySelector('input[type=search]')")
        await page.run(
            "(() => { const scope = [...document.querySelectorAll('select')]"
            ".find((found) => found.innerHTML.includes('transcripts'));"
            "scope.value = 'transcripts'; scope.dispatchEvent(new Event('change')); })()"
        )
        await page.run(
            "(() => { const box = document.querySelector('input[type=search]');"
            "box.value = 'it SAYS'; box.dispatchEvent(new Event('change')); })()"
        )
        await page.wait_for("document.querySelectorAll('mark').length === 4")
        await page.run("document.querySelector('mark').closest('tr').querySelector('a').click()")
        await page.wait_for("document.querySelectorAll('.span').length === 4")
        shown = await page.run(
            "[...document.querySelectorAll('.span')].filter((span) => !span.hidden).length"
        )
    assert shown == 1
