"""Tests of the index and its service: BM25 and dense search on a few paragraphs, and errors."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paragraph_search
import psutil
import pytest
from coded import raises_coded
from paragraph_index import MAX_QUERY_CHARS, ParagraphIndex, SearchError, open_index, read_corpus
from sentence_encoder import PACKAGED, EncoderError, SentenceEncoder, find_encoder

pytest.importorskip("bm25s", reason="of the extra musique")

PROGRAM = str(paragraph_search.__file__)
TEXTS = {
    "Lap Engine": "The Lap Engine is a beam engine designed by James Watt.",
    "James Watt": "While at the University of Glasgow, Watt became interested in steam.",
    "Signmark": "Signmark is a deaf rap artist from Finland. Ålesund is in Norway.",
    "Finland": "Before the euro, the currency of Finland was the markka.",
    "Solar energy": "Photovoltaics turns the light of the sun into electricity.",
}


def _write(path: Path, texts: dict[str, str]) -> Path:
    rows = [
        {"pid": f"p{i}", "title": title, "text": text}
        for i, (title, text) in enumerate(texts.items())
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    lines += "\n"  # blank line
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("corpus") / "corpus.jsonl.gz", TEXTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("indexes")


def _open(folders: Path, corpus: Path, retriever: str) -> ParagraphIndex:
    if retriever == "dense":
        _need_dense()
    return open_index(folders / retriever, corpus, retriever, PACKAGED)


def _need_dense() -> None:
    pytest.importorskip("faiss", reason="of the extra musique")
    try:
        find_encoder(PACKAGED)
    except EncoderError as error:
        pytest.skip(str(error))


def _titles(index: ParagraphIndex, query: str, count: int = 2) -> list[str]:
    return [paragraph["title"] for paragraph in index.search(query, count)]


def test_bm25_finds_words(folders: Path, corpus: Path) -> None:
    index = _open(folders, corpus, "bm25")
    assert len(index) == 5
    # "Watt" is in two paragraphs, "beam" in one of them.
    assert _titles(index, "Which BEAM engine is by Watt?") == ["Lap Engine", "James Watt"]
    assert _titles(index, "Ålesund") == ["Signmark"]
    assert _titles(index, "markka", count=99) == ["Finland"]  # no other shares a word with it
    assert index.search("zebra", 3) == index.search("", 3) == index.search("the of", 3) == []
    assert index.search("markka", 1) == [
        {"pid": "p3", "title": "Finland", "text": TEXTS["Finland"]}
    ]


def test_dense_finds_meaning(folders: Path, corpus: Path) -> None:
    index = _open(folders, corpus, "dense")
    assert _titles(index, "renewable power from panels", 1) == ["Solar energy"]
    assert _titles(index, "What money did the Finns use?", 1) == ["Finland"]
    for odd in ("", "half of a smile \ud83d"):
        assert len(index.search(odd, 3)) == 3
    assert len(index.search("anything", 99)) == 5


@pytest.mark.parametrize("retriever", ["bm25", "dense"])
def test_what_has_been_seen_is_left_out(folders: Path, corpus: Path, retriever: str) -> None:
    index = _open(folders, corpus, retriever)
    query = "Which beam engine is by Watt?"
    assert [paragraph["pid"] for paragraph in index.search(query, 2)] == ["p0", "p1"]
    assert [paragraph["pid"] for paragraph in index.search(query, 1, without=["p0"])] == ["p1"]
    assert index.search(query, 9, without=["p0", "p1", "p2", "p3", "p4", "other"]) == []


@pytest.mark.parametrize("retriever", ["bm25", "dense"])
def test_an_index_is_made_once_and_mapped(folders: Path, corpus: Path, retriever: str) -> None:
    _open(folders, corpus, retriever)
    before = {path: path.stat().st_mtime_ns for path in (folders / retriever).rglob("*")}
    index = _open(folders, corpus, retriever)
    assert {path: path.stat().st_mtime_ns for path in (folders / retriever).rglob("*")} == before
    assert isinstance(index._starts, np.memmap)
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        names = {"bm25": "data.csc.index.npy", "dense": "vectors.faiss"}
        assert names[retriever] in mapped.read_text()
    assert [path for path in folders.iterdir() if path.name.startswith(".")] == []


def test_a_long_query_is_read_in_part(folders: Path, corpus: Path) -> None:
    index = _open(folders, corpus, "bm25")
    assert index.search("zebra " * MAX_QUERY_CHARS + "markka", 1) == []


def test_the_packaged_encoder_agrees_with_its_authors_figures() -> None:
    _need_dense()
    vectors = SentenceEncoder(find_encoder(PACKAGED)).encode(
        ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    )
    # Cosines from the documentation of sentence-transformers for all-MiniLM-L6-v2.
    expected = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=1e-4)


def test_a_sentence_is_the_same_in_any_company() -> None:
    _need_dense()
    encoder = SentenceEncoder(find_encoder(PACKAGED))
    texts = ["Watt.", "A much longer sentence, on engines and on steam.", ""]
    batch = encoder.encode(texts)
    alone = np.concatenate([encoder.encode([text]) for text in texts])
    np.testing.assert_allclose(batch, alone, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(batch, axis=1), 1.0, atol=1e-5)
    assert encoder.encode([]).shape == (0, 384)


def test_an_index_of_something_else_is_refused(folders: Path, corpus: Path, tmp_path: Path) -> None:
    _open(folders, corpus, "bm25")
    other = _write(tmp_path / "other.jsonl", {"Lap Engine": "Another text."})
    with raises_coded(SearchError, "mismatch", "corpus"):
        open_index(folders / "bm25", other, "bm25", PACKAGED)
    with raises_coded(SearchError, "mismatch", "retriever"):
        open_index(folders / "bm25", corpus, "dense", PACKAGED)
    broken = tmp_path / "broken"
    shutil.copytree(folders / "bm25", broken)
    (broken / "meta.json").write_text("{")
    with raises_coded(SearchError, "malformed"):
        open_index(broken, corpus, "bm25", PACKAGED)


@pytest.mark.parametrize(
    "content, reason, location",
    [
        ("", "empty", ""),
        ('{"pid": "p0", "title": "T", "text": "x"}\n{"pid": "p1"}', "missing", "corpus.jsonl:2"),
        ("[1]", "missing", "corpus.jsonl:1"),
        ("{", "malformed", ""),
        ("\xff", "malformed", ""),
    ],
)
def test_a_broken_corpus_is_one_sentence(
    tmp_path: Path, content: str, reason: str, location: str
) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with raises_coded(SearchError, reason) as caught:
        open_index(tmp_path / "index", path, "bm25", PACKAGED)
    assert location in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "index").exists()
    (tmp_path / "corpus.jsonl.gz").write_bytes(b"x")
    with raises_coded(SearchError, "malformed"):
        read_corpus(tmp_path / "corpus.jsonl.gz")
    with raises_coded(SearchError, "unreadable"):
        open_index(tmp_path / "index", tmp_path / "none.jsonl", "bm25", PACKAGED)


def test_an_encoder_that_is_none(tmp_path: Path) -> None:
    with raises_coded(EncoderError, "malformed"):
        SentenceEncoder(tmp_path)
    _need_dense()
    copy = tmp_path / "gpt"
    shutil.copytree(find_encoder(PACKAGED), copy)
    (copy / "config.json").write_text('{"model_type": "gpt2"}')
    with raises_coded(EncoderError, "unsupported"):
        SentenceEncoder(copy)


def test_clip() -> None:
    assert paragraph_search.clip("steam engine", 12) == "steam engine"
    assert paragraph_search.clip("steam engine", 11) == "steam ..."
    assert paragraph_search.clip("steam engine", 5) == "steam ..."
    assert paragraph_search.clip("steamengine", 5) == "steam ..."


# ---- Service -------------------------------------------------------------------------------------


@contextmanager
def _service(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, PROGRAM, *arguments, "--end-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    try:
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(10)


def _post(url: str, body: Any) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/search", content)
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def _refusal(url: str, body: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as refused:
        _post(url, body)
    with refused.value:
        return refused.value.code


def test_the_service(folders: Path, corpus: Path) -> None:
    _open(folders, corpus, "bm25")
    where = ("--corpus", str(corpus), "--index", str(folders / "bm25"))
    with _service(*where, "--top-k", "1", "--max-chars", "20") as (process, url):
        assert _post(url, {"query": "beam engine"}) == {
            "paragraphs": [{"pid": "p0", "title": "Lap Engine", "text": "The Lap Engine is a ..."}]
        }
        assert _post(url, {"query": "zebra"}) == {"paragraphs": []}
        second = _post(url, {"query": "beam engine Watt", "without": ["p0"]})
        assert [paragraph["pid"] for paragraph in second["paragraphs"]] == ["p1"]
        lists = ("p0", None, [7], ["p0"] * 1001)
        wrong = [{"query": "x", "without": without} for without in lists]
        deep = b"[" * 100_000
        for bad in (
            b"",
            b"{",
            b"\xff",
            deep,
            [],
            {"query": None},
            {"query": 7},
            {"q": "x"},
            *wrong,
        ):
            assert _refusal(url, bad) == 400
        assert _refusal(url, {"query": "x" * 3_000_000}) == 413  # megabytes
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            health = json.load(response)
        assert (health["retriever"], health["num_paragraphs"]) == ("bm25", 5)
    assert process.returncode == 0


def test_the_program_refuses_in_one_sentence(folders: Path, corpus: Path, tmp_path: Path) -> None:
    _open(folders, corpus, "bm25")
    other = _write(tmp_path / "other.jsonl", {"Lap Engine": "Another text."})
    command = [sys.executable, PROGRAM, "--corpus", other, "--index", folders / "bm25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(folders / "bm25") in done.stderr and done.stderr.count("\n") == 1


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_it_ends_when_its_parent_is_killed(folders: Path, corpus: Path) -> None:
    _open(folders, corpus, "bm25")
    where = ("--corpus", str(corpus), "--index", str(folders / "bm25"), "--end-with-stdin")
    command = [sys.executable, "-c", PARENT, sys.executable, PROGRAM, *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        lines = [parent.stdout.readline(), parent.stdout.readline()]
        (pid,) = (int(line) for line in lines if line.strip().isdigit())
        child = psutil.Process(pid)
        assert child.is_running()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the search outlived its parent"
            time.sleep(0.05)
