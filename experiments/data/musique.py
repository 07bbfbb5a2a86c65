"""Multi-hop questions over a corpus: MuSiQue as released, its compact files, or a generated set.

MuSiQue: Trivedi et al., TACL 2022. The release gives each question its own twenty paragraphs. The
corpus that an agent searches is the union of all of them.
"""

import atexit
import functools
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from dataset_files import make_directory, require_text, wrong_field
from musique_generated import generated_root
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from side_process import side_process

from lightning_jax.settings.schema import Count, Positive
from lightning_jax.train.tasks.record_files import DatasetError, Record, read_records
from lightning_jax.types import Task

SEARCH = Path(__file__).parents[2] / "agents" / "paragraph_search.py"

_RELEASED = {split: f"musique_ans_v1.0_{split}.jsonl" for split in ("train", "dev")}
_CORPUS = "corpus.jsonl.gz"

Paragraph = dict[str, str]  # pid, title, text


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Search:
    """Search of a corpus by agents/paragraph_search.py."""

    retriever: Literal["bm25", "dense"] = "bm25"
    encoder: str = "all-MiniLM-L6-v2"  # for dense: this name, a directory or a hub id
    index: str | None = None  # folder with an index of this corpus; None: build and keep one
    top_k: Count = 3  # paragraphs per query
    max_chars: Count = 500  # length limit of a paragraph
    start_timeout_s: Positive = 3600.0  # a large dense index takes long to build


def load_with_search(
    root: str | Path | None, split: str, cache_dir: str | Path, *, search: Search | None = None
) -> tuple[list[Task], dict[str, int]]:
    """Return the tasks of `load_musique` with `search_url`, the address of the corpus's search.

    The search is a separate process, which ends with this one.
    """
    tasks, left_out = load_musique(root, split, cache_dir)
    url = _start_search(search or Search(), corpus_of(root, cache_dir), Path(cache_dir))
    return [task | {"search_url": url} for task in tasks], left_out


@functools.cache  # both splits share a process
def _start_search(search: Search, corpus: Path, cache_dir: Path) -> str:
    """Start the search and return its address. By default the index is next to the data."""
    encoder = [Path(search.encoder).name] if search.retriever == "dense" else []
    name = "-".join(["index", corpus.parent.name, search.retriever, *encoder])
    command = (
        *(str(SEARCH), "--corpus", str(corpus), "--index", search.index or str(cache_dir / name)),
        *("--retriever", search.retriever, "--encoder", search.encoder),
        *("--top-k", str(search.top_k), "--max-chars", str(search.max_chars), "--end-with-stdin"),
    )
    until_exit = ExitStack()
    process = side_process(command, start_timeout_s=search.start_timeout_s)
    url = until_exit.enter_context(process)["url"]
    atexit.register(until_exit.close)
    print(f"search: {search.retriever} over {corpus} at {url}")
    return url


