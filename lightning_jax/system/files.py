"""Files that are written atomically and are readable only by their owner."""

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

PRIVATE = 0o600  # mode of a file readable only by its owner
SHARED = 0o666  # mode of a file for other users, before the umask


@dataclass(frozen=True)
class FileIdentity:
    """Device and number of a file, which stay with it when another takes its path."""

    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileIdentity":
        """Return the identity of the file at the path. Raises OSError if there is none."""
        stat = path.stat()
        return cls(stat.st_dev, stat.st_ino)

    def is_at(self, path: Path) -> bool:
        """Return False if the path has no file or another one. If nobody can say, return True."""
        try:
            return FileIdentity.of(path) == self
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True


@contextlib.contextmanager
def replacing(path: Path, mode: int = PRIVATE) -> Iterator[Path]:
    """Yield an empty file next to `path` to write. It replaces `path` at the end.

    After an error `path` is unchanged. If `path` is a device or a pipe, yield it directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    target = Path(os.path.realpath(path))  # keep a symbolic link
    draft = target.with_name(f".{target.name}.tmp")
    draft.unlink(missing_ok=True)  # left by a killed process
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield draft
        _sync(draft)
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync directories
        _sync(target.parent)


def write_whole(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Write a UTF-8 text file atomically."""
    with replacing(path, mode) as draft:
        draft.write_text(text, encoding="utf-8")


def make_private(directory: Path) -> None:
    """Create a directory that only its owner may enter. An existing one is left as it is."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise


def warn_if_open(directory: Path) -> None:
    """Warn if other users may enter the directory."""
    if directory.stat().st_mode & 0o077:
        log.warning(
            "other users can access %s; run `chmod 700` on it to keep it private",
            directory,
            extra={"event": "directory_open", "directory": directory},
        )


def create_private(path: Path) -> None:
    """Create an empty file that only its owner may read. An existing file is left as it is."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
