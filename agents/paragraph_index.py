"""Search index over paragraphs, built once and kept in a directory: BM25 or dense vectors.

    meta.json         which corpus, which retriever
    paragraphs.jsonl  the paragraphs, and where each begins (starts.npy)
    bm25/             the scores of every word in every paragraph (bm25s)
    vectors.faiss     a unit vector for each paragraph, searched exactly (faiss)

All but meta.json is memory-mapped: processes share the pages, and a start need not read them.

BM25: Robertson and Zaragoza, 2009. bm25s: Lù, arXiv 2407.03618. faiss: Douze et al., arXiv
2401.08281.
"""

import gzip
import hashlib
import json
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1  # raise it when the contents of the directory change
RETRIEVERS = ("bm25", "dense")
MAX_QUERY_CHARS = 1000  # the rest is ignored

Paragraph = dict[str, Any]  # pid, title, text


class SearchError(ValueError):
    """Index or corpus that cannot be used. The message is one sentence."""

    def __init__(self, message: str, *, reason: str, key: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason  # for programs: a short code
        self.key = key


class ParagraphIndex:
    """Open index. Any number of threads may search."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.meta = meta
        self._starts = np.load(folder / "starts.npy", mmap_mode="r")
        with (folder / "paragraphs.jsonl").open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        make = _Bm25 if meta["retriever"] == "bm25" else _Dense
        self._scorer = make(folder, meta)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def search(self, query: str, count: int, without: Collection[str] = ()) -> list[Paragraph]:
        """Return at most `count` paragraphs, best first, without those in `without`.

        BM25 returns only paragraphs that share a word with the query.
        """
        enough = min(count + len(without), len(self))
        paragraphs = map(self.paragraph, self._scorer.best(query[:MAX_QUERY_CHARS], enough))
        return [paragraph for paragraph in paragraphs if paragraph["pid"] not in without][:count]

    def paragraph(self, index: int) -> Paragraph:
        return json.loads(self._lines[self._starts[index] : self._starts[index + 1]])


def open_index(folder: Path, corpus: Path, retriever: str, encoder: str) -> ParagraphIndex:
    """Open the index in the directory, and build it first if there is none.

    Raises SearchError if the directory holds an index of another corpus or retriever.
    """
    if retriever not in RETRIEVERS:
        raise SearchError(
            f"retriever is {retriever!r}; expected {' or '.join(RETRIEVERS)}.", reason="unknown"
        )
    expected = {
        "format": FORMAT,
        "corpus": corpus_digest(corpus),
        "retriever": retriever,
        "encoder": encoder if retriever == "dense" else None,
    }
    if not folder.exists():
        _make(folder, read_corpus(corpus), expected)
    try:
        meta = json.loads((folder / "meta.json").read_text())
        different = [key for key in expected if meta.get(key) != expected[key]]
    except (OSError, ValueError, AttributeError) as error:
        raise SearchError(
            f"index {folder} is not readable ({error}); delete it to rebuild it.",
            reason="malformed",
        ) from error
    if different:
        key = different[0]
        raise SearchError(
            f"index {folder} was made for {key} {meta.get(key)}; expected {expected[key]} "
            f"(corpus {corpus}). Name another folder, or delete this one.",
            reason="mismatch",
            key=key,
        )
    return ParagraphIndex(folder, meta)


def corpus_digest(corpus: Path) -> str:
    """Return the first digits of the file's SHA-256. Raises SearchError."""
    try:
        return hashlib.sha256(corpus.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise SearchError(
            f"corpus {corpus} is not readable ({error.strerror}); expected a .jsonl or .jsonl.gz "
            "file with pid, title and text.",
            reason="unreadable",
        ) from error


def read_corpus(corpus: Path) -> list[Paragraph]:
    """Return the paragraphs of a `.jsonl` or `.jsonl.gz` file.

    Raises SearchError at the first bad one.
    """
    paragraphs: list[Paragraph] = []
    try:
        read = gzip.open if corpus.suffix == ".gz" else open
        with read(corpus, "rt", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict) or not all(
                    isinstance(row.get(key), str) for key in ("pid", "title", "text")
                ):
                    raise SearchError(
                        f"{corpus}:{number} lacks one of the texts pid, title, text.",
                        reason="missing",
                    )
                paragraphs.append({key: row[key] for key in ("pid", "title", "text")})
    except (OSError, EOFError, zlib.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SearchError(
            f"corpus {corpus} is not readable ({error}); expected JSON objects, one a line.",
            reason="malformed",
        ) from error
    if not paragraphs:
        raise SearchError(f"corpus {corpus} has 0 paragraphs; expected at least 1.", reason="empty")
    return paragraphs


def _make(folder: Path, paragraphs: Sequence[Paragraph], meta: dict[str, Any]) -> None:
    """Build the directory under a temporary name, then rename it.

    So a crash leaves no partial index.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        lines = [
            json.dumps(paragraph, ensure_ascii=False).encode() + b"\n" for paragraph in paragraphs
        ]
        (unfinished / "paragraphs.jsonl").write_bytes(b"".join(lines))
        np.save(unfinished / "starts.npy", np.cumsum([0, *map(len, lines)], dtype=np.int64))
        texts = [f"{paragraph['title']}\n{paragraph['text']}" for paragraph in paragraphs]
        make = _Bm25.make if meta["retriever"] == "bm25" else _Dense.make
        make(unfinished, texts, meta)
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=1))
        unfinished.chmod(0o755)
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():  # else another process built it first
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class _Bm25:
    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self._bm25 = _bm25s().BM25.load(str(folder / "bm25"), mmap=True, show_progress=False)

    def best(self, query: str, count: int) -> list[int]:
        words = _words([query])
        if not words[0]:
            return []
        indices, scores = self._bm25.retrieve(words, k=count, show_progress=False)
        return [int(p) for p, score in zip(indices[0], scores[0], strict=True) if score > 0]

    @staticmethod
    def make(folder: Path, texts: Sequence[str], meta: dict[str, Any]) -> None:
        bm25 = _bm25s().BM25()
        bm25.index(_words(texts), show_progress=False)
        bm25.save(str(folder / "bm25"))


def _words(texts: Sequence[str]) -> list[list[str]]:
    return _bm25s().tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise SearchError(
            "the retriever bm25 needs the package bm25s; install the extra: "
            "pip install 'lightning-jax[musique]'.",
            reason="not_installed",
        ) from error
    return bm25s


class _Dense:
    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        faiss = _faiss()
        self._encoder = _encoder(meta["encoder"])
        self._vectors = faiss.read_index(str(folder / "vectors.faiss"), faiss.IO_FLAG_MMAP_IFC)

    def best(self, query: str, count: int) -> list[int]:
        query = query.encode("utf-8", "replace").decode()  # a model may emit a lone surrogate
        _, indices = self._vectors.search(self._encoder.encode([query]), count)
        return [int(index) for index in indices[0]]

    @staticmethod
    def make(folder: Path, texts: Sequence[str], meta: dict[str, Any]) -> None:
        faiss = _faiss()
        vectors = _encoder(meta["encoder"]).encode(texts)
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        faiss.write_index(index, str(folder / "vectors.faiss"))


def _encoder(name: str) -> Any:
    from sentence_encoder import EncoderError, SentenceEncoder, find_encoder

    try:
        return SentenceEncoder(find_encoder(name))
    except EncoderError as error:
        raise SearchError(str(error), reason=error.reason) from error


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise SearchError(
            "the retriever dense needs the package faiss-cpu; install the extra: "
            "pip install 'lightning-jax[musique]'.",
            reason="not_installed",
        ) from error
    return faiss
