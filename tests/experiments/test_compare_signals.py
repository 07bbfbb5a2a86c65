"""Tests of the comparison of signals: each is a config, and its hints tell the answer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import compare_signals
import pytest

from lightning_jax.settings import load_config
from lightning_jax.settings.loading import load_function
from lightning_jax.train.config import Config

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "experiments" / "configs"


@pytest.mark.parametrize("task", ["spider", "calcx", "sums"])
@pytest.mark.parametrize("signal", compare_signals.SIGNALS)
def test_each_signal_is_a_config_of_each_task(task: str, signal: str) -> None:
    path = str(CONFIGS / f"{task}_cpu.yaml")
    config = load_config(Config, [path])
    settings = compare_signals.settings_of(signal, config)
    made = load_config(Config, [path, *settings])
    assert (made.distill.hint is not None) == signal.startswith("hint")
    has_warmup = config.warmup.num_steps > 0 and signal not in ("grpo", "hint", "hint_grpo")
    assert (made.warmup.num_steps > 0) == has_warmup
    if signal == "hint_grpo":
        assert (made.distill.final_coef, made.distill.anneal_steps) == (0.0, config.num_steps)


@pytest.mark.parametrize(
    ("agent", "task", "hint"),
    [
        (
            "spider_sql",
            {"query": "SELECT name FROM pet;"},
            "Your whole reply is this one line. Repeat it word by word:\nSELECT name FROM pet;",
        ),
        ("from_scratch", {"question": "What is 17 + 25?", "answer": 42}, "Answer: 42"),
        ("calcx_math", {"question": "Two and 2?", "result": "4"}, "The answer is 4."),
        (
            "calcx_math",
            {
                "question": "What are 2 and 3?",
                "chain": '<gadget id="calculator">2 + 3</gadget><output>5</output>',
                "result": "5",
            },
            "The right expression is 2 + 3, and the answer is 5.",
        ),
    ],
)
def test_hints_of_the_agents_tell_the_answer(agent: str, task: dict[str, Any], hint: str) -> None:
    function = load_function(f"{ROOT / 'agents' / agent}.py:hint")
    assert function(task) == hint


def test_an_unknown_setting_is_one_sentence() -> None:
    command = [sys.executable, str(ROOT / "experiments" / "compare_signals.py")]
    config = str(CONFIGS / "spider_cpu.yaml")
    done = subprocess.run(
        [*command, "--config", config, "no_such=1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no_such" in done.stderr


def test_seeds_of_one_signal_are_compared_with_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[list[str]] = []

    def run_all(args: object, variants: dict[str, object], parent: Path) -> dict[str, list[Path]]:
        return {name: [parent / f"{name}-{seed}" for seed in range(2)] for name in variants}

    def compare(command: list[str]) -> int:
        compared.append(command[1:-4])
        return 0

    monkeypatch.setattr(compare_signals, "run_all", run_all)
    monkeypatch.setattr(compare_signals, "lightning_jax", compare)
    flags = ["--config", str(CONFIGS / "spider_cpu.yaml"), f"run_dir={tmp_path}"]
    for signals in (["hint"], ["hint", "grpo"]):
        named = [part for signal in signals for part in ("--signal", signal)]
        monkeypatch.setattr(sys, "argv", ["compare_signals.py", *flags, *named])
        assert compare_signals.main() == 0
    hint, grpo = ([f"{tmp_path}/{name}-{seed}" for seed in range(2)] for name in ("hint", "grpo"))
    assert compared == [hint, [",".join(hint), ",".join(grpo)]]


@pytest.mark.slow
def test_runs_end_with_a_comparison(tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(ROOT / "experiments" / "compare_signals.py")),
        *("--config", str(CONFIGS / "spider_cpu.yaml"), "--signal", "grpo", "--signal", "hint"),
        *("--seeds", "1", "model.name=tiny", f"run_dir={tmp_path}", "num_steps=1"),
        *("rollout.tasks_per_step=1", "rollout.group_size=2", "eval.num_tasks=2"),
        *("serve.max_len=2048", "rollout.max_tokens=8", "batch.rows=8"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "grpo-0" in done.stdout and (tmp_path / "signals.png").stat().st_size > 10_000