def load_musique(
    root: str | Path | None, split: str, cache_dir: str | Path
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks in file order, and the number left out for each reason.

    A task has `id`, `question`, `answer`, `answer_aliases`, `hops`, `supporting` (pids) and
    `decomposition`: for each hop `question`, `answer` and `paragraph` (pid, title, text). `root`
    None is the generated set. Generated files are written once, under `cache_dir`. Raises
    DatasetError.
    """
    folder, released = _find(root, Path(cache_dir).absolute())
    corpus = read_corpus(corpus_of(root, cache_dir))
    if released:
        tasks, left_out = _released_tasks(folder / _RELEASED[split], corpus)
        return tasks, dict(left_out)
    return list(_compact_tasks(folder / f"{split}.jsonl.gz", corpus)), {}


def corpus_of(root: str | Path | None, cache_dir: str | Path) -> Path:
    """Return the `.jsonl.gz` file with the corpus: pid, title and text of each paragraph.

    For the release it is written under `cache_dir`, once per content of its two files. Raises
    DatasetError.
    """
    cache = Path(cache_dir).absolute()
    folder, released = _find(root, cache)
    if not released:
        return folder / _CORPUS
    files = [folder / name for name in _RELEASED.values()]
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise DatasetError(
                f"{path} is not readable ({error.strerror}); expected it beside the other one, "
                "because the corpus is made of both.",
                reason="unreadable",
                key=str(path),
            ) from error

    def fill(target: Path) -> None:
        with gzip.open(target / _CORPUS, "wt", encoding="utf-8", compresslevel=3) as file:
            for paragraph in _released_paragraphs(files):
                file.write(json.dumps(paragraph, ensure_ascii=False) + "\n")

    directory = make_directory(cache / f"musique-corpus-{digest.hexdigest()[:12]}", fill)
    return directory / _CORPUS


@dataclass(frozen=True)
class Corpus:
    """Paragraphs by id, and ids by title and text."""

    by_pid: dict[str, Paragraph]
    pid_of: dict[tuple[str, str], str]


def read_corpus(path: Path) -> Corpus:
    """Read the paragraphs of a corpus file. Raises DatasetError."""
    by_pid: dict[str, Paragraph] = {}
    for where, row in read_records(path):
        require_text(row, ("pid", "text"), where)
        if not isinstance(row.get("title"), str):
            raise wrong_field(where, "title", row.get("title"), "a text")
        if row["pid"] in by_pid:
            raise wrong_field(where, "pid", row["pid"], "a unique id", "duplicate")
        by_pid[row["pid"]] = {key: row[key] for key in ("pid", "title", "text")}
    return Corpus(by_pid, {(item["title"], item["text"]): pid for pid, item in by_pid.items()})


def _find(root: str | Path | None, cache: Path) -> tuple[Path, bool]:
    """Return the folder, and True if it has the released layout."""
    folder = generated_root(cache) if root is None else Path(root).expanduser().absolute()
    if (folder / _CORPUS).is_file():
        return folder, False
    for directory in (folder, folder / "data"):  # folder inside the release's archive
        if (directory / _RELEASED["train"]).is_file():
            return directory, True
    raise DatasetError(
        f"data.root {str(folder)!r} has neither {_CORPUS} (the compact layout) nor "
        f"{_RELEASED['train']} (the released one); expected one of them, check the path, or set "
        "data.root=null for the generated set.",
        reason="not_found",
        key="data.root",
    )


# ---- The compact layout --------------------------------------------------------------------------


def _compact_tasks(path: Path, corpus: Corpus) -> Iterator[Task]:
    for where, row in read_records(path):
        _check(row, where)
        steps = row.get("decomposition")
        if not isinstance(steps, list) or not steps:
            raise wrong_field(where, "decomposition", steps, "a list of hops")
        yield _task(row, [_hop(step, corpus, where) for step in steps])


def _hop(step: Any, corpus: Corpus, where: str) -> dict[str, Any]:
    if not isinstance(step, dict):
        raise wrong_field(where, "decomposition", step, "hops of question, answer and pid")
    require_text(step, ("question", "answer", "pid"), where)
    if step["pid"] not in corpus.by_pid:
        raise wrong_field(where, "pid", step["pid"], "the pid of a paragraph", "unknown")
    return _step(step, corpus.by_pid[step["pid"]])


# ---- The released layout -------------------------------------------------------------------------


def _released_paragraphs(files: list[Path]) -> Iterator[Paragraph]:
    """Yield each distinct paragraph of the files, in order of appearance."""
    seen: set[tuple[str, str]] = set()
    for path in files:
        for where, row in read_records(path):
            for paragraph in _paragraphs(row, where):
                key = (paragraph["title"], paragraph["paragraph_text"])
                if key not in seen:
                    seen.add(key)
                    pid = f"p{len(seen) - 1:06d}"
                    yield {"pid": pid, "title": key[0], "text": key[1]}


def _paragraphs(row: Record, where: str) -> list[Record]:
    paragraphs = row.get("paragraphs")
    if not isinstance(paragraphs, list) or not all(isinstance(item, dict) for item in paragraphs):
        raise wrong_field(where, "paragraphs", paragraphs, "a list of objects")
    for item in paragraphs:
        require_text(item, ("paragraph_text",), where)
        if not isinstance(item.get("title"), str):
            raise wrong_field(where, "title", item.get("title"), "a text")
    return paragraphs


def _released_tasks(path: Path, corpus: Corpus) -> tuple[list[Task], Counter[str]]:
    """Return the answerable questions whose hops all name a paragraph, and the counts left out."""
    tasks, left_out = [], Counter[str]()
    for where, row in read_records(path):
        if row.get("answerable") is False:
            left_out["not_answerable"] += 1
            continue
        _check(row, where)
        by_idx = {
            item.get("idx"): corpus.by_pid[corpus.pid_of[item["title"], item["paragraph_text"]]]
            for item in _paragraphs(row, where)
        }
        steps = row.get("question_decomposition")
        if not isinstance(steps, list) or not steps or not all(isinstance(s, dict) for s in steps):
            raise wrong_field(where, "question_decomposition", steps, "a list of hops")
        if any(step.get("paragraph_support_idx") not in by_idx for step in steps):
            left_out["hop_without_paragraph"] += 1
            continue
        for step in steps:
            require_text(step, ("question", "answer"), where)
        hops = [_step(step, by_idx[step["paragraph_support_idx"]]) for step in steps]
        tasks.append(_task(row, hops))
    return tasks, left_out


# ---- Both ----------------------------------------------------------------------------------------


def _check(row: Record, where: str) -> None:
    require_text(row, ("id", "question", "answer"), where)
    aliases = row.get("answer_aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise wrong_field(where, "answer_aliases", aliases, "a list of texts")


def _step(step: Record, paragraph: Paragraph) -> dict[str, Any]:
    return {"question": step["question"], "answer": step["answer"], "paragraph": paragraph}


def _task(row: Record, hops: list[dict[str, Any]]) -> Task:
    return {
        "id": row["id"],
        "question": row["question"],
        "answer": row["answer"],
        "answer_aliases": row.get("answer_aliases") or [],
        "hops": len(hops),
        "supporting": [hop["paragraph"]["pid"] for hop in hops],
        "decomposition": hops,
    }
