"""Tests of `lightning-jax try`, on a tiny policy and on another server."""

import re
import shlex
import sys
from contextlib import closing
from pathlib import Path

import pytest
from agent_folder import write_folder
from remote_server import serving

from lightning_jax.cli.main import main
from lightning_jax.studio.load import EVALUATION, open_run
from lightning_jax.traces.store import Store


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_sigterm: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own files beside the agent
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    write_folder(tmp_path)
    return tmp_path


def test_attempts_at_a_task_of_the_policy_are_shown_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name for path in folder.iterdir()}
    assert main(["try", "config.yaml", "--task", "3", "-n", "3", "seed=3"]) == 0
    printed = capsys.readouterr().out
    heads = re.findall(r"^(train-00000-000-\d\d-1) +scored +reward 0 +1 calls", printed, re.M)
    assert heads == [f"train-00000-000-0{index}-1" for index in range(3)]
    assert "own 0.25" in printed and printed.count("1 + 1?<|im_end|>") == 3
    assert printed.count("advantage +0") == 3  # all earned the same
    assert re.search(r"in all: 3 scored\n", printed)
    assert re.search(r"^reward 0\.000, standard deviation 0\.000$", printed, re.M)
    assert "no gradient" in printed
    assert {path.name for path in folder.iterdir()} == before


def test_another_server_answers_without_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str], compiled: list[str]
) -> None:
    with serving(lambda text: "right" if "2" in text else "wrong") as server:
        flags = ["--url", server.url, "--api-key", "its-key", "--model", "big"]
        assert main(["try", "--config", "config.yaml", "--task", "q-2 + 2?", *flags]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"scored +reward 1 +1 calls", printed) and "31 + 17 tokens" in printed
    assert "user: 2 + 2?" in printed and "right" in printed and server.url in printed
    assert "its-key" not in printed
    assert server.keys == ["Bearer its-key"] and server.bodies[0]["model"] == "big"
    assert compiled == []


@pytest.mark.parametrize(
    ("task", "status", "words"),
    [
        ("q-broken", "agent failure", "KeyError: 'no such tool' (at {agent}:8 in run)"),
        ("0", "infrastructure failure", "upstream_error: "),
    ],
)
def test_a_failure_is_shown_at_once_with_its_line(
    task: str, status: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", "http://127.0.0.1:1/v1", "--task", task]
    assert main(["try", *flags]) == 1
    printed = capsys.readouterr().out
    assert f"  {status}  " in printed
    assert words.format(agent=folder / "agent.py") in printed.replace("\n", " ")


def test_a_reward_without_a_call_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--url", "http://127.0.0.1:1/v1", "--task", "q-silent"]) == 0
    printed = capsys.readouterr().out
    assert "reward 1" in printed and "0 calls" in printed and "note: 100%" in printed


def test_rollouts_are_kept_on_request(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    record = folder / "kept here.sqlite"
    with serving(lambda text: "wrong") as server:
        for _ in range(2):
            flags = ["--url", server.url, "--greedy", "--record", str(record)]
            assert main(["try", *flags]) == 0
    assert server.keys == ["Bearer from-the-environment"] * 2
    assert server.bodies[0]["model"] == "policy"  # as the agent asks
    with closing(Store(record, read_only=True)) as store:
        kept = store.rollouts()
    assert [(rollout.phase, rollout.step) for rollout in kept] == [("eval", 0), ("eval", 1)]
    with open_run(record) as reader:
        view = reader.rollout(kept[1].rollout_id)
    assert view.calls[0].response == "wrong" and view.notes == (EVALUATION,)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "view" in line][-1:]
    assert shlex.split(line)[-3:] == ["view", str(record), "ROLLOUT"]
    assert main(["view", str(record)]) == 0
    assert kept[0].rollout_id in capsys.readouterr().out


def test_suggested_settings_then_suffice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["data.root=data", "rollout.max_tokens=8"]  # more than the agent asks for
    (folder / "data").mkdir()
    for name in ("train", "dev"):
        text = f'{{"question": "{f"{name} " * 200}", "id": "{name}"}}\n'
        (folder / f"data/{name}.jsonl").write_text(text)
    assert main(["try", *where]) == 1
    (needed,) = re.findall(r"seems to need: (.*)$", capsys.readouterr().out, re.M)
    assert "serve.max_len=" in needed and "batch.row_len=" in needed
    assert main(["try", *where, *needed.split()]) == 0
    printed = capsys.readouterr().out
    assert "longest prompt 12" in printed and "seems to need" not in printed


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--task", "q-hallo"], ("q-hallo", "q-hello")),
        (["--task", "5"], ("'5'", "below 5")),
        (["--url", "localhost:8000"], ("localhost:8000", "http")),
        (["--run", "runs/none"], ("runs/none",)),
        (["--run", "."], ("policy",)),
        (["--run", "runs/x", "--url", "http://a/v1"], ("--run", "--url")),
        (["--api-key", "k"], ("--api-key", "--url")),
        (["no.yaml"], ("no.yaml",)),
        (["data.root=none"], ("data.root", "'none'")),
        (["agent.function=agent.py:walk"], ("'agent.py:walk'",)),
    ],
)
def test_a_mistake_is_one_sentence(
    flags: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try", *flags]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and all(word in errors[0] for word in words), errors


def test_a_folder_without_settings_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.yaml").unlink()
    assert main(["try"]) == 1
    assert "config.yaml" in capsys.readouterr().err
