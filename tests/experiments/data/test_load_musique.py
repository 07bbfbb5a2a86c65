"""Tests of MuSiQue in the released and the compact layout: same questions, same counts left out."""

import gzip
import json
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from musique import Search, corpus_of, load_musique, load_with_search, read_corpus

from lightning_jax.train.tasks.record_files import DatasetError

REAL = Path(__file__).parents[4] / "shared" / "data" / "musique"
TEXTS = {
    "Lap Engine": "The Lap Engine was designed by James Watt.",
    "James Watt": "Watt worked at the University of Glasgow.",
    "Steam": "Steam is hot.",
}


def _released_row(number: int, **changes: Any) -> dict[str, Any]:
    paragraphs = [
        {"idx": idx, "title": title, "paragraph_text": text, "is_supporting": idx < 2}
        for idx, (title, text) in enumerate(TEXTS.items())
    ]
    return {
        "id": f"2hop__{number}",
        "paragraphs": paragraphs,
        "question": "Where did the designer of the Lap Engine work?",
        "question_decomposition": [
            {
                "id": 1,
                "question": "Lap Engine >> designer",
                "answer": "James Watt",
                "paragraph_support_idx": 0,
            },
            {
                "id": 2,
                "question": "Where did #1 work?",
                "answer": "University of Glasgow",
                "paragraph_support_idx": 1,
            },
        ],
        "answer": "University of Glasgow",
        "answer_aliases": ["Glasgow"],
        "answerable": True,
    } | changes


def _write_released(folder: Path, split: str, rows: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"musique_ans_v1.0_{split}.jsonl").write_text(lines)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    other = [{"idx": 7, "title": "Steam", "paragraph_text": "Other.", "is_supporting": False}]
    hops = _released_row(0)["question_decomposition"]
    rows = [
        _released_row(0),
        _released_row(1, answerable=False),
        _released_row(2, paragraphs=_released_row(0)["paragraphs"] + other, answer_aliases=None),
        _released_row(
            3, question_decomposition=[hops[0], hops[1] | {"paragraph_support_idx": None}]
        ),
    ]
    _write_released(tmp_path / "released", "train", rows)
    _write_released(tmp_path / "released", "dev", [_released_row(9)])
    return tmp_path / "released"


def _jsonl(path: Path, rows: list[Any]) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


@pytest.fixture
def compact(tmp_path: Path) -> Path:
    root = tmp_path / "compact"
    root.mkdir()
    rows = [
        {"pid": f"p{i}", "title": title, "text": text}
        for i, (title, text) in enumerate(TEXTS.items())
    ]
    _jsonl(root / "corpus.jsonl.gz", rows)
    question = {
        "id": "q0",
        "question": "Where?",
        "answer": "University of Glasgow",
        "answer_aliases": [],
        "hops": 2,
        "supporting": ["p0", "p1"],
        "decomposition": [
            {"question": "Who?", "answer": "James Watt", "pid": "p0"},
            {"question": "Where did #1 work?", "answer": "University of Glasgow", "pid": "p1"},
        ],
    }
    for split in ("train", "dev"):
        _jsonl(root / f"{split}.jsonl.gz", [question | {"id": f"q{i}"} for i in range(4)])
    return root


def test_the_released_files(released: Path, tmp_path: Path) -> None:
    tasks, dropped = load_musique(released, "train", tmp_path / "cache")
    assert dropped == {"not_answerable": 1, "hop_without_paragraph": 1}
    assert [task["id"] for task in tasks] == ["2hop__0", "2hop__2"]
    assert tasks[1]["answer_aliases"] == []
    assert tasks[0] == {
        "id": "2hop__0",
        "question": "Where did the designer of the Lap Engine work?",
        "answer": "University of Glasgow",
        "answer_aliases": ["Glasgow"],
        "hops": 2,
        "supporting": ["p000000", "p000001"],
        "decomposition": [
            {
                "question": "Lap Engine >> designer",
                "answer": "James Watt",
                "paragraph": {
                    "pid": "p000000", "title": "Lap Engine", "text": TEXTS["Lap Engine"]
                },
            },
            {
                "question": "Where did #1 work?",
                "answer": "University of Glasgow",
                "paragraph": {
                    "pid": "p000001", "title": "James Watt", "text": TEXTS["James Watt"]
                },
            },
        ],
    }  # fmt: skip
    # Three paragraphs shared by all rows, and one whose title has two texts.
    corpus = read_corpus(corpus_of(released, tmp_path / "cache"))
    assert [paragraph["title"] for paragraph in corpus.by_pid.values()] == [*TEXTS, "Steam"]
    assert corpus.by_pid["p000003"]["text"] == "Other."
    dev, none = load_musique(released, "dev", tmp_path / "cache")
    assert [task["supporting"] for task in dev] == [["p000000", "p000001"]] and none == {}


