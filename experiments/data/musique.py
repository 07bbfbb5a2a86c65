"""Multi-hop questions over a corpus: MuSiQue as released, its compact files, or a generated set.

MuSiQue: Trivedi et al., TACL 2022. The release gives each question its own twenty paragraphs. The
corpus that an agent searches is the union of all of them.
"""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.musique_generated import generated_root
from lightning_jax.train.config import DataConfig
from lightning_jax.train.task_files import (
    DatasetError,
    Record,
    check_split,
    limit_tasks,
    make_directory,
    read_records,
    require_text,
)
from lightning_jax.types import Task

_RELEASED = {split: f"musique_ans_v1.0_{split}.jsonl" for split in ("train", "dev")}
_CORPUS = "corpus.jsonl.gz"

Paragraph = dict[str, str]  # pid, title, text


def load_musique(
    root: str | Path | None,
    split: str,
    config: DataConfig,
    cache_dir: str | Path,
    *,
    corpus: "Corpus | None" = None,
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks in file order, and the number left out for each reason.

    A task has `id`, `question`, `answer`, `answer_aliases`, `hops`, `supporting` (pids) and
    `decomposition`: for each hop `question`, `answer` and `paragraph` (pid, title, text). `root`
    None is the generated set. Generated files are written once, under `cache_dir`. To load both
    splits, read the `corpus` once and pass it. Raises DatasetError.
    """
    check_split(split)
    folder, released = _find(root, Path(cache_dir).absolute())
    if corpus is None:
        corpus = read_corpus(corpus_of(root, cache_dir))
    if released:
        read, dropped = _released_tasks(folder / _RELEASED[split], corpus)
    else:
        read, dropped = list(_compact_tasks(folder / f"{split}.jsonl.gz", corpus)), Counter()
    tasks = limit_tasks(read, split, config.max_train_tasks, dropped)
    if not tasks:
        raise DatasetError(
            f"{folder} gives 0 {split} tasks (left out: {dict(dropped)}); expected at least 1.",
            reason="empty",
            key=split,
        )
    return tasks, dict(dropped)


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

    made = make_directory(cache / f"musique-corpus-{digest.hexdigest()[:12]}", fill)
    return made / _CORPUS


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
            raise DatasetError(
                f"{where}: title is {row.get('title')!r}; expected a text.",
                reason="wrong_type",
                key="title",
            )
        if row["pid"] in by_pid:
            raise DatasetError(
                f"{where}: pid {row['pid']!r} was used before; expected unique ids.",
                reason="duplicate",
                key="pid",
            )
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
    seen: set[str] = set()
    for where, row in read_records(path):
        _check(row, seen, where)
        steps = row.get("decomposition")
        if not isinstance(steps, list) or not steps:
            raise DatasetError(
                f"{where}: decomposition is {steps!r}; expected a list of hops.",
                reason="wrong_type",
                key="decomposition",
            )
        yield _task(row, [_hop(step, corpus, where) for step in steps])


def _hop(step: Any, corpus: Corpus, where: str) -> dict[str, Any]:
    if not isinstance(step, dict):
        raise DatasetError(
            f"{where}: a hop is {step!r}; expected question, answer and pid.",
            reason="wrong_type",
            key="decomposition",
        )
    require_text(step, ("question", "answer", "pid"), where)
    if step["pid"] not in corpus.by_pid:
        raise DatasetError(
            f"{where}: pid {step['pid']!r} is not in the corpus; add the paragraph.",
            reason="unknown",
            key="pid",
        )
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
        raise DatasetError(
            f"{where}: paragraphs is not a list of objects; correct the row.",
            reason="wrong_type",
            key="paragraphs",
        )
    for item in paragraphs:
        require_text(item, ("paragraph_text",), where)
        if not isinstance(item.get("title"), str):
            raise DatasetError(
                f"{where}: a title is {item.get('title')!r}; expected a text.",
                reason="wrong_type",
                key="title",
            )
    return paragraphs


def _released_tasks(path: Path, corpus: Corpus) -> tuple[list[Task], Counter[str]]:
    """Return the answerable questions whose hops all name a paragraph, and the dropped counts."""
    tasks, dropped = [], Counter()
    seen: set[str] = set()
    for where, row in read_records(path):
        if row.get("answerable") is False:
            dropped["not_answerable"] += 1
            continue
        _check(row, seen, where)
        by_idx = {
            item.get("idx"): corpus.by_pid[corpus.pid_of[item["title"], item["paragraph_text"]]]
            for item in _paragraphs(row, where)
        }
        steps = row.get("question_decomposition")
        if not isinstance(steps, list) or not steps or not all(isinstance(s, dict) for s in steps):
            raise DatasetError(
                f"{where}: question_decomposition is no list of hops.",
                reason="wrong_type",
                key="question_decomposition",
            )
        if any(step.get("paragraph_support_idx") not in by_idx for step in steps):
            dropped["hop_without_paragraph"] += 1
            continue
        for step in steps:
            require_text(step, ("question", "answer"), where)
        hops = [_step(step, by_idx[step["paragraph_support_idx"]]) for step in steps]
        tasks.append(_task(row, hops))
    return tasks, dropped


# ---- Both ----------------------------------------------------------------------------------------


def _check(row: Record, seen: set[str], where: str) -> None:
    require_text(row, ("id", "question", "answer"), where)
    aliases = row.get("answer_aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise DatasetError(
            f"{where}: answer_aliases is {aliases!r}; expected a list of texts.",
            reason="wrong_type",
            key="answer_aliases",
        )
    if row["id"] in seen:
        raise DatasetError(
            f"{where}: id {row['id']!r} was used before; expected unique ids.",
            reason="duplicate",
            key="id",
        )
    seen.add(row["id"])


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
