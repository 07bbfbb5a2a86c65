"""Tests of `lightning-jax new --mcp`: a server that is no part of the package becomes a run."""

import itertools
import json
import shlex
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from mcp_program import CAPITALS
from remote_server import serving

from lightning_jax.cli.main import main
from lightning_jax.settings import load_config
from lightning_jax.testing.tiny import TINY_RUN
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config

COMMAND = shlex.join([sys.executable, str(Path(__file__).parents[1] / "mcp_program.py")])
# `tiny` reads bytes, so that a prompt with tools is long.
SETTINGS = TINY_RUN | {
    "model.name": "tiny",
    "serve.max_len": 2048,
    "batch.row_len": 2048,
    "eval.num_tasks": 1,
    "rollout.concurrency": 1,
}


def test_directory_has_drafts_of_a_server_and_trains(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restored_sigterm: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    countries = itertools.cycle(CAPITALS)

    def reply(text: str) -> str:
        if "Write the question" in text:
            return '{"request": "Which city is it?"}'
        return json.dumps({"country": next(countries)}) if "capital_of" in text else '{"text": "a"}'

    folder = tmp_path / "mine"
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with serving(reply) as server:
        arguments = ["--mcp", COMMAND, "--url", server.url, "--model", "big", "--drafts", "8"]
        assert main(["new", str(folder), *arguments]) == 0
        assert {body["model"] for body in server.bodies} == {"big"}
        assert set(server.keys) == {"Bearer secret-key"}
    out = capsys.readouterr().out
    assert "tool capital_of: Return the capital of a country.\n" in out
    tasks = [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]
    assert {task["result"] for task in tasks if task["tool"] == "capital_of"} == {
        *CAPITALS.values()
    }
    assert [m["role"] for m in json.loads((folder / "example.json").read_text())][-1] == "assistant"
    config = load_config(Config, [str(folder / "config.yaml")])
    judge = config.rewards["answer"].judge
    assert judge is not None and judge.url == server.url and judge.served_model == "big"
    assert judge.api_key_env == "OPENAI_API_KEY"
    assert all("secret-key" not in p.read_text() for p in folder.iterdir() if p.is_file())
    assert config.agent.options == {"server": COMMAND}

    monkeypatch.chdir(folder)
    values = yaml.safe_load(Path("config.yaml").read_text())
    del values["rewards"]["answer"]  # the judge, whose server has ended
    Path("config.yaml").write_text(yaml.safe_dump(values))
    settings = [f"{key}={value}" for key, value in SETTINGS.items()]
    assert main(["train", *settings]) == 1  # all earn the same
    with closing(Store(folder / "runs/first/store.sqlite")) as store:
        assert {rollout.status for rollout in store.rollouts()} == {"scored"}


def test_a_server_without_usable_drafts_leaves_a_directory_without_tasks(
    tmp_path: Path, restored_sigterm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    with serving(lambda text: "no") as server:
        arguments = ["--mcp", COMMAND, "--url", server.url, "--model", "big", "--drafts", "2"]
        assert main(["new", str(folder), *arguments]) == 1
    captured = capsys.readouterr()
    assert "2 no_json" in captured.out and "too few" in captured.err
    assert (folder / "tasks.jsonl").read_text() == "" and (folder / "agent.py").is_file()


def test_a_model_that_answers_nothing_leaves_no_directory(
    tmp_path: Path, restored_sigterm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda text: 404) as server:
        arguments = ["--mcp", COMMAND, "--url", server.url, "--model", "big", "--drafts", "2"]
        assert main(["new", str(tmp_path / "mine"), *arguments]) == 1
    assert not (tmp_path / "mine").exists()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("code", ["print('hi')", "import sys; sys.exit('no config')", "1/0"])
def test_a_command_that_is_no_server_is_one_sentence(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shlex.join([sys.executable, "-c", code])
    assert main(["new", str(tmp_path / "mine"), "--mcp", command]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    last_words = {"print('hi')": "hi", "1/0": "ZeroDivisionError"}.get(code, "no config")
    assert last_words in line and not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mcp", "x", "--env", "sums"],
        ["--mcp", "x", "--url", "http://127.0.0.1:1/v1"],
        ["--url", "http://127.0.0.1:1/v1", "--model", "big"],
        ["--model", "big"],
    ],
)
def test_flags_that_do_not_fit_are_a_usage_error(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", str(tmp_path / "mine"), *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
