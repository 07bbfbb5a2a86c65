"""Tests of the store: it survives crashes, allows only legal changes, and explains errors."""

import asyncio
import contextlib
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from coded import raises_coded

from lightning_jax.errors import InvalidValue
from lightning_jax.traces._sqlite import StoreError
from lightning_jax.traces.store import (
    CRASH,
    LEGAL_TRANSITIONS,
    STOP,
    ExternalGroup,
    IllegalTransition,
    Store,
    TemporaryStore,
)
from lightning_jax.types import Rollout, RolloutStatus, Span

STATUSES = get_args(RolloutStatus)
QUEUED = Rollout("r1", "t1", "g1", "train", step=3, index=0, attempt=1, status="queued")
SPAN = Span("a" * 32, "b" * 16, None, "chat policy", 10, 20, {"ids": (1, 2), "x": 0.1}, None)
OTHER_SPAN = replace(SPAN, span_id="c" * 16)


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path / "store.sqlite")
    yield store
    store.close()


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The connections that stores of the test open."""
    opened, connect = list[sqlite3.Connection](), sqlite3.connect

    def keep(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", keep)
    return opened


def _fill_disk(connection: sqlite3.Connection) -> Span:
    """Leave SQLite two pages, and return a span that takes more."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={pages + 2}")
    return replace(SPAN, attributes={"text": "x" * 100_000})


def _move(store: Store, rollout_id: str, *statuses: RolloutStatus) -> None:
    for status in statuses:
        failed = status == "stopped" or status.endswith("_failure")
        reward = 1.0 if status == "scored" else None
        store.set_status(rollout_id, status, reward=reward, reason="why" if failed else None)


PATHS: dict[RolloutStatus, tuple[RolloutStatus, ...]] = {
    "queued": (),
    "running": ("running",),
    "scored": ("running", "scored"),
    "agent_failure": ("running", "agent_failure"),
    "infrastructure_failure": ("running", "infrastructure_failure"),
    "stopped": ("running", "stopped"),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(STATUSES, STATUSES)))
def test_only_legal_changes_happen(store: Store, old: RolloutStatus, new: RolloutStatus) -> None:
    store.add_rollout(QUEUED)
    _move(store, "r1", *PATHS[old])
    # The table of legal changes, written independently.
    legal = (old == "running" and new in STATUSES[2:]) or (
        old == "queued" and new in ("running", "stopped")
    )
    if legal:
        _move(store, "r1", new)
        assert store.rollout("r1").status == new
    else:
        with raises_coded(IllegalTransition, "illegal_transition", "r1") as caught:
            _move(store, "r1", new)
        assert f"from {old} to {new}" in str(caught.value)
        assert store.rollout("r1").status == old
    assert set(LEGAL_TRANSITIONS) == {None, *STATUSES}


def test_a_rollout_keeps_its_result(store: Store) -> None:
    store.add_rollout(QUEUED)
    assert store.rollout("r1") == QUEUED
    store.set_status("r1", "running")
    store.set_status("r1", "agent_failure", reward=-0.5, reason="deadline", detail="ran too long")
    assert store.rollout("r1") == replace(
        QUEUED, status="agent_failure", reward=-0.5, reason="deadline", detail="ran too long"
    )


def test_results_must_be_whole(store: Store) -> None:
    store.add_rollout(QUEUED)
    store.set_status("r1", "running")
    with raises_coded(InvalidValue, "missing", "reward"):
        store.set_status("r1", "scored")
    with raises_coded(InvalidValue, "missing", "reason"):
        store.set_status("r1", "agent_failure", reward=0.0)
    with raises_coded(StoreError, "unknown", "r2"):
        store.set_status("r2", "running")
    with raises_coded(StoreError, "unknown", "r2"):
        store.rollout("r2")
    with raises_coded(InvalidValue, "duplicate", "r1"):
        store.add_rollout(QUEUED)
    with raises_coded(IllegalTransition, "illegal_transition", "r3"):
        store.add_rollout(replace(QUEUED, rollout_id="r3", status="running"))


