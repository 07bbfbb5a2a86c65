"""Runs that the live page shows: their files, open stores and summaries. Safe in any thread."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_jax.errors import UserError
from lightning_jax.studio.load import RunReader, ViewError
from lightning_jax.studio.runs import RunSummary, find_run_dirs, read_run, run_dirs, run_key
from lightning_jax.traces.listing import StoreListing
from lightning_jax.traces.store import Store
from lightning_jax.train.directory import ENDED, LOCK, METRICS, SETTINGS, STORE, require_run

Stamp = tuple[tuple[int, int, int], ...]  # (inode, size, time of change) of each file
# Files whose change is a change of the run. SQLite writes the second before the store itself.
WATCHED = (STORE, f"{STORE}-wal", METRICS, ENDED, LOCK)
# Share of the time that reading the summary of a run may take.
MAX_COST = 0.05
MIN_AGE_S = 1.0


@dataclass(frozen=True)
class _Opened:
    """Open store of a run, for lists and for single rollouts."""

    listing: StoreListing
    store: Store
    reader: RunReader
    inode: int
    stamp: Stamp  # at the time of opening

    def close(self) -> None:
        self.listing.close()
        self.store.close()


class WatchedRun:
    """One run directory. Its stores are opened at the first use."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.key = run_key(directory)
        self._lock = threading.RLock()  # of opening and closing
        self._reader_lock, self._summary_lock = threading.Lock(), threading.Lock()
        self._opened: _Opened | None = None
        self._seen: Stamp = ()  # when the credit of steps was computed last
        self._summary: tuple[RunSummary, float] | None = None  # and when it is too old

    def stamp(self) -> Stamp:
        """Return a value that changes with the run's files."""
        stamps = []
        for name in WATCHED:
            with suppress(OSError):
                stat = (self.directory / name).stat()
                stamps.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(stamps)

    def summary(self) -> RunSummary:
        """Return the run's summary, which may be a second old. Raises ConfigError if it is gone."""
        require_run(self.directory, SETTINGS)
        with self._summary_lock:
            started = time.monotonic()
            if self._summary is None or started >= self._summary[1]:
                summary, now = read_run(self.directory, self.name), time.monotonic()
                self._summary = summary, now + max(MIN_AGE_S, (now - started) / MAX_COST)
            return self._summary[0]

    @contextmanager
    def listing(self) -> Iterator[StoreListing]:
        """Yield the run's store for lists. Raises UserError if there is none."""
        yield self._open().listing

    @contextmanager
    def reader(self) -> Iterator[RunReader]:
        """Yield the reader of single rollouts. Raises UserError if there is no store."""
        with self._reader_lock:
            opened, stamp = self._open(), self.stamp()
            if stamp != self._seen:
                opened.reader.forget_credit()
                self._seen = stamp
            yield opened.reader

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None

    def _open(self) -> _Opened:
        """Return the open store. A replaced file is opened again."""
        path = self.directory / STORE
        with self._lock:
            try:
                require_run(self.directory, STORE)
                inode, stamp = path.stat().st_ino, self.stamp()
            except (OSError, UserError):
                self.close()
                raise
            opened = self._opened
            is_old = opened is not None and (
                inode != opened.inode or (opened.listing.is_copy and stamp != opened.stamp)
            )
            if is_old:
                self.close()
            if opened is None or is_old:
                listing, store = StoreListing(path), Store(path, read_only=True)
                reader = RunReader(self.directory, store)
                self._opened = opened = _Opened(listing, store, reader, inode, stamp)
            return opened


class Catalog:
    """Runs below some folders. `scan` finds new ones and forgets those that are gone."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Find the runs. Raises ConfigError if a folder does not exist or holds no run."""
        self._folders = tuple(folders)
        self._lock = threading.Lock()
        self._runs: dict[str, WatchedRun] = {}
        self._watch(find_run_dirs(self._folders))

    def scan(self) -> None:
        """Add the runs that are new, and close those whose directory is gone."""
        folders = filter(Path.is_dir, self._folders)
        self._watch([path for folder in folders for path in run_dirs(folder)])

    def _watch(self, paths: Sequence[tuple[Path, str]]) -> None:
        """Watch the runs in these directories, which have names, and no others."""
        runs = [WatchedRun(path, name) for path, name in paths]
        with self._lock:
            present = {run.key: self._runs.get(run.key, run) for run in runs}
            gone = [run for key, run in self._runs.items() if key not in present]
            self._runs = present
        for run in gone:
            run.close()

    def runs(self) -> list[WatchedRun]:
        with self._lock:
            return list(self._runs.values())

    def run(self, key: str) -> WatchedRun:
        """Return the run with that key. Raises ViewError if there is none."""
        with self._lock:
            run = self._runs.get(key)
        if run is None:
            raise ViewError(
                f"there is no run {key!r}; it may have been deleted. Go back to the list of runs.",
                reason="unknown_run",
                key=key,
            )
        return run

    def summaries(self) -> list[RunSummary]:
        """Return the runs that can be read, newest first."""
        summaries = []
        for run in self.runs():
            with suppress(UserError, OSError):  # deleted, or its files are being written
                summaries.append(run.summary())
        return sorted(summaries, key=lambda run: -(run.started_s or 0.0))

    def close(self) -> None:
        for run in self.runs():
            run.close()
