"""Tests of the command that spends a short time on a borrowed accelerator."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pack_window
import pytest
from accelerator import Outcome, Report, cases_of, parse, run_case
from window import learn, parts
from window.cases import Case, Figure

SCRIPT = Path(pack_window.__file__).with_name("accelerator.py")


def _report(tmp_path: Path) -> Report:
    return Report("decode", tmp_path / "work/report.json", tmp_path / "out")


def test_figures_are_in_the_report_as_soon_as_they_are_measured(tmp_path: Path) -> None:
    report = _report(tmp_path)
    report.add("copy", Figure("rate", 3000.0, "GB/s", "3,000", "one | two"))
    report.add("copy", Figure("rate", 3100.0, "GB/s", "3,000"))
    report.add("copy", Figure("paged", float("nan"), "us", note="no library"))
    report.end("copy", Outcome("stopped", 5.0, "its time was up"))
    table = (tmp_path / "out/report.md").read_text()
    assert "| copy | rate | 3100 GB/s | 3,000 |  |" in table
    assert "| copy | paged | none |  | no library |" in table
    assert "* copy stopped after 5 s: its time was up" in table
    saved = json.loads((tmp_path / "out/report.json").read_text())
    assert saved["figures"]["copy"]["rate"]["value"] == 3100.0


def test_a_later_command_goes_on_with_the_report(tmp_path: Path) -> None:
    first = _report(tmp_path)
    first.add("copy", Figure("rate", 3000.0, "GB/s"))
    first.end("copy", Outcome("measured", 2.0))
    first.end("products", Outcome("failed", 2.0, "no memory"))
    later = _report(tmp_path)
    assert later.is_measured("copy")
    assert not later.is_measured("products")
    assert later.figures["copy"]["rate"]["value"] == 3000.0


def _run(tmp_path: Path, program: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Run a program in place of a case's process."""
    script = tmp_path / "case.py"
    script.write_text(program)
    monkeypatch.setattr("accelerator.__file__", str(script))
    args = parse(["--part", "decode", "--work", str(tmp_path), "--out", str(tmp_path / "out")])
    monkeypatch.setattr(sys, "argv", ["accelerator.py"])
    case = Case("one", 1.0, "", lambda setting: ())
    return run_case(case, args, _report(tmp_path), seconds)


FIGURE = """import json, sys, time
print("a library's line", flush=True)
figure = {"name": "rate", "value": 1.0, "unit": "s", "predicted": "", "note": ""}
print(json.dumps({"figure": figure}), flush=True)
"""


def test_a_case_out_of_time_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = _run(tmp_path, FIGURE + "time.sleep(60)", 3.0, monkeypatch)
    assert outcome.status == "stopped"
    saved = json.loads((tmp_path / "out/report.json").read_text())
    assert saved["figures"]["one"]["rate"]["value"] == 1.0