def counts(store: Store) -> dict[str, int]:
    return Counter(rollout.status for rollout in store.rollouts())


def test_rollouts_are_found(store: Store) -> None:
    for step, index in ((1, 1), (1, 0), (0, 0)):
        rollout = replace(QUEUED, rollout_id=f"{step}{index}", step=step, index=index)
        store.add_rollout(replace(rollout, group_id=f"g{step}"))
    store.add_rollout(replace(QUEUED, rollout_id="e", phase="eval", step=1, group_id="g"))
    assert [r.rollout_id for r in store.rollouts(phase="train")] == ["00", "10", "11"]
    assert [r.rollout_id for r in store.rollouts(phase="train", step=1)] == ["10", "11"]
    assert [r.rollout_id for r in store.rollouts(group_id="g0")] == ["00"]
    assert store.rollouts(step=9) == []
    _move(store, "00", "running", "scored")
    _move(store, "10", "running", "agent_failure")
    assert counts(store) == {"agent_failure": 1, "queued": 2, "scored": 1}


def test_spans_of_rollouts_are_counted(store: Store) -> None:
    for name in ("r1", "r2"):
        store.add_span(name, SPAN)
    store.add_span("r1", OTHER_SPAN)
    names = ["none", *(f"x{number}" for number in range(200)), "r1", "r2"]
    assert store.num_spans(names) == {"r1": 2, "r2": 1}
    assert store.num_spans([]) == {}


def test_a_resumed_run_gives_up_what_was_running(store: Store) -> None:
    paths = {"a": PATHS["queued"], "b": PATHS["running"], "c": PATHS["scored"]}
    for rollout_id, statuses in paths.items():
        store.add_rollout(replace(QUEUED, rollout_id=rollout_id))
        _move(store, rollout_id, *statuses)
    assert store.abandon_running(STOP, "a") == 1
    assert store.abandon_running(CRASH) == 1
    assert [store.rollout(name).reason for name in "ab"] == [STOP, CRASH]
    assert counts(store) == {"stopped": 2, "scored": 1}
    assert store.rollout("b").detail == "the run ended while this rollout was running"
    assert store.abandon_running(CRASH) == 0


def test_rollouts_of_other_settings_stay_on_record(store: Store) -> None:
    for step in range(3):
        store.add_rollout(replace(QUEUED, rollout_id=f"r{step}", step=step))
    store.supersede(1)
    store.add_rollout(replace(QUEUED, rollout_id="new", step=2, attempt=2))
    found = [(r.rollout_id, r.superseded) for r in store.rollouts()]
    assert found == [("r0", False), ("r1", True), ("r2", True), ("new", False)]


def test_rollouts_to_repeat_count_until_they_are_superseded(store: Store) -> None:
    for step in range(3):
        store.add_rollout(replace(QUEUED, rollout_id=f"r{step}", step=step))
        store.set_step_groups(step, [f"g{step}"])
    store.supersede_marked()
    store.supersede(2)
    store.mark_for_repeat(1)
    assert [r.superseded for r in store.rollouts()] == [False, False, True]
    assert store.step_groups(1) == ["g1"]
    store.supersede_marked()
    assert [r.superseded for r in store.rollouts()] == [False, True, True]
    assert store.step_groups(0) == ["g0"] and store.step_groups(1) == []
    store.add_rollout(replace(QUEUED, rollout_id="new", step=1, attempt=2))
    store.supersede_marked()
    assert not store.rollout("new").superseded


