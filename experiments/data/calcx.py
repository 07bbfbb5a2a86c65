"""Word problems with a numeric answer: Calc-X as published, the compact files, or a generated set.

Calc-X: Kadlcik et al., EMNLP 2023 (arXiv 2305.15017).
"""

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from dataset_files import require_text
from generated_problems import generated_problems

from lightning_jax.settings.loading import import_optional
from lightning_jax.settings.schema import Count
from lightning_jax.train.tasks.record_files import DatasetError, Record, read_records
from lightning_jax.types import Task

# File names of the splits as published. Calc-X's test split is never read.
_NAMES = {"train": ("train",), "dev": ("dev", "validation")}


def load_calcx(
    root: str | Path | None,
    split: str,
    cache_dir: str | Path,
    *,
    sources: tuple[str, ...] | None = None,
    max_question_chars: Count | None = None,
) -> tuple[list[Task], dict[str, int]]:
    """Return the split's tasks in file order, and the number left out for each reason.

    A task has `id`, `question`, `result` (a number as text), `source`, usually `chain`, and the
    other fields of its row. `root` None is the generated set. Otherwise it is a folder with the
    published parquet or jsonl files (`train-*.parquet` there or in `data/`, `validation.jsonl`), or
    with the compact `train.jsonl.gz`. Writes nothing to `cache_dir`. Raises DatasetError.

    Tasks are left out if they are not from one of the `sources`, if their question is longer than
    `max_question_chars`, or if their result is not a number.
    """
    if root is None:
        rows = _numbered(generated_problems(split))
    else:
        rows = _rows(Path(root).expanduser().absolute(), split)
    tasks, left_out = [], Counter[str]()
    for where, row in rows:
        task = _task(row, where)
        if sources is not None and task["source"] not in sources:
            left_out["other_source"] += 1
        elif max_question_chars is not None and len(task["question"]) > max_question_chars:
            left_out["question_too_long"] += 1
        elif task["result"] is None:
            left_out["result_is_no_number"] += 1
        else:
            tasks.append(task)
    return tasks, dict(left_out)


_SEPARATOR = re.compile(r"(?<=\d)_(?=\d{3}(?!\d))")  # thousands separator; 3_1/2 is a mixed number


def plain_number(text: Any) -> str | None:
    """Return the number in a `result` field as written, or None if it is not a single number.

    Calc-X's "= around ..." and the "_" of numbers such as 3_900 are removed.
    """
    number = _SEPARATOR.sub("", str(text).partition("= around")[0].strip())
    whole = re.fullmatch(r"(-?\d+)[ _](\d+/\d+)", number)  # a mixed number
    plain = whole[2] if whole else number.replace(",", "").removesuffix("%").removeprefix("$")
    try:
        Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return None
    return number


def _task(row: Record, where: str) -> Task:
    """Return the row with `source` and a plain `result`, which is None if it is not a number."""
    require_text(row, ("id", "question"), where)
    if "result" not in row:
        raise DatasetError(
            f"{where}: result is missing; add the answer's number.",
            reason="missing",
            key="result",
        )
    source = row.get("source") or row.get("source_ds") or "unknown"
    return row | {"source": source, "result": plain_number(row["result"])}


# ---- Files ---------------------------------------------------------------------------------------


def _rows(folder: Path, split: str) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) for the split's files in any layout."""
    if not folder.is_dir():
        raise DatasetError(
            f"data.root is {str(folder)!r}, which is not a folder; expected Calc-X's files there, "
            "or data.root=null for the generated set.",
            reason="not_a_directory",
            key="data.root",
        )
    files = [path for directory in (folder, folder / "data") for path in _files(directory, split)]
    if not files:
        names = " or ".join(f"{n}*.parquet, {n}*.jsonl or {n}.jsonl.gz" for n in _NAMES[split])
        raise DatasetError(
            f"data.root {folder} has no file of the {split} split; expected {names} there or in "
            "its folder data. Check the path.",
            reason="missing",
            key=split,
        )
    for path in files:
        yield from _read(path)
    extra = folder / "asdiv_noncommercial.jsonl.gz"  # holds both splits
    if extra.is_file():
        yield from ((where, row) for where, row in _read(extra) if row.get("split") == split)


def _files(folder: Path, split: str) -> list[Path]:
    paths = [
        path
        for name in _NAMES[split]
        for pattern in (f"{name}[-.]*.parquet", f"{name}.parquet", f"{name}*.jsonl")
        for path in sorted(folder.glob(pattern))
    ]
    compact = [folder / f"{name}.jsonl.gz" for name in _NAMES[split]]
    return paths + [path for path in compact if path.is_file()]


def _read(path: Path) -> Iterator[tuple[str, Record]]:
    if path.suffix == ".parquet":
        return _numbered(_parquet(path), f"{path}: row ")
    return read_records(path)


def _numbered(rows: Any, prefix: str = "row ") -> Iterator[tuple[str, Record]]:
    return ((f"{prefix}{number}", row) for number, row in enumerate(rows, start=1))


def _parquet(path: Path) -> Iterator[Record]:
    """Yield the rows without empty fields, reading one batch at a time."""
    parquet = import_optional("pyarrow.parquet", "pyarrow>=20")  # as in the extra calcx
    pyarrow = import_optional("pyarrow", "pyarrow>=20")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield {k: v for k, v in row.items() if v is not None or k == "result"}
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(
            f"{path} is not readable ({error}); download it again.",
            reason="unreadable",
            key=str(path),
        ) from error
