"""Tests that the page holds all it shows, runs nothing else, and sets texts as text."""

import base64
import graphlib
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, open_browser
from view_records import TOKENIZER, call, conversation, rollout, tool

from lightning_jax.studio.build import view_rollout, view_run
from lightning_jax.studio.page import ASSETS, render_page
from lightning_jax.studio.records import CallCredit, RolloutView, StepCredit
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.types import Span

NODE = shutil.which("node")
HOSTILE = (
    '</pre></details></script><script>alert(1)</script><!--<img src=x onerror="alert(2)">&amp;\'"'
)


class Page(HTMLParser):
    """Elements of a page's source with attributes and text, as a browser reads it."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str], list[str]]] = []
        self.is_inside = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}, []))
        self.is_inside = True

    def handle_endtag(self, tag: str) -> None:
        self.is_inside = False

    def handle_data(self, data: str) -> None:
        if self.is_inside:
            self.found[-1][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.found if name == tag]

    @property
    def stored(self) -> Any:
        return json.loads(self.texts("script")[0])

    @property
    def policy(self) -> str:
        return next(given["content"] for _, given, _ in self.found if "http-equiv" in given)


class Drawn:
    """Elements that the page's script has drawn, with every rollout open."""

    def __init__(self, source: str, folder: Path) -> None:
        (folder / "page.html").write_text(source)
        program = Path(__file__).with_name("draw_page.js")
        command = [str(NODE), str(program), str(folder / "page.html")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        self.found: list[tuple[str, dict[str, str], str, dict[str, str]]] = json.loads(done.stdout)

    def texts(self, kind: str) -> list[str]:
        return [text for _, _, text, _ in self.of_class(kind)]

    def of_class(self, kind: str) -> list[Any]:
        return [found for found in self.found if kind in found[1].get("class", "").split()]


def view(spans: list[Span], credit: StepCredit | None = None) -> RolloutView:
    transitions, _, _ = TraceReader().transitions(spans)
    task = {"db": "towns", "question": "Capital?"}
    given = credit or StepCredit()
    return view_rollout(rollout(0, 1.0), spans, transitions, TOKENIZER, given, task)


def hostile_page() -> str:
    spans = [
        call("a", HOSTILE, HOSTILE, more={"gen_ai.request.model": HOSTILE}),
        tool("t", HOSTILE, HOSTILE, name=HOSTILE, error=HOSTILE),
    ]
    strange = rollout(0, status="agent_failure", reason=HOSTILE, detail=HOSTILE)
    task = {HOSTILE: HOSTILE}
    found = view_rollout(strange, spans, (), TOKENIZER, StepCredit(notes=(HOSTILE,)), task)
    tasks = {strange.rollout_id: task}
    return render_page(view_run(HOSTILE, [strange], [(strange, spans)], tasks), [found])


def test_texts_of_models_and_tools_are_no_part_of_the_markup() -> None:
    plain, page = Page(render_page(None, [view(conversation())])), Page(hostile_page())
    assert [tag for tag, _, _ in page.found] == [tag for tag, _, _ in plain.found]
    assert page.policy == plain.policy and page.texts("script")[1] == plain.texts("script")[1]
    (shown,) = page.stored["rollouts"]
    assert shown["reason"] == shown["detail"] == HOSTILE and [HOSTILE, HOSTILE] in shown["task"]
    assert shown["spans"][0]["call"]["new_text"] == HOSTILE
    assert page.stored["title"].startswith(HOSTILE)


def test_the_page_loads_nothing_and_runs_only_its_own_script() -> None:
    source = render_page(None, [view(conversation())])
    page = Page(source)
    assert {"link", "img", "iframe", "object"}.isdisjoint(tag for tag, _, _ in page.found)
    assert not any(name in ("src", "href") for _, given, _ in page.found for name in given)
    assert "url(" not in source and "@import" not in source and "://" not in source
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in (page.texts("script")[1], *page.texts("style"))
    ]
    assert page.policy == (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; "
        "base-uri 'none'; form-action 'none'"
    )
    script = page.texts("script")[1]
    assert not re.search(r"^(import|export)\b|innerHTML|outerHTML|eval\(", script, re.MULTILINE)
    assert "prefers-color-scheme: dark" in source


def test_the_page_of_a_run_counts_the_rollouts_that_it_leaves_out() -> None:
    shown = [rollout(i, float(i)) for i in range(2)]
    views = [view_rollout(rollout_, [], (), TOKENIZER, StepCredit()) for rollout_ in shown]
    run = view_run("my run", [*shown, rollout(2)], [(rollout_, []) for rollout_ in shown])
    stored = Page(render_page(run, views)).stored
    ids = [row.rollout_id for row in shown]
    assert [row["rollout_id"] for row in stored["run"]["rows"]] == ids
    assert [row["rollout_id"] for row in stored["rollouts"]] == ids
    assert stored["run"]["num_left_out"] == 1 and stored["title"].startswith("my run")


