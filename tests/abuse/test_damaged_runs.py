"""Runs with damaged, deleted, locked or read-only files: others stay visible, nothing is lost."""

import fcntl
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from coded import raises_coded
from damaged_files import bytes_damaged, json_damaged

from lightning_jax.errors import UserError
from lightning_jax.settings import ConfigError, save_config
from lightning_jax.studio.live.answers import runs_answer
from lightning_jax.studio.live.catalog import Catalog
from lightning_jax.studio.live.lanes import encode
from lightning_jax.studio.load import open_run
from lightning_jax.studio.runs import find_runs, runs_table
from lightning_jax.studio.terminal import as_terminal
from lightning_jax.traces.store import Store, StoreError
from lightning_jax.train.config import Config
from lightning_jax.train.directory import (
    LOCK,
    METRICS,
    SETTINGS,
    SOURCES,
    STORE,
    is_locked,
    locked,
    recorded_end,
)
from lightning_jax.types import Rollout

FILES = (SETTINGS, SOURCES, METRICS, STORE, "ended.json")
REPEATS = 40


def _rollout(number: int) -> Rollout:
    return Rollout(f"r{number}", "t", "g", "train", 0, index=number, attempt=1, status="queued")


def _make(run: Path) -> Path:
    """Write a run with a row of metrics and a rollout."""
    run.mkdir(parents=True)
    save_config(Config(num_steps=2), run / SETTINGS)
    (run / SOURCES).write_text('{"agent": "same"}')
    row = {"step": 0, "time/step_s": 9.0, "eval/reward_mean": 0.5, "rollout/num_rollouts": 8.0}
    (run / METRICS).write_text(json.dumps(row) + "\n")
    with closing(Store(run / STORE)) as store, recorded_end(run):
        store.add_rollout(_rollout(0))
    return run


def _ways(name: str) -> list[Callable[[bytes, random.Random], bytes]]:
    return [bytes_damaged] if name in (SETTINGS, STORE) else [bytes_damaged, json_damaged]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_run_hides_no_other(name: str, tmp_path: Path) -> None:
    sound = _make(tmp_path / "runs" / "sound")
    rng = random.Random(name)
    content = (sound / name).read_bytes()
    for number in range(REPEATS):
        bad = tmp_path / "runs" / "bad"
        shutil.copytree(sound, bad)
        (bad / name).write_bytes(rng.choice(_ways(name))(content, rng))
        found = {run.name: run for run in find_runs(tmp_path / "runs")}
        assert found["sound"].status == "finished" and "bad" in found, (number, bad)
        as_terminal(runs_table(list(found.values())), 80)
        catalog = Catalog([tmp_path / "runs"])
        encode(runs_answer(catalog))
        catalog.close()
        if name == STORE:
            with suppress(UserError), open_run(bad) as reader:
                reader.run()
                reader.rollout("r0")
        shutil.rmtree(bad)


@pytest.mark.parametrize("column", ["metrics", "components", "task", "reasons"])
@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 5000])
def test_a_damaged_value_of_a_store_is_named(column: str, text: str, tmp_path: Path) -> None:
    run = _make(tmp_path / "run")
    with closing(sqlite3.connect(run / STORE)) as db, db:
        db.execute(f"UPDATE rollouts SET {column} = ?", (text,))
    with raises_coded(StoreError, "malformed"), open_run(run) as reader:
        reader.rollout("r0")
    assert find_runs(run)[0].status == "finished"


def test_a_run_that_cannot_be_read_has_a_line(tmp_path: Path) -> None:
    _make(tmp_path / "sound")
    bad = _make(tmp_path / "bad")
    (bad / METRICS).unlink()
    (bad / METRICS).mkdir()  # root may read every file
    found = {run.name: run.status for run in find_runs(tmp_path)}
    assert found == {"sound": "finished", "bad": "unreadable"}


def test_a_damaged_line_of_metrics_is_counted(tmp_path: Path) -> None:
    run = _make(tmp_path / "run")
    with (run / METRICS).open("ab") as file:
        file.write(b'{"step": 1, "a/b": "\xff"}\n[]\n{"step": 1, "a/b": 2.0}\n{"step": ')
    (found,) = find_runs(run)
    assert [row["step"] for row in found.rows] == [0, 1] and "2 damaged" in found.why


@contextmanager
def _shared_lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(descriptor)


def test_looking_at_a_run_does_not_stop_one_that_starts(tmp_path: Path) -> None:
    run = _make(tmp_path / "run")
    with locked(run):
        assert is_locked(run)
    with _shared_lock(run / LOCK):  # another page asks at the same moment
        assert not is_locked(run)
    ends = threading.Event()

    def look() -> None:
        while not ends.is_set():
            with _shared_lock(run / LOCK):
                time.sleep(0.002)
            time.sleep(0.002)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(5):
            with locked(run):
                pass
    finally:
        ends.set()
        looking.join()


def test_two_trainers_are_refused_within_seconds(tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        started = time.monotonic()
        with raises_coded(ConfigError, "locked", "run_dir"), locked(tmp_path / "run"):
            pass
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_store_that_is_deleted_while_it_is_open_says_so(
    is_replaced: bool, tmp_path: Path
) -> None:
    path = tmp_path / STORE
    with closing(Store(path)) as store:
        store.add_rollout(_rollout(0))
        path.unlink()
        if is_replaced:
            Store(path).close()
        with raises_coded(StoreError, "deleted", str(path)):
            store.add_rollout(_rollout(1))
        with raises_coded(StoreError, "deleted", str(path)):
            await store.in_order(store.add_rollout, _rollout(2))


def test_the_end_of_a_run_whose_directory_is_gone_keeps_its_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with raises_coded(StoreError, "deleted"), locked(run):
        shutil.rmtree(run)
        raise StoreError("it was deleted", reason="deleted")


READ_ONLY = """
import sys
from pathlib import Path
from lightning_jax.cli.main import main
from lightning_jax.traces.store import Store
run = sys.argv[1]
for words in (["view", run], ["runs", run]):
    assert main(words) == 0, words
store = Store(Path(run) / "store.sqlite", read_only=True)
print(len(store.rollouts()))
store.close()
"""


@pytest.mark.parametrize("kept", [(), ("-wal",), ("-wal", "-shm")])
def test_a_run_on_a_read_only_mount_is_shown(kept: tuple[str, ...], tmp_path: Path) -> None:
    """A killed run leaves its journal, and a copy of it may lack the journal's index."""
    bind = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77; shift; exec "$@"'
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c", bind, "sh"]
    run, copy = _make(tmp_path / "run"), tmp_path / "copy"
    with closing(Store(run / STORE)) as store:
        store.add_rollout(_rollout(1))
        shutil.copytree(run, copy)
        number = len(store.rollouts()) if kept else 1
    for ending in ("-wal", "-shm"):
        if ending not in kept:
            (copy / f"{STORE}{ending}").unlink(missing_ok=True)
    words = [*inside, str(copy), sys.executable, "-c", READ_ONLY, str(copy)]
    path = os.pathsep.join(sys.path)
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) == number