def test_groups_of_a_step_are_recorded_until_settings_change(store: Store) -> None:
    for index in range(2):
        store.add_rollout(Rollout(f"r{index}", "t", f"g{index}", "train", index, 0, 1, "queued"))
    assert store.step_groups(0) == [] and store.step_of_group("g0") is None
    store.set_step_groups(0, ["g1"])
    store.set_step_groups(0, ["g1", "g2"])
    store.set_step_groups(1, ["g0"])
    assert store.step_groups(0) == ["g1", "g2"]
    assert [store.step_of_group(name) for name in ("g0", "g1", "g2", "g3")] == [1, 0, 0, None]
    store.supersede(1, ["g0"])  # of step 0, but not trained yet
    assert store.step_groups(0) == ["g1", "g2"] and store.step_groups(1) == []
    assert all(rollout.superseded for rollout in store.rollouts())


def test_groups_from_outside_are_read_until_a_step_took_or_dropped_them(store: Store) -> None:
    names = [("taken", 0), ("dropped", 0), ("old", 0), ("present", 2), ("later", 3)]
    for name, step in names:
        store.add_external_group(name, step, name.upper(), {"id": name})
    store.add_external_group("old", 1, "again", {"id": "other"})  # stays as it is
    store.set_step_groups(1, ["taken"])
    store.drop_external_groups(2, ["dropped"])

    def ids(first: int, step: int) -> list[str]:
        return [group.group_id for group in store.external_groups(first, step)]

    assert ids(0, 2) == ["old", "present"] and ids(2, 2) == ["present"]
    assert ids(0, 1) == ["taken", "dropped", "old"]  # a resumed run takes and drops them again
    assert store.external_groups(0, 2)[0] == ExternalGroup("old", 0, 2, "OLD", {"id": "old"})


OLDER = {  # how a store of an older version differs from one of today
    10: "",
    9: "DROP TABLE dropped_groups;",
    8: "DROP TABLE judge_verdicts; INSERT INTO verdicts VALUES ('d', 'old');",
}
WITHOUT_WORKER = "ALTER TABLE rollouts DROP COLUMN worker;"  # as before version 11
VERDICTS = "CREATE TABLE verdicts (digest TEXT PRIMARY KEY, verdict TEXT NOT NULL);"  # to 8


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("version", OLDER)
def test_older_versions_are_read(version: int, read_only: bool, tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with closing(Store(path)) as store:
        store.add_rollout(QUEUED)
        store.set_status("r1", "running")
        store.set_status("r1", "agent_failure", reason="ValueError", worker="local-1")
        assert store.rollout("r1").worker == "local-1"
        store.add_external_group("g", 0, None, {"id": "t"})
    script = WITHOUT_WORKER + VERDICTS * (version == 8) + OLDER[version]
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"{script} PRAGMA user_version={version}")
    for _ in range(2):
        with closing(Store(path, read_only=read_only)) as store:
            assert (store.rollout("r1").worker, store.rollout("r1").reason) == (None, "ValueError")
            assert [group.group_id for group in store.external_groups(0, 4)] == ["g"]
            assert store.verdicts("d") == ({"": "old"} if version == 8 else {})


def test_spans_come_back_as_they_were(store: Store) -> None:
    attributes: dict[str, Any] = {
        "ids": (0, 49151),
        "logprobs": (-0.1, -1e-8, -0.30000000000000004, float("-inf")),
        "empty": (),
        "text": "é\x00\u2028",
        "on": True,
    }
    late = replace(SPAN, span_id="c" * 16, start_ns=30, end_ns=31, attributes=attributes)
    failed = replace(SPAN, parent_span_id="d" * 16, error="it broke")
    store.add_span("r1", late)
    store.add_span("r1", failed)
    store.add_span(None, replace(SPAN, span_id="e" * 16))
    assert store.spans("r1") == [late, failed]  # in order of arrival, not of their clocks
    assert [s.span_id for s in store.spans(None)] == ["e" * 16]
    assert store.spans("unknown") == []
    with raises_coded(InvalidValue, "duplicate", late.span_id):
        store.add_span("r1", late)


