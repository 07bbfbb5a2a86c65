"""Tests of records of workers: one that fails alone waits, one that fails like the others works."""

from lightning_jax.gateway.sessions.work_matching import MAX_DELAY_S, WorkerRecords


def _note(records: WorkerRecords, worker: str, *have_failed: bool, now: float = 0.0) -> float:
    reasons = ["ValueError" if bad else None for bad in have_failed]
    return [records.note(worker, reason, now, has_others=True) for reason in reasons][-1]


def test_worker_that_fails_while_others_score_waits_longer_each_time() -> None:
    records = WorkerRecords()
    _note(records, "good", *[False] * 8)  # the chance of a failure is 1 in 10
    assert _note(records, "bad", True, True) == 0.0  # 2 say little
    assert _note(records, "bad", True) == 0.0  # 0.1 ** 3 is not below 0.001
    assert _note(records, "bad", True) == 1.0
    assert not records.may_take("bad", 0, 0.5) and records.may_take("bad", 0, 1.0)
    assert not records.may_take("bad", 1, 1.0)  # one at a time
    assert _note(records, "bad", True, now=0.5) == 0.0  # taken before
    assert [_note(records, "bad", True, now=n * 100.0) for n in range(1, 8)] == [
        *(2.0, 4.0, 8.0, 16.0, 32.0),
        *(MAX_DELAY_S, MAX_DELAY_S),
    ]
    assert _note(records, "bad", False, now=800.0) == 0.0
    assert records.may_take("bad", 5, 800.0) and records.may_take("good", 5, 800.0)


def test_workers_that_fail_alike_all_work() -> None:
    records = WorkerRecords()
    for _ in range(20):
        for worker in ("a", "b", "c"):  # half of all rollouts fail, by hard tasks
            _note(records, worker, True, False)
    assert _note(records, "a", *[True] * 9) == 0.0
    assert _note(records, "a", True) == 1.0


def test_nobody_waits_while_nobody_scores() -> None:
    records = WorkerRecords()
    for worker in ("a", "b", "a", "b"):  # the first one alone has the most to say
        for _ in range(100):
            records.note(worker, "ValueError", 1e6, has_others=False)
        assert records.may_take(worker, 5, 1e6)


def test_worker_that_fails_before_others_end_anything_waits() -> None:
    records = WorkerRecords()
    assert _note(records, "bad", *[True] * 4) == 0.0
    assert _note(records, "bad", True) == 1.0  # 0.25 ** 5
    _note(records, "other", True)  # it fails, too
    assert _note(records, "bad", True, now=2.0) == 0.0
    assert records.may_take("bad", 5, 2.0)
