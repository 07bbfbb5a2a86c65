"""Tests that the page is well-formed and self-contained, and that text is escaped."""

from html.parser import HTMLParser

import pytest
from view_records import TOKENIZER, call, conversation, rollout, tool

from lightning_jax.studio.build import view_rollout, view_run
from lightning_jax.studio.page import render_page
from lightning_jax.studio.records import CallCredit, RolloutView, StepCredit
from lightning_jax.traces.trajectories import TraceReader
from lightning_jax.types import Span

VOID = {"meta", "br"}
HOSTILE = '</pre></details><script>alert(1)</script><img src=x onerror="alert(2)">&amp;{{ 7*7 }}\'"'


class _Page(HTMLParser):
    """Elements of a page with attributes and text. Fails if tags do not match."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.found: list[tuple[str, dict[str, str], str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in VOID:
            self.found.append((tag, given, ""))
        else:
            self.open.append((tag, given, []))

    def handle_endtag(self, tag: str) -> None:
        opened, given, text = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        self.found.append((tag, given, "".join(text)))

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def of_class(self, name: str) -> list[tuple[str, dict[str, str], str]]:
        return [element for element in self.found if name in element[1].get("class", "").split()]

    def texts(self, name: str) -> list[str]:
        # A browser drops the newline right after <pre>.
        return [text.removeprefix("\n") for _, _, text in self.of_class(name)]


def _view(spans: list[Span], credit: StepCredit | None = None) -> RolloutView:
    transitions, _, _ = TraceReader().transitions(spans)
    return view_rollout(rollout(0, 1.0), spans, transitions, TOKENIZER, credit or StepCredit())


def test_a_page_tells_the_rollout_whole() -> None:
    credit = StepCredit({"a": CallCredit(1.0, 0.5), "b": CallCredit(1.0, -0.5)}, ("a note",))
    page = _Page(render_page(None, [_view(conversation(), credit)]))
    assert page.texts("prompt") == ["Capital of France?", " It says: "]
    assert page.texts("response") == ["search<|im_end|>", "Paris<|im_end|>"]
    assert [element[1]["class"] for element in page.of_class("response")] == [
        "response plus", "response minus"
    ]  # fmt: skip
    assert "Capital of France?search<|im_end|>" in page.texts("shared")[0]
    assert (page.texts("input"), page.texts("output")) == (['{"query": "France"}'], ["a country"])
    (note,) = page.texts("note")
    assert note.endswith("a note")
    # Of 4 s in total: 4 s, then 1 s each from 0 s, 1 s and 2 s.
    assert [element[1]["style"] for element in page.of_class("bar")] == [
        "left: 0.000%; width: 100.000%",
        "left: 0.000%; width: 25.000%",
        "left: 25.000%; width: 25.000%",
        "left: 50.000%; width: 25.000%",
    ]
    tokens = page.of_class("t")
    assert [text for _, _, text in tokens[-6:]] == [*"Paris", "<|im_end|>"]
    assert tokens[0][1] == {"class": "t", "style": "--s: 0.10", "title": "log-prob -0.1000"}


def test_what_models_and_tools_write_is_never_markup() -> None:
    spans = [
        call("a", HOSTILE, HOSTILE, more={"gen_ai.request.model": HOSTILE}),
        tool("t", HOSTILE, HOSTILE, name=HOSTILE, error=HOSTILE),
    ]
    strange = rollout(0, status="agent_failure", reason=HOSTILE, detail=HOSTILE)
    credit, task = StepCredit(notes=(HOSTILE,)), {HOSTILE: HOSTILE}
    view = view_rollout(strange, spans, (), TOKENIZER, credit, task)
    tasks = {strange.rollout_id: task}
    source = render_page(view_run(HOSTILE, [strange], [(strange, spans)], tasks), [view])
    page = _Page(source)
    assert "<script" not in source and "<img" not in source and "49" not in page.texts("prompt")[0]
    assert page.texts("prompt") == [HOSTILE]
    assert page.texts("response") == [HOSTILE + "<|im_end|>"]
    assert page.texts("input") == page.texts("output") == [HOSTILE]
    assert [text.strip() for text in page.texts("task")] == [f"{HOSTILE}{HOSTILE}"]
    allowed = {
        "class",
        "style",
        "title",
        "href",
        "id",
        "open",
        "lang",
        "charset",
        "name",
        "content",
    }
    assert {name for _, given, _ in page.found for name in given} <= allowed | {"http-equiv"}


def test_a_page_is_self_contained() -> None:
    source = render_page(None, [_view(conversation())])
    page = _Page(source)
    assert {tag for tag, _, _ in page.found}.isdisjoint(
        {"script", "link", "img", "iframe", "object"}
    )
    assert "url(" not in source and "@import" not in source and "://" not in source
    policies = [given["content"] for _, given, _ in page.found if "http-equiv" in given]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert "prefers-color-scheme: dark" in source


def test_the_page_of_a_run_links_its_table_to_the_rollouts() -> None:
    shown = [rollout(i, float(i)) for i in range(2)]
    views = [view_rollout(rollout_, [], (), TOKENIZER, StepCredit()) for rollout_ in shown]
    run = view_run("my run", [*shown, rollout(2)], [(rollout_, []) for rollout_ in shown])
    page = _Page(render_page(run, views))
    ids = [given["id"] for _, given, _ in page.found if "id" in given]
    links = [given["href"] for tag, given, _ in page.found if tag == "a"]
    assert links == [f"#{item}" for item in ids] == [f"#{item.rollout_id}" for item in shown]
    assert page.texts("left-out") == ["not shown: 1 of 3 rollouts"]


@pytest.mark.parametrize("text", ["x" * 3_000_000, "\x00\x1b" * 1_500_000])
def test_large_output_is_cut(text: str) -> None:
    source = render_page(None, [_view([tool("t", "", text)])])
    assert len(source) < 200_000
    assert "2,980,000" in source
    assert "\x00" not in source and "\x1b" not in source


def test_many_spans_and_tokens_are_counted_where_left_out() -> None:
    view = _view([tool(str(i), "", "", at=i) for i in range(501)])
    assert _Page(render_page(None, [view])).texts("left-out") == ["not shown: 1 of 501 spans"]
    long = _view([call("a", "?", "y" * 5_100)])
    assert "... 101 " in _Page(render_page(None, [long])).texts("response")[0]
