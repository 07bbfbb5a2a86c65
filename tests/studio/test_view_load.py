"""Tests of `lightning-jax view` on complete and broken run directories."""

import json
import re
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from view_records import add, conversation, make_run, rollout

from lightning_jax.cli.commands.runs import View
from lightning_jax.cli.main import main
from lightning_jax.errors import UserError
from lightning_jax.settings import load_config, save_config
from lightning_jax.studio.load import EVALUATION, open_run
from lightning_jax.traces._sqlite import StoreError
from lightning_jax.traces.config import RewardRule, RoleConfig
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("view"))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def _fails(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 1) -> str:
    """Run a command that fails, and return its one-sentence error."""
    assert main(["view", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def _refused(run: Path, rollout_id: str | None = None, **settings: Any) -> tuple[str, str | None]:
    """Why there is nothing to show, and what is concerned."""
    with pytest.raises(UserError) as caught:
        View(run_dir=run, rollout_id=rollout_id, **settings).run()
    return caught.value.reason, caught.value.key


def test_the_table_is_newest_first_and_limited(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run), "--limit", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == (
        ["rollout", "phase", "step", "task", "status", "reward", "calls", "seconds", "reason"]
    )
    assert lines[1].split() == (
        ["train-00003-000-00-1", "train", "3", "task_0", "scored", "1", "2", "4.00"]
    )
    assert lines[4].split()[0] == "train-00003-001-00-1" and "deadline" in lines[4]
    assert re.findall(r"\d+", lines[6])[:2] == ["1", "5"]
    assert re.findall(r"\d+", lines[7]) == ["1", "4"] and "scored" in lines[7]
    of = "train-00003-001-00-1"
    assert lines[8].split()[0] == "1" and "deadline" in lines[8]
    assert lines[8].endswith(f"{of}: it took too long")
    assert main(["view", str(run), "--phase", "eval", "--step", "3"]) == 0
    table = capsys.readouterr().out
    assert "eval-00003-000-00-1" in table and "train" not in table and len(table.splitlines()) == 4


def test_a_task_is_shown_with_its_expected_answer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run), "--limit", "4"]) == 0
    assert "task_1: Which river?" in capsys.readouterr().out
    assert main(["view", str(run), "train-00003-001-00-1"]) == 0
    shown = capsys.readouterr().out
    assert "question: Which river?" in shown and 'answer: ["Loire"]' in shown


def test_tables_rollouts_and_pages_need_no_jax(run: Path, tmp_path: Path) -> None:
    rollout_id, page = "train-00003-000-00-1", tmp_path / "page.html"
    commands = [
        ["view", str(run)],
        ["view", str(run), rollout_id],
        ["view", str(run), "--html", str(page)],
        ["runs", str(run)],
    ]
    code = (
        "import json, sys; from lightning_jax.cli.main import main; "
        "codes = {main(command) for command in json.loads(sys.argv[1])}; "
        "sys.exit(codes != {0} or 'jax' in sys.modules)"
    )
    command = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rollout_id in done.stdout
    assert "advantage +1.414" in done.stdout and "+1.414" in page.read_text()