@pytest.mark.parametrize("text", ["x" * 3_000_000, "\x00\x1b" * 1_500_000])
def test_large_output_is_cut(text: str) -> None:
    source = render_page(None, [view([tool("t", "", text)])])
    assert len(source) < 200_000
    assert "2,980,000" in source
    assert "\x00" not in source and "\x1b" not in source


def test_numbers_that_are_not_finite_are_null() -> None:
    spans = [call("a", "?", "y", more={"lightning.behavior_logprobs": (float("nan"),) * 2})]
    (found,) = Page(render_page(None, [view(spans)])).stored["rollouts"]
    assert found["spans"][0]["call"]["tokens"][0][1] is None


def test_scripts_import_one_another_in_no_circle() -> None:
    imports = {
        path.name: re.findall(r'^import [^;]* from "\./([\w.]+)";', path.read_text(), re.MULTILINE)
        for path in ASSETS.glob("*.js")
    }
    assert "chart.js" in imports["compare.js"]
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


# What the script draws


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_a_page_tells_the_rollout_whole(tmp_path: Path) -> None:
    credit = StepCredit({"a": CallCredit(1.0, 0.5), "b": CallCredit(1.0, -0.5)}, ("a note",))
    page = Drawn(render_page(None, [view(conversation(), credit)]), tmp_path)
    assert page.texts("response") == ["search<|im_end|>", "Paris<|im_end|>"]
    assert [found[1]["class"] for found in page.of_class("response")] == [
        "response plus", "response minus"
    ]  # fmt: skip
    texts = [text for tag, _, text, _ in page.found if tag == "pre"]
    assert texts == [
        *("Capital of France?", "search<|im_end|>", '{"query": "France"}', "a country"),
        *("Capital of France?search<|im_end|>", " It says: ", "Paris<|im_end|>"),
    ]
    assert page.texts("task")[0].startswith("dbtownsquestionCapital?")
    assert any(text.endswith("a note") for text in page.texts("dim"))
    assert any("advantage +0.5" in text for text in page.texts("dim"))
    # Of 4 s in total: 4 s, then 1 s each from 0 s, 1 s and 2 s.
    assert [(style["left"], style["width"]) for *_, style in page.of_class("bar")] == [
        *(("0.000%", "100.000%"), ("0.000%", "25.000%")),
        *(("25.000%", "25.000%"), ("50.000%", "25.000%")),
    ]
    tokens = page.of_class("token")
    assert [text for _, _, text, _ in tokens[-6:]] == [*"Paris", "<|im_end|>"]
    assert tokens[0][1]["title"].startswith("log-prob -0.1000")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_table_links_the_rollouts_and_lists_failures(tmp_path: Path) -> None:
    failed = rollout(1, status="agent_failure", reason="deadline", detail="too late")
    shown = [rollout(0, 0.123456), failed]
    views = [view_rollout(done, [], (), TOKENIZER, StepCredit()) for done in shown]
    run = view_run("my run", [*shown, rollout(2)], [(done, []) for done in shown])
    page = Drawn(render_page(run, views), tmp_path)
    links = [given["href"] for tag, given, _, _ in page.found if tag == "a"]
    ids = [f"#{done.rollout_id}" for done in shown]
    assert links == [ids[1], *ids]  # the example of the failures first
    assert [f"#{found[1]['id']}" for found in page.of_class("stored")] == ids
    assert page.texts("left-out") == ["; not shown: 1 of 3 rollouts"]
    cells = [text for tag, _, text, _ in page.found if tag == "td"]
    assert {"deadline", "too late", "agent failure", "0.123"} <= set(cells)
    assert page.texts("error") == ["deadline: too late"]


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_hostile_texts_are_drawn_as_text(tmp_path: Path) -> None:
    page = Drawn(hostile_page(), tmp_path)
    assert {"script", "img"}.isdisjoint(tag for tag, *_ in page.found)
    assert page.texts("response") == [HOSTILE + "<|im_end|>"]
    assert next(text for tag, _, text, _ in page.found if tag == "dd") == HOSTILE


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_many_spans_and_tokens_are_counted_where_left_out(tmp_path: Path) -> None:
    many = view([tool(str(i), "", "", at=i) for i in range(501)])
    assert Drawn(render_page(None, [many]), tmp_path).texts("left-out") == [
        "not shown: 1 of 501 spans"
    ]
    long = Drawn(render_page(None, [view([call("a", "?", "y" * 5_100)])]), tmp_path)
    assert "not shown: 101 more tokens" in long.texts("dim")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
async def test_browser_draws_the_page_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(hostile_page())
    async with open_browser(tmp_path / "profile") as page:
        await page.open(path.as_uri(), "document.querySelector('.stored')")
        await page.run("document.querySelector('.stored').open = true")
        await page.wait_for("document.querySelector('.stored pre.response')")
        assert await page.run("document.querySelectorAll('img').length") == 0
        assert await page.run("document.querySelectorAll('script').length") == 2