def test_versions_are_kept_and_may_be_said_again(store: Store) -> None:
    store.add_version(1, step=1, time_s=10.0)
    store.add_version(0, step=0)
    store.add_version(1, step=1, time_s=20.0)
    assert [(v.version, v.step) for v in store.versions()] == [(0, 0), (1, 1)]
    assert store.versions()[1].time_s == 20.0
    assert store.versions()[0].time_s > 1.6e9


def test_threads_share_a_store(store: Store) -> None:
    def work(thread: int) -> None:
        for i in range(20):
            store.add_rollout(replace(QUEUED, rollout_id=f"{thread}-{i}"))
            store.add_span(f"{thread}-{i}", replace(SPAN, span_id=f"{thread}-{i}"))
            store.set_status(f"{thread}-{i}", "running")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(store) == {"running": 80}
    assert all(len(store.spans(f"{n}-{i}")) == 1 for n in range(4) for i in range(20))


KILLED = """
import os, signal, sys
from lightning_jax.traces.store import Store
from lightning_jax.types import Rollout
store = Store(sys.argv[1])
for i in range(50):
    store.add_rollout(Rollout(f"r{i}", "t", "g", "train", 0, 0, 1, "queued"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    with closing(Store(path)) as store:
        assert counts(store) == {"queued": 50}


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(
    connections: list[sqlite3.Connection], store: Store
) -> None:
    store.add_rollout(QUEUED)
    big = _fill_disk(connections[0])
    with raises_coded(StoreError, "disk_full"):
        store.add_span("r1", big)
    assert store.spans("r1") == [] and store.rollout("r1") == QUEUED


def test_files_that_are_no_store_are_explained(tmp_path: Path) -> None:
    text = tmp_path / "text.sqlite"
    text.write_text("rollouts\n" * 1000)
    with raises_coded(StoreError, "not_a_database", str(text)):
        Store(text)
    with raises_coded(StoreError, "not_found", str(tmp_path / "nowhere")):
        Store(tmp_path / "nowhere" / "store.sqlite")
    with raises_coded(StoreError, "not_opened", str(tmp_path)):
        Store(tmp_path)
    # Older than any release, and of a later one.
    for version, read_only in ((3, False), (99, False), (99, True)):
        other = tmp_path / "other.sqlite"
        with closing(sqlite3.connect(other)) as db:
            db.execute(f"PRAGMA user_version={version}")
        with raises_coded(StoreError, "unsupported", "user_version") as caught:
            Store(other, read_only=read_only)
        assert str(version) in str(caught.value)


def test_a_store_of_release_0_1_0_gets_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = Store(path)
    store.add_rollout(QUEUED)
    store.close()
    with sqlite3.connect(path) as db:
        for column in ("task", "components", "reasons", "worker"):
            db.execute(f"ALTER TABLE rollouts DROP COLUMN {column}")
        for table in ("judge_verdicts", "step_groups", "external_groups", "dropped_groups"):
            db.execute(f"DROP TABLE {table}")
        db.execute("PRAGMA user_version=4")
    db.close()
    store = Store(path)
    assert store.rollout("r1") == QUEUED and store.task_fields("r1") == {}
    store.set_status("r1", "running")
    store.set_status("r1", "scored", reward=1.0, metrics={"f1": 0.5})
    store.close()
    store = Store(path)
    assert store.rollout("r1").metrics == {"f1": 0.5}
    scored = replace(store.rollout("r1"), reward=2.0, components={"agent": 1.0, "x": 1.0})
    store.set_scores([scored], {"r1": {"x": "because"}})
    store.add_verdict("d", "b", "first")
    store.add_verdict("d", "b", "second")
    store.add_verdict("d", "a", "third")
    store.close()
    store = Store(path)
    assert store.rollout("r1") == scored and store.reasons("r1") == {"x": "because"}
    assert list(store.verdicts("d").items()) == [("b", "first"), ("a", "third")]
    assert store.verdicts("e") == {}
    store.close()


def test_the_fields_of_a_task_are_kept(store: Store) -> None:
    task = {"id": "t1", "question": "2+2?", "answer": 4, "hints": ["é", {"a": None}]}
    store.add_rollout(QUEUED, task)
    assert store.task_fields("r1") == {
        "question": "2+2?",
        "answer": "4",
        "hints": '["é", {"a": null}]',
    }
    assert store.task_fields("no") == {}


def test_the_sequence_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    for name in "ab":
        store = Store(path)
        early = store.next_sequence()
        store.add_span("r1", replace(SPAN, span_id=name))
        store.add_span("r1", replace(SPAN, span_id=f"{name}0", sequence=early))
        store.close()
    found = Store(path, read_only=True)
    assert [span.span_id for span in found.spans("r1")] == ["a0", "a", "b0", "b"]
    assert [span.sequence for span in found.spans("r1")] == [1, 2, 3, 4]
    found.close()


def test_posted_spans_may_be_sent_twice_and_replace_nothing(store: Store) -> None:
    other = replace(SPAN, span_id="c" * 16)
    assert store.add_posted_spans("r1", [SPAN, other]) == ([True, True], 0)
    changed = replace(SPAN, name="forged")
    assert store.add_posted_spans("r1", [SPAN, changed]) == ([False, False], 1)
    assert store.add_posted_spans("r2", [changed]) == ([True], 0)  # ids of another rollout
    assert store.spans("r1") == [SPAN, other] and store.spans("r2") == [changed]


def test_a_damaged_file_is_explained_and_closed(
    tmp_path: Path, connections: list[sqlite3.Connection]
) -> None:
    path = tmp_path / "store.sqlite"
    store = Store(path)
    for i in range(200):
        store.add_rollout(replace(QUEUED, rollout_id=f"r{i}"))
    store.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
    connections.clear()
    with raises_coded(StoreError, "malformed", str(path)):
        Store(path)
    (db,) = connections
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        db.execute("SELECT 1")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    store.close()
    store.close()
    with raises_coded(StoreError, "failed") as caught:
        store.rollouts()
    assert isinstance(caught.value.__cause__, sqlite3.ProgrammingError)


def test_a_read_only_store_follows_its_writer_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with raises_coded(StoreError, "not_opened", str(path)):
        Store(path, read_only=True)
    assert not path.exists()
    writer, reader = Store(path), Store(path, read_only=True)
    writer.add_rollout(QUEUED)
    assert reader.rollouts() == [QUEUED]
    with raises_coded(StoreError, "not_writable", str(path)):
        reader.add_span("r1", SPAN)
    writer.close()
    reader.close()


async def test_functions_run_in_order_on_one_thread(store: Store) -> None:
    ran: list[tuple[int, threading.Thread]] = []

    def note(number: int) -> int:
        ran.append((number, threading.current_thread()))
        return number

    results = await asyncio.gather(*(store.in_order(note, number) for number in range(50)))
    assert results == list(range(50)) == [number for number, _ in ran]
    assert len({thread for _, thread in ran}) == 1 and ran[0][1] is not threading.current_thread()


async def test_event_loop_goes_on_while_another_process_holds_the_lock(store: Store) -> None:
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(store.in_order(store.add_span, None, SPAN))
        cancelled = asyncio.create_task(store.in_order(store.add_span, None, OTHER_SPAN))
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert not writing.done()
        cancelled.cancel()
        other.execute("ROLLBACK")
    await writing
    assert await store.in_order(store.spans, None) == [SPAN, OTHER_SPAN]
    assert cancelled.cancelled()


async def test_close_waits_for_what_was_given(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.sqlite")
    given = [store.in_order(store.add_span, None, replace(SPAN, span_id=f"{i}")) for i in range(9)]
    waiting = [asyncio.create_task(coroutine) for coroutine in given]
    await asyncio.sleep(0)
    store.close()
    await asyncio.gather(*waiting)
    with closing(Store(tmp_path / "store.sqlite")) as found:
        assert len(found.spans(None)) == 9
    with pytest.raises(StoreError):
        await store.in_order(store.spans, None)


def test_store_and_its_journals_are_private(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "store.sqlite")) as store:
        store.add_version(0, 0)
        files = sorted(tmp_path.iterdir())
        assert len(files) == 3
        assert all(path.stat().st_mode & 0o077 == 0 for path in files)


FORGOTTEN = """
import sys
from lightning_jax.traces.store import TemporaryStore