def test_a_case_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = FIGURE + "sys.exit('no memory left')"
    outcome = _run(tmp_path, program, 20.0, monkeypatch)
    assert (outcome.status, "no memory left" in outcome.reason) == ("failed", True)
    program = FIGURE + "print('error: a setting is wrong', file=sys.stderr); raise ValueError(1)"
    assert "a setting is wrong" in _run(tmp_path, program, 20.0, monkeypatch).reason


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--part", "learn", "--work", str(tmp_path)]
    command += ["--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "parts.json has not arrived" in ended.stderr
    assert "no Spider" in ended.stderr


def test_plans_name_every_case() -> None:
    for part in ("learn", "decode", "engine", "update"):
        command = [sys.executable, str(SCRIPT), "--part", part, "--plan"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert len(ended.stdout.splitlines()) >= 3


# What a first window must measure, in three commands of 9.5 minutes.
NEEDED = {
    "decode": {"ceilings", "generate_135m_64", "generate_1.5b_64", "generate_8b_64"}
    | {"branched_135m_64", "separate_135m_64", "attention", "host_arrays", "pages_135m"},
    "engine": {"engine_135m_64", "grpo_steps", "arrivals_135m_64", "steps_per_dispatch"}
    | {"engine_1_5b_64", "responses", "switch_interval"},
    "update": {"update_1_5b_rows4", "kernels_1_5b", "attention", "differences", "remat_1_5b"},
}


@pytest.mark.parametrize("part", NEEDED)
def test_first_window_measures_each_step_in_time(part: str) -> None:
    cases = cases_of(part, parse(["--part", part]))
    last = max(i for i, case in enumerate(cases) if case.name in NEEDED[part])
    assert NEEDED[part] <= {case.name for case in cases}
    assert sum(case.minutes for case in cases[: last + 1]) <= 9.3


def test_parts_are_joined_and_checked(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "parts"
    model.write_bytes(bytes(range(256)) * 10)
    made = parts.write_parts(model, folder, first=100, size=1000)
    assert [path.stat().st_size for path in made] == [100, 1000, 1000, 460]
    held = made[2].read_bytes()
    made[2].unlink()
    assert [(one.name, one.reason) for one in parts.join_parts(folder)] == [
        ("part02", "has not arrived")
    ]
    made[2].write_bytes(held[:-1])
    assert [one.name for one in parts.join_parts(folder)] == ["part02"]
    made[2].write_bytes(held)
    assert parts.join_parts(folder) == []
    assert (folder / parts.MODEL).read_bytes() == model.read_bytes()
    made[0].unlink()  # later commands do not carry them
    assert parts.join_parts(folder) == []


def test_wheels_travel_with_the_first_command() -> None:
    lines = list(parts.commands([], ["window/wheels"], "window", ["first", "second"]))
    assert lines == ["1. carry window/wheels", "   run   first", "2. run   second"]
    lines = list(parts.commands([Path("a"), Path("b")], ["data"], "w", ["first", "second"]))
    assert lines == [
        *("1. carry w/a data", "   run   ls -l w", "2. carry w/b", "   run   first"),
        "3. run   second",
    ]


def test_a_repeated_embedding_is_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(96, 32)).astype(np.float32)
    norm, source, target = np.ones(32, np.float32), tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(source, "qwen2")
    writer.add_uint32("qwen2.block_count", 0)
    writer.add_tensor("output.weight", embedding)
    writer.add_tensor("token_embd.weight", embedding.astype(np.float16))
    writer.add_tensor("output_norm.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts.drop_repeated_embedding(source, target)
    reader = gguf.GGUFReader(target)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(tensors) == {"token_embd.weight", "output_norm.weight"}
    np.testing.assert_array_equal(tensors["token_embd.weight"], embedding)
    np.testing.assert_array_equal(tensors["output_norm.weight"], norm)
    field = reader.get_field("qwen2.block_count")
    assert field is not None and field.contents() == 0


def test_names_of_requirements_are_compared_normalized() -> None:
    lines = ["Jinja2==3.1.6", "jax==0.10 ; python_version < '3.12'", "array_record", "", "  "]
    assert pack_window.names_of(lines) == {"jinja2", "jax", "array-record"}


def test_sign_test_by_hand() -> None:
    assert learn.sign_test(0, 0) == 1.0
    assert learn.sign_test(5, 0) == pytest.approx(2 / 32)
    assert learn.sign_test(1, 3) == pytest.approx(2 * (4 + 1) / 16)


def _write_rows(run: Path, rows: list[dict[str, float]], end: str = "") -> None:
    run.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + end)


def _right(share: float) -> dict[str, float]:
    """Return metrics of a step in which that share of 256 queries was right."""
    return {"rollout/num_rollouts": 256, "rollout/reward_mean": 1.0, "reward/agent_mean": share}


def test_figures_of_a_run_that_still_writes(tmp_path: Path) -> None:
    rows = [
        {"step": 0, **_right(0.2), "time/step_s": 30},
        {"step": 0, "eval/reward_mean": 0.5, "eval/num_tasks": 200, "eval/reward_stderr": 0.04},
        {"step": 1, **_right(0.4), "time/step_s": 20},
        {"step": 2, **_right(0.6), "time/step_s": 10},
        {"step": 3, "eval/reward_mean": 0.6, "eval/num_better": 5, "eval/num_worse": 0},
    ]
    _write_rows(tmp_path, rows, '{"step": 4, "rollout/rew')
    found = {figure.name: figure for figure in learn.figures(tmp_path)}
    assert found["steps"].value == 3
    assert found["rollouts"].value == 768
    assert found["greedy reward, step 0"].note == "+- 0.040, 200 questions"
    assert found["sampled queries right, first third"].value == 0.2
    assert found["sampled queries right, last third"].value == 0.6
    assert found["time of a step"].value == 20
    assert found["p of a sign test"].value == pytest.approx(2 / 32)


RUN = """import json, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
def save(*_):
    (run / "saved").write_text("")
    sys.exit(130)
signal.signal(signal.SIGINT, save)
row = {"step": 0, "rollout/reward_mean": 1, "reward/agent_mean": 0.5}
(run / "metrics.jsonl").write_text(json.dumps(row) + "\\n")
(run / "process").write_text("")
while True:
    time.sleep(0.1)
"""


def test_a_run_is_saved_when_its_time_is_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    names = [
        figure.name for figure in learn.watch(command, time.monotonic() + 4, tmp_path, lambda: None)
    ]
    assert "sampled queries right, last third" in names
    assert (tmp_path / "saved").exists()


def test_a_run_that_fails_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]
    with pytest.raises(RuntimeError, match="status 3"):
        list(learn.watch(command, time.monotonic() + 20, tmp_path, lambda: None))


def test_a_killed_command_leaves_no_run_behind(tmp_path: Path) -> None:
    program = f"""import sys, time
sys.path[:0] = {[str(SCRIPT.parent)]!r}
from pathlib import Path
from window import learn
run = Path({str(tmp_path)!r})
command = [sys.executable, "-c", {RUN!r} + "", str(run)]
list(learn.watch(command, time.monotonic() + 60, run, lambda: None))
"""
    child = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 20
    while not (tmp_path / "process").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 20
    while _runs_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs_in(tmp_path)
    assert not (tmp_path / "saved").exists()


def _runs_in(directory: Path) -> list[str]:
    """Return the processes with this directory as their last argument. Linux only."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _readable(path)]
    return [line.decode() for line in lines if line.endswith(f"{directory}\0".encode())]


def _readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True
