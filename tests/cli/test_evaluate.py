"""Tests of `lightning-jax eval`, on a run's policy and on another server."""

import json
import re
import shlex
import shutil
import sys
from contextlib import closing
from pathlib import Path

import pytest
from agent_folder import write_folder
from remote_server import serving

from lightning_jax.cli.main import main
from lightning_jax.rollouts.results.metrics import task_rewards
from lightning_jax.traces.store import Store
from lightning_jax.train.directory import EXPORTED


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a user's folder with an agent and its tasks."""
    write_folder(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch, restored_sigterm: None) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")


def _lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def _row(lines: list[list[str]], name: str) -> list[str]:
    (row,) = (line[1:] for line in lines if line[:1] == [name] and len(line) > 3)
    return row


def _write_letters() -> None:
    """Write an agent whose reward depends on the weights, so equal rewards mean equal weights."""
    agent = Path("agent.py").read_text()
    Path("letters.py").write_text(
        agent.replace(
            'float(reply.choices[0].message.content == "right")',
            "-round(reply.choices[0].logprobs.content[0].logprob, 3)",
        )
        .replace("max_tokens=4", "max_tokens=4, logprobs=True")
        .replace('task["question"] ==', "None ==")  # asks for every task
    )


def test_a_policy_scores_as_in_its_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own files beside the agent
    _write_letters()
    settings = ["agent.function=letters.py:run", "num_steps=0", "run_dir=a run"]
    assert main(["train", "--config", "config.yaml", *settings]) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if "lightning-jax" in line]
    words = [shlex.split(line.removeprefix("next:"), comments=True) for line in printed]
    assert [["a run" in line, "a run/policy" in line] for line in words] == [
        *[[True, False]] * 3,  # view, compare, eval
        [False, True],  # serve
    ]
    flags = ["--run", "a run", "--compare", "a run", "--save", "after.jsonl"]
    assert main(["eval", *flags]) == 0
    lines = _lines(capsys)
    assert ["compared", "with", "a", "run,", "step", "0"] in lines
    assert ["6", "common", "tasks"] in lines
    assert any("0 won, 0 lost, 6 equal" in " ".join(line) for line in lines)
    saved = [json.loads(line) for line in Path("after.jsonl").read_text().splitlines()]
    with closing(Store(Path("a run/store.sqlite"), read_only=True)) as store:
        trained = task_rewards(store.rollouts(phase="eval"))
    assert {result["id"]: result["rewards"] for result in saved} == trained
    assert len({tuple(rewards) for rewards in trained.values()}) > 1
    # The initial policy is the same one, because the run made no step.
    initial = ["eval", "config.yaml", settings[0], "--limit", "2", "--compare", "after.jsonl"]
    assert main(initial) == 0
    lines = _lines(capsys)
    assert any("0 won, 0 lost, 2 equal" in " ".join(line) for line in lines)
    assert _row(lines, "all")[0] == "2"
    assert sorted(path.name for path in Path().iterdir() if path.is_dir()) == ["a run"]


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_has_not_ended_is_scored_by_its_newest_checkpoint(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_letters()
    run = Path(f"unfinished{rank}")
    settings = ["agent.function=letters.py:run", f"run_dir={run}", f"model.lora.rank={rank}"]
    assert main(["train", *settings, "optimizer.learning_rate=0.1"]) == 0
    (run / EXPORTED).unlink()
    shutil.rmtree(run / "policy")
    capsys.readouterr()
    assert main(["eval", "--run", str(run), "--compare", str(run)]) == 0
    text = capsys.readouterr().out
    assert f"{run}/checkpoints/1" in text and "compared with" in text and "step 1" in text
    assert "0 won, 0 lost, 6 equal" in text
    # Other weights than the initial ones, which the evaluation of step 0 measured.
    with closing(Store(run / "store.sqlite", read_only=True)) as store:
        rollouts = store.rollouts(phase="eval")
    first, last = (task_rewards([r for r in rollouts if r.step == step]) for step in (0, 1))
    assert first != last


def test_a_server_is_scored_by_field_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    def reply(text: str) -> str:
        return "right" if text in ("1 + 1", "3 + 3", "4 + 4") else "wrong"

    with serving(reply) as server:
        flags = ["--url", server.url, "--model", "big", "--save", "first.jsonl", "--repeats", "2"]
        assert main(["eval", *flags]) == 0
    lines = _lines(capsys)
    # Tasks, reward, error, failed, no call, calls, the agent's own number.
    assert _row(lines, "all") == ["6", "0.500", "±", "0.224", "0", "0%", "1.0", "0.250"]
    assert _row(lines, "kind=even") == ["3", "0.333", "±", "0.333", "0", "0%", "1.0", "0.250"]
    assert _row(lines, "kind=odd")[:2] == ["3", "0.667"]
    assert len(server.bodies) == 12
    first = json.loads(Path("first.jsonl").read_text().splitlines()[0])
    assert first == {
        "id": "d0",
        "rewards": [0.0, 0.0],
        "num_calls": [1, 1],
        "failures": {},
        "metrics": {"own": 0.25},
    }
    with serving(lambda text: "right") as server:
        assert main(["eval", "--url", server.url, "--compare", "first.jsonl"]) == 0
    lines = _lines(capsys)
    (verdict,) = (text for text in map(" ".join, lines) if "3 won, 0 lost, 3 equal" in text)
    assert "p = 0.25" in verdict
    assert ["d0", "0.000", "1.000", "+1.000"] in lines


def test_failures_and_rollouts_without_a_call_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda text: "right") as server:
        flags = ["--url", server.url, "--tasks", "train", "--limit", "5"]
        assert main(["eval", *flags, "--save", "train.jsonl"]) == 0
        printed = capsys.readouterr().out
        lines = [line.split() for line in printed.splitlines()]
        # The agent breaks in one of five tasks and makes no call in one of the four others.
        assert _row(lines, "all")[:6] == ["5", "0.800", "±", "0.200", "1", "25%"]
        assert re.search(r"agent: 1 KeyError, .*agent\.py:8 in run", printed)
        assert "note: 25%" in printed
        assert main(["eval", "--url", server.url, "--tasks", "dev.jsonl", "--limit", "3"]) == 0
        assert _row(_lines(capsys), "all")[0] == "3"
    results = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    assert [result["failures"] for result in results] == [{}, {"KeyError": 1}, {}, {}, {}]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--save", "results.csv"], ("--save", "results.csv", ".jsonl")),
        (["--save", "no/results.jsonl"], ("--save", "no/results.jsonl")),
        (["--compare", "none.jsonl"], ("none.jsonl",)),
        (["--compare", "dev.jsonl"], ("dev.jsonl:1",)),
        (["--compare", "."], ("no evaluation",)),
        (["--tasks", "none.jsonl"], ("none.jsonl",)),
        (["--model", "./none"], ("'./none'",)),
        (["agent.function=agent.py:run", "--url", "http://127.0.0.1:1/v1"], ("upstream_error",)),
    ],
)
def test_a_mistake_is_one_sentence(
    flags: list[str],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", "rollout.retry_delay_s=0", *flags]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and all(word in errors[0] for word in words), errors