store = TemporaryStore()
sys.stdout.write(str(store.path.parent))
"""


def test_a_forgotten_temporary_store_is_deleted_silently_at_exit() -> None:
    python = [sys.executable, "-X", "dev", "-c", FORGOTTEN]
    ended = subprocess.run(python, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout and not Path(ended.stdout).exists()


def test_closing_a_temporary_store_deletes_its_directory() -> None:
    store = TemporaryStore()
    assert store.path.exists()
    store.close()
    assert not store.path.parent.exists()
    store.close()


@contextlib.asynccontextmanager
async def one_group(store: Store) -> AsyncIterator[None]:
    """Let the store's thread wait, so that all calls begun in the body become one group."""
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go_on.wait(10)

    first = asyncio.create_task(store.in_order(wait))
    while not began.is_set():
        await asyncio.sleep(0.001)
    yield
    await asyncio.sleep(0.01)
    go_on.set()
    await first


async def test_calls_that_wait_together_are_committed_together(
    connections: list[sqlite3.Connection], store: Store
) -> None:
    statements: list[str] = []
    connections[0].set_trace_callback(statements.append)
    spans = [replace(SPAN, span_id=f"{i}") for i in range(40)]
    waiting = [store.record("r1", span) for span in spans] + [
        store.in_order(store.add_rollout, QUEUED),
        store.in_order(store.set_status, "r1", "running"),
    ]
    async with one_group(store):
        given = asyncio.gather(*waiting)
    await given
    assert statements.count("COMMIT") == 2  # of the first function and of all others
    assert sum(text.startswith("INSERT INTO spans") for text in statements) == 1
    assert store.spans("r1") == spans and store.rollout("r1").status == "running"


