"""Directories that a foreign program filled: their size, and their removal.

Such a program may nest directories deeper than Python recurses or than a path can name, and take
away the permission to read them.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

READABLE = 0o700


def remove_tree(folder: Path) -> None:
    """Remove a directory and all that is in it, however deep it is nested. No process may use it.

    A directory in it is emptied by moving the directories that it holds up to the top, so that no
    path is long. What the file system refuses to remove stays.
    """
    try:
        os.chmod(folder, READABLE)
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError:  # a file, or a link
        with contextlib.suppress(OSError):
            os.unlink(folder)
        return
    try:
        numbers = itertools.count()
        refused: set[str] = set()
        while names := [name for name in os.listdir(top) if name not in refused]:
            for name in names:
                if not _empty_into(top, name, numbers):
                    refused.add(name)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def _empty_into(top: int, name: str, numbers: Iterator[int]) -> bool:
    """Remove one entry of `top`, whose directories move to `top`. Return False if it stays."""
    try:
        if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
            os.unlink(name, dir_fd=top)
            return True
        os.chmod(name, READABLE, dir_fd=top)
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        try:
            for entry in os.listdir(inner):
                if stat.S_ISDIR(os.lstat(entry, dir_fd=inner).st_mode):
                    os.chmod(entry, READABLE, dir_fd=inner)  # which moving needs
                    _move_up(inner, entry, top, numbers)
                else:
                    os.unlink(entry, dir_fd=inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)
    except OSError:
        return False
    return True


def _move_up(inner: int, entry: str, top: int, numbers: Iterator[int]) -> None:
    """Move a directory to `top` under a name that is free there."""
    while True:
        name = f"removed-{next(numbers)}"
        if not os.access(name, os.F_OK, dir_fd=top, follow_symlinks=False):
            os.rename(entry, name, src_dir_fd=inner, dst_dir_fd=top)
            return


def is_within(folder: Path, max_bytes: int, max_files: int, max_depth: int) -> bool:
    """Return whether a directory has at most so many bytes, entries and levels.

    A directory whose path is too long to read is not within. Directories that may not be read can
    be read meanwhile.
    """
    size = number = 0
    folders, opened = [(str(folder), 0)], dict[str, int]()
    try:
        while folders:
            path, depth = folders.pop()
            try:
                entries = _entries(path, opened)
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    return False
                continue  # it is gone
            number += len(entries)
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
                    else:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
            if size > max_bytes or number > max_files or (depth >= max_depth and entries):
                return False
        return True
    finally:
        for path, mode in reversed(opened.items()):
            with contextlib.suppress(OSError):
                os.chmod(path, mode)


def _entries(path: str, opened: dict[str, int]) -> list[os.DirEntry[str]]:
    """Return the entries of a directory. Add its mode to `opened` if it had to be changed."""
    try:
        with os.scandir(path) as names:
            entries = list(names)
        if entries and not os.access(path, os.X_OK):
            raise PermissionError
        return entries
    except PermissionError:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        os.chmod(path, READABLE)
        opened[path] = mode
        with os.scandir(path) as names:
            return list(names)
