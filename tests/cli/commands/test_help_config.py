"""Tests of `lightning-jax config`: what it finds, checks and derives."""

from pathlib import Path

import pytest

from lightning_jax.cli.main import main
from lightning_jax.settings import load_config, save_config
from lightning_jax.train.config import Config


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/agent.py").write_text("def run(task, llm):\n    return 1.0\n")
    Path("mine/tasks.jsonl").write_text("".join(f'{{"a": {i}}}\n' for i in range(10)))
    Path("mine/c.yaml").write_text(
        "run_dir: run\ndata: {root: tasks.jsonl}\nagent: {function: agent.py:run}\n"
        "serve: {max_len: 300}\n"
    )


def test_a_check_prints_what_it_derives_and_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "mine/c.yaml", "batch.max_targets=2048"]) == 0
    printed = capsys.readouterr()
    lines = {line.strip() for line in printed.out.splitlines()}
    assert {
        *("serve.prefill_buckets=[32, 128]", "batch.row_len=512"),
        *("data.root=mine/tasks.jsonl", "agent.function=mine/agent.py:run", "begins run"),
    } <= lines
    assert not any("max_targets" in line for line in lines if line.startswith("batch."))
    assert "8 train tasks" in printed.err and not Path("run").exists()


def test_a_check_names_what_a_run_in_the_directory_had_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("run").mkdir()
    save_config(
        load_config(Config, ["mine/c.yaml", "seed=1", "num_steps=3"]), Path("run/config.yaml")
    )
    assert main(["config", "check", "mine/c.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(": seed")


def test_a_check_does_not_call_a_loader() -> None:
    Path("mine/load.py").write_text("def load(root, split, folder):\n    raise SystemExit\n")
    assert main(["config", "check", "mine/c.yaml", "data.load=mine/load.py:load"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["check", "gone.yaml"],
        ["check", "mine/c.yaml", "lr=3"],
        ["check", "mine/c.yaml", "agent.function=gone.py:run"],
        ["check", "mine/c.yaml", "data.root=gone.jsonl"],
        ["zebra"],
    ],
)
def test_mistakes_give_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1


def test_a_word_prints_settings_with_their_whole_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "prefill"]) == 0
    assert capsys.readouterr().out.startswith("serve.prefill_buckets: null  [")