async def test_an_error_in_a_group_fails_only_its_caller(store: Store) -> None:
    store.add_span("r1", SPAN)
    not_json = replace(OTHER_SPAN, span_id="d" * 16, attributes={"x": object()})
    async with one_group(store):
        waiting = asyncio.gather(
            store.record("r1", OTHER_SPAN),
            store.record("r1", replace(SPAN, span_id="e" * 16), SPAN),
            store.record("r1", not_json),
            store.in_order(store.set_status, "r2", "running"),
            store.in_order(store.add_rollout, QUEUED),
            return_exceptions=True,
        )
    results = await waiting
    assert isinstance(results[1], InvalidValue) and isinstance(results[2], ValueError)
    assert results[0] is None and isinstance(results[3], StoreError) and results[4] is None
    assert store.spans("r1") == [SPAN, OTHER_SPAN] and store.rollout("r1") == QUEUED


async def test_a_group_on_a_full_disk_leaves_what_was_committed(
    connections: list[sqlite3.Connection], tmp_path: Path
) -> None:
    with closing(Store(tmp_path / "store.sqlite")) as store:
        store.add_rollout(QUEUED)
        big = _fill_disk(connections[0])
        async with one_group(store):
            waiting = asyncio.gather(
                store.record("r1", big),
                store.in_order(store.set_status, "r1", "running"),
                return_exceptions=True,
            )
        results = await waiting
        assert isinstance(results[0], StoreError) and results[0].reason == "disk_full"
        assert store.spans("r1") == []
        expected = "running" if results[1] is None else "queued"
        assert store.rollout("r1").status == expected
    with closing(Store(tmp_path / "store.sqlite", read_only=True)) as found:
        assert found.rollout("r1").status == expected
