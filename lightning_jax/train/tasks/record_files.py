"""Records in JSON files. The content decides how a file is read, as names are often wrong."""

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_jax.errors import UserError

Record = dict[str, Any]

LINES, LIST = (".jsonl", ".ndjson", ".jsonlines"), ".json"
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".ndjson", ".ndjson.gz", ".json.gz")
CONVERT = (
    "supported are .jsonl, .jsonl.gz, .ndjson and .json: convert it, or read it with a function "
    "that data.load names"
)
# First bytes of files that are often taken for others, with what they are and the fix.
KINDS = (
    (b"version https://git-lfs", "a pointer of Git LFS", "run git lfs pull in its repository"),
    (b"<!doctype", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
    (b"par1", "a Parquet file", CONVERT),
    (b"arrow1", "an Arrow file", CONVERT),
    (b"pk\x03\x04", "a zip archive", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it, or compress it with gzip"),
    (b"\xfd7zxz", "compressed with xz", "unpack it, or compress it with gzip"),
    (b"bzh", "compressed with bzip2", "unpack it, or compress it with gzip"),
)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows writes it
ENCODINGS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))


class DatasetError(UserError, ValueError):
    """Unusable data set. The message is one sentence for the user who named it."""


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield (location, record) for each record of a file of JSON lines or of a JSON list.

    Raises DatasetError for a missing or broken file, at the first broken record.
    """
    try:
        with path.open("rb") as raw:
            for where, record in _values(raw, path):
                if not isinstance(record, dict):
                    raise DatasetError.wrong_type(
                        where, f"{where} is a {type(record).__name__}; expected an object."
                    )
                yield where, record
    except FileNotFoundError:
        raise _unusable(path, "does not exist", "check the path", "not_found") from None
    except UnicodeDecodeError as error:
        fact = f"is not UTF-8 (it has the byte 0x{error.object[error.start]:02x})"
        raise _unusable(path, fact, "save it as UTF-8", "wrong_encoding") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _unusable(path, f"is damaged ({error})", "download it again", "unreadable") from error
    except OSError as error:
        fact = f"is not readable ({error.strerror or error})"
        raise _unusable(path, fact, "pass a file that you may read", "unreadable") from error


class _NotJson(ValueError):
    """Text that cannot be parsed. `has_more` if it only goes on after a whole value."""

    def __init__(self, error: Exception) -> None:
        line = getattr(error, "lineno", 1)
        super().__init__(getattr(error, "msg", str(error)) + f", line {line}" * (line > 1))
        self.has_more = getattr(error, "msg", "") == "Extra data"


def _values(raw: io.BufferedReader, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, value) for each value of an open file."""
    file = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
    head = file.peek(1)
    _check_kind(head, path)
    begin = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
    if path.suffix.lower() == ".gz" and file is raw and begin not in (b"", b"[", b"{"):
        raise _unusable(path, "is not compressed with gzip", "download it again", "unreadable")
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in (*LINES, LIST) and begin not in (b"[", b"{"):
        fact = f"ends in {path.suffix}" if path.suffix else "is no JSON"
        raise _unusable(path, fact, CONVERT, "unsupported")
    with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
        if begin == b"[" or suffix == LIST:
            yield from _items(text.read(), path, is_lines=suffix in LINES)
        else:
            yield from _lines(text, path)


def _check_kind(head: bytes, path: Path) -> None:
    """Raise DatasetError for a file that is another kind of thing than its name says."""
    begin = head.lstrip()[:32].lower()
    for mark, kind, fix in KINDS:
        if begin.startswith(mark):
            raise _unusable(path, f"is {kind}", fix, "unsupported")
    encoding = next((name for mark, name in ENCODINGS if head.startswith(mark)), None)
    if encoding is None and b"\0" in head:
        encoding = "binary, or UTF-16"
    if encoding is not None:
        raise _unusable(path, f"is {encoding}", "save it as UTF-8", "wrong_encoding")


def _lines(lines: Iterable[str], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        if line.strip():
            try:
                yield where, _parse(line)
            except _NotJson as error:
                fix = "correct or remove it, as each line holds an object"
                raise _unusable(where, f"is not JSON ({error})", fix, "malformed") from error


def _items(text: str, path: Path, *, is_lines: bool) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON list, or those of lines, if the text or the name says so."""
    try:
        items = _parse(text) if text.strip() else []
    except _NotJson as error:
        if error.has_more or is_lines:
            yield from _lines(io.StringIO(text), path)
            return
        raise _unusable(path, f"is not JSON ({error})", "correct it", "malformed") from error
    if is_lines and not (isinstance(items, list) and all(isinstance(i, dict) for i in items)):
        yield from _lines(io.StringIO(text), path)
        return
    if not isinstance(items, list):
        fact = f"holds a {type(items).__name__}"
        raise _unusable(path, fact, "expected a list of records, or JSON lines", "wrong_type")
    for number, item in enumerate(items, start=1):
        yield f"{path}: item {number}", item


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise _NotJson(error) from error


def _unusable(where: Path | str, fact: str, fix: str, reason: str) -> DatasetError:
    return DatasetError(f"{where} {fact}; {fix}.", reason=reason, key=str(where))
