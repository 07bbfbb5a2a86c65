"""Checks of records, and directories that are made once and whole."""

import gzip
import hashlib
import os
import reprlib
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_jax.train.tasks.record_files import DatasetError, Record


def require_text(record: Record, names: tuple[str, ...], where: str) -> None:
    """Raise DatasetError unless each named field is a non-empty text."""
    for name in names:
        value = record.get(name)
        if not isinstance(value, str) or not value.strip():
            raise wrong_field(where, name, value, "a non-empty string", "invalid")


def require_no_root(root: str | Path | None, what: str) -> None:
    """Raise DatasetError if there is a `data.root`, because `what` are generated."""
    if root is not None:
        raise DatasetError(
            f"data.root is {str(root)!r}; expected null, because {what} are generated.",
            reason="unsupported",
            key="data.root",
        )


def wrong_field(
    where: str, name: str, value: Any, expected: str, reason: str = "wrong_type"
) -> DatasetError:
    """Return the error for a record's field that is not as expected."""
    text = f"{where}: {name} is {reprlib.repr(value)}; expected {expected}."
    return DatasetError(text, reason=reason, key=name)


def make_directory(target: Path, fill: Callable[[Path], None]) -> Path:
    """Return `target`, created by `fill(directory)` if it does not exist.

    The directory is filled under another name and renamed when complete. A crash thus leaves no
    partial directory, and if two processes create it at once, the first one wins.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            fill(unfinished)
            unfinished.chmod(0o755)
            try:
                os.rename(unfinished, target)
            except OSError:
                if not target.is_dir():
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DatasetError(
            f"{target} cannot be written ({error}); free disk space, or choose another directory.",
            reason="not_writable",
            key=str(target),
        ) from error
    return target


def unpack(archive: Path, cache_dir: Path) -> Path:
    """Return the directory with the contents of the `.tar.gz`, unpacked once per content."""
    try:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    except OSError as error:
        raise DatasetError(
            f"{archive} is not readable ({error.strerror}); expected the databases' archive there.",
            reason="unreadable",
            key=str(archive),
        ) from error

    def fill(directory: Path) -> None:
        try:
            with tarfile.open(archive, "r:gz") as tar:
                _extract(tar, directory.resolve())
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DatasetError(
                f"{archive} cannot be unpacked ({error}); download it again.",
                reason="malformed",
                key=str(archive),
            ) from error

    return make_directory(cache_dir / f"{archive.name.removesuffix('.tar.gz')}-{digest}", fill)


def _extract(tar: tarfile.TarFile, root: Path) -> None:
    """Write the archive's files. Raises TarError for a link, or a path that leads outside.

    `filter="data"` of `extractall` does so too, but Python 3.11 has it only since 3.11.4.
    """
    for member in tar:
        path = (root / member.name).resolve()
        if not (path.is_relative_to(root) and (member.isfile() or member.isdir())):
            raise tarfile.TarError(f"{member.name!r} is not a plain file inside the archive")
        folder = path if member.isdir() else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if (content := tar.extractfile(member)) is not None:
            with path.open("wb") as out:
                shutil.copyfileobj(content, out)