def test_the_corpus_is_made_once_per_content(released: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = corpus_of(released, cache)
    before = first.stat().st_mtime_ns
    assert corpus_of(released, cache) == first and first.stat().st_mtime_ns == before
    _write_released(released, "dev", [_released_row(9), _released_row(10)])
    assert corpus_of(released, cache) != first
    # The release's archive has the files in a folder "data".
    (tmp_path / "archive").mkdir()
    released.rename(tmp_path / "archive" / "data")
    assert len(load_musique(tmp_path / "archive", "dev", cache)[0]) == 2


def test_the_compact_files(compact: Path, tmp_path: Path) -> None:
    tasks, dropped = load_musique(compact, "train", tmp_path)
    assert [task["id"] for task in tasks] == ["q0", "q1", "q2", "q3"]
    assert dropped == {}
    assert tasks[0]["decomposition"][1]["paragraph"]["title"] == "James Watt"
    assert tasks[0]["supporting"] == ["p0", "p1"] and tasks[0]["hops"] == 2
    assert corpus_of(compact, tmp_path) == compact / "corpus.jsonl.gz"


def test_both_splits_share_one_search(compact: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the extra musique is not installed")
    splits = [
        load_with_search(compact, split, tmp_path, search=Search(top_k=1))[0]
        for split in ("train", "dev")
    ]
    (url,) = {task["search_url"] for tasks in splits for task in tasks}
    request = urllib.request.Request(f"{url}/search", b'{"query": "engine of Watt"}')
    with urllib.request.urlopen(request, timeout=30) as response:
        (paragraph,) = json.load(response)["paragraphs"]
    assert paragraph["pid"] in ("p0", "p1")
    assert (tmp_path / "index-compact-bm25").is_dir()


def _question(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        lines = gzip.decompress((root / "train.jsonl.gz").read_bytes()).decode().splitlines()
        rows = [json.loads(line) for line in lines]
        change(rows[1])
        _jsonl(root / "train.jsonl.gz", rows)

    return write


@pytest.mark.parametrize(
    "spoil, reason, key, location",
    [
        (_question(lambda row: row.pop("answer")), "invalid", "answer", "train.jsonl.gz:2"),
        (_question(lambda row: row.update(question=7)), "invalid", "question", ":2"),
        (
            _question(lambda row: row.update(answer_aliases="x")),
            *("wrong_type", "answer_aliases", ":2"),
        ),
        (
            _question(lambda row: row.update(decomposition=[])),
            *("wrong_type", "decomposition", ":2"),
        ),
        (
            _question(lambda row: row.update(decomposition=[1])),
            *("wrong_type", "decomposition", ":2"),
        ),
        (
            _question(lambda row: row["decomposition"][0].update(pid="p9")),
            *("unknown", "pid", ":2"),
        ),
        (lambda root: _jsonl(root / "train.jsonl.gz", ["{"]), "malformed", None, "gz:1"),
        (lambda root: (root / "train.jsonl.gz").unlink(), "not_found", None, "train.jsonl.gz"),
        (
            lambda root: _jsonl(root / "corpus.jsonl.gz", [{"pid": "p", "text": "x"}]),
            *("wrong_type", "title", "corpus.jsonl.gz:1"),
        ),
        (
            lambda root: _jsonl(
                root / "corpus.jsonl.gz", [{"pid": "p", "title": "", "text": "x"}] * 2
            ),
            *("duplicate", "pid", "corpus.jsonl.gz:2"),
        ),
        (
            lambda root: (root / "corpus.jsonl.gz").unlink(),
            *("not_found", "data.root", "corpus.jsonl.gz"),
        ),
    ],
)
def test_broken_compact_files_are_one_sentence(
    compact: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    reason: str,
    key: str | None,
    location: str,
) -> None:
    spoil(compact)
    with raises_coded(DatasetError, reason, key) as caught:
        load_musique(compact, "train", tmp_path / "cache")
    assert location in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes, reason, key",
    [
        ({"paragraphs": None}, "wrong_type", "paragraphs"),
        ({"paragraphs": [{"idx": 0, "title": "x"}]}, "invalid", "paragraph_text"),
        ({"paragraphs": [{"idx": 0, "paragraph_text": "x"}]}, "wrong_type", "title"),
        ({"question_decomposition": "x"}, "wrong_type", "question_decomposition"),
        ({"question": ""}, "invalid", "question"),
    ],
)
def test_broken_released_files_are_one_sentence(
    released: Path, tmp_path: Path, changes: dict[str, Any], reason: str, key: str
) -> None:
    _write_released(released, "train", [_released_row(0, **changes)])
    with raises_coded(DatasetError, reason, key) as caught:
        load_musique(released, "train", tmp_path / "cache")
    assert "train.jsonl:1" in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_missing_is_named(released: Path, tmp_path: Path) -> None:
    with raises_coded(DatasetError, "not_found", "data.root"):
        load_musique(tmp_path / "no", "train", tmp_path)
    path = released / "musique_ans_v1.0_dev.jsonl"
    path.unlink()
    with raises_coded(DatasetError, "unreadable", str(path)):
        load_musique(released, "train", tmp_path)


@pytest.mark.skipif(not REAL.is_dir(), reason="needs the real files in ../shared/data/musique")
def test_real_files(tmp_path: Path) -> None:
    for split, hops in (("train", {2: 336, 3: 198, 4: 221}), ("dev", {2: 55, 3: 71, 4: 24})):
        tasks, dropped = load_musique(REAL, split, tmp_path)
        assert dropped == {}
        assert Counter(task["hops"] for task in tasks) == hops
        for task in tasks:  # as in the release, each hop's answer is in its paragraph
            for hop in task["decomposition"]:
                text = f"{hop['paragraph']['title']} {hop['paragraph']['text']}".lower()
                assert hop["answer"].lower().strip(". ")[:4] in text


# ---- The generated set ---------------------------------------------------------------------------


def test_generated_questions_can_be_answered_from_the_corpus(tmp_path: Path) -> None:
    corpus = read_corpus(corpus_of(None, tmp_path))
    assert len(corpus.by_pid) == 530
    names: dict[str, set[str]] = {}
    for split, number in (("train", 480), ("dev", 120)):
        tasks, dropped = load_musique(None, split, tmp_path)
        assert dropped == {} and len({task["question"] for task in tasks}) == number
        assert Counter(task["hops"] for task in tasks) == {2: number // 2, 3: number // 2}
        names[split] = set()
        for task in tasks:
            known = None
            for index, hop in enumerate(task["decomposition"]):
                paragraph = hop["paragraph"]
                # Each hop asks about the previous answer, and its paragraph contains the answer.
                assert known in (None, paragraph["title"])
                assert hop["answer"] in paragraph["text"]
                about = paragraph["title"] if index == 0 else f"#{index}"
                assert about in hop["question"]
                known = hop["answer"]
                names[split] |= {paragraph["title"], hop["answer"]}
            assert known == task["answer"]
            assert task["decomposition"][0]["paragraph"]["title"] in task["question"]
            assert task["answer"] not in task["question"]
    assert not names["train"] & names["dev"]


def test_the_generated_set_is_always_the_same(tmp_path: Path) -> None:
    first, second = (corpus_of(None, tmp_path / name).parent for name in ("a", "b"))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