def test_a_rollout_shows_the_advantages_of_its_group(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards 1, 0, 0 have mean 1/3 and deviation sqrt(2)/3, so the first advantage is sqrt(2)."""
    assert main(["view", str(run), "train-00003-000-00-1"]) == 0
    text = capsys.readouterr().out
    assert text.count("advantage +1.414") == 2
    assert "Capital of France?" in text and "Paris<|im_end|>" in text
    with open_run(run) as reader:
        other = reader.rollout("train-00003-000-01-1")
        evaluation = reader.rollout("eval-00003-000-00-1")
        failed = reader.rollout("train-00003-001-00-1")
    assert other.calls[0].credit and other.calls[0].credit.advantage == pytest.approx(-0.70710678)
    assert all(call.credit is None for call in (*evaluation.calls, *failed.calls))
    assert evaluation.notes == (EVALUATION,) and "agent_failure" in failed.notes[0]


def test_the_page_of_the_run_and_of_one_rollout(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a page.html"
    assert main(["view", str(run), "--html", str(page), "--phase", "train"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert str(page) in line and "4" in line.replace(str(page), "")
    source = page.read_text(encoding="utf-8")
    assert source.count('"spans":') == 4
    assert source.count("advantage +1.414") == 2
    assert main(["view", str(run), "eval-00003-000-00-1", "--html", str(page)]) == 0
    assert page.read_text(encoding="utf-8").count('"spans":') == 1


def test_what_is_not_there_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _refused(tmp_path / "no") == ("not_found", str(tmp_path / "no"))
    assert _refused(tmp_path) == ("incomplete", str(tmp_path / "store.sqlite"))
    assert "store.sqlite" in _fails(capsys, tmp_path)
    assert _refused(run, "train-0003-000-00-1")[0] == "unknown_rollout"
    assert "train-00003-000-00-1," in _fails(capsys, run, "train-0003-000-00-1")
    assert _refused(run, "x") == ("unknown_rollout", "x")
    assert "train-" not in _fails(capsys, run, "x")
    assert _refused(run, step=9) == ("nothing_matches", None)
    assert "5" in _fails(capsys, run, "--step", "9").replace(str(run), "")
    limit = _fails(capsys, run, "--limit", "0", code=2)
    assert "--limit" in limit and re.findall(r"\d+", limit) == ["0", "1", "2147483647"]
    step = _fails(capsys, run, "--step", str(2**70), code=2)
    assert "--step" in step and re.findall(r"\d+", step)[:2] == [str(2**70), "0"]
    both = _fails(capsys, run, "x", "--step", "3", code=2)
    assert "--phase" in both and "--step" in both
    assert _refused(run, html=run / "store.sqlite") == ("wrong_suffix", "--html")
    assert _refused(run, html=tmp_path / "no" / "a.html") == ("not_found", "--html")
    (tmp_path / "store.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError), open_run(tmp_path):
        pass
    assert str(tmp_path / "store.sqlite") in _fails(capsys, tmp_path)
    (tmp_path / "new").mkdir()
    Store(tmp_path / "new" / "store.sqlite").close()
    assert _refused(tmp_path / "new") == ("empty", str(tmp_path / "new"))


def test_a_run_that_goes_on_is_read_and_not_touched(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    writer = Store(run / "store.sqlite")
    add(writer, rollout(3, status="running"), conversation())
    with open_run(run) as reader:
        late = reader.rollout("train-00003-000-03-1")
        first = reader.rollout("train-00003-000-00-1")
        add(writer, rollout(4, 1.0), conversation())  # no lock prevents it
        assert len(reader.run().rows) == 7
        with pytest.raises(StoreError) as caught:
            reader._store.set_status("train-00003-000-03-1", "scored", 1.0)
        assert isinstance(why := caught.value.__cause__, sqlite3.Error)
        assert why.sqlite_errorcode == sqlite3.SQLITE_READONLY
    writer.close()
    assert late.calls and late.calls[0].credit is None
    (note,) = first.notes
    assert re.findall(r"\d+", note) == ["3", "1", "5"]


def test_the_store_of_an_older_release_stays_as_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with sqlite3.connect(run / "store.sqlite") as old:
        for column in ("task", "components", "reasons", "worker"):
            old.execute(f"ALTER TABLE rollouts DROP COLUMN {column}")
        old.execute("PRAGMA user_version=4")
    old.close()
    before = (run / "store.sqlite").read_bytes()
    with open_run(run) as reader:
        assert len(reader.run().rows) == 5
        assert reader.rollout("train-00003-000-00-1").calls[0].credit
    assert (run / "store.sqlite").read_bytes() == before


def test_settings_that_cannot_be_read_cost_only_what_needs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    path = run / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("rollout:\n", "rollout:\n  agent: of an older release\n"))
    with open_run(run) as reader:
        assert reader.rollout("train-00003-000-00-1").calls[0].credit
    path.write_text(text.replace("algorithm:\n", "algorithm:\n  normalize_by_std: true\n"))
    with open_run(run) as reader:
        shown = reader.rollout("train-00003-000-00-1")
    assert shown.calls[0].response == "search<|im_end|>" and shown.calls[0].credit is None
    assert "normalize_by_std" in shown.notes[0]
    path.write_text(text.replace(str(tmp_path / "model"), str(tmp_path / "gone")))
    with open_run(run) as reader:
        shown = reader.rollout("train-00003-000-00-1")
    assert shown.calls[0].response == "" and shown.calls[0].credit
    assert str(tmp_path / "gone") in shown.notes[0]
    path.unlink()
    assert main(["view", str(run)]) == 0
    assert "train-00003-000-00-1" in capsys.readouterr().out


def test_roles_and_reward_rules_are_the_runs(tmp_path: Path) -> None:
    """The rule gives the first call -0.5, so its credit is 1 - 0.5. A frozen call has none."""
    run = make_run(tmp_path, credit="per_step")
    path = run / "config.yaml"
    config = load_config(Config, [str(path)])
    rule = RewardRule(fact="response", pattern="^search", reward=-0.5)
    save_config(replace(config, reward_rules={"searched": rule}), path)
    with open_run(run) as reader:
        first, second = reader.rollout("train-00003-000-00-1").calls
    assert (first.reward, second.reward) == (-0.5, 0.0)
    assert first.credit and first.credit.credit == pytest.approx(0.5)
    frozen = RoleConfig(model="policy", trains=False)
    save_config(replace(config, roles={"checker": frozen}), path)
    with open_run(run) as reader:
        first, _ = reader.rollout("train-00003-000-00-1").calls
    assert (first.role, first.trains, first.credit) == ("checker", False, None)
