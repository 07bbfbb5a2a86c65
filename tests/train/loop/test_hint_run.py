"""Tests of runs whose teacher is the policy with a hint in its prompt."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded
from toy_agent import unrewarded
from toy_runs import LORA, MODEL, TASKS, policies_config, toy_config

from lightning_jax.models.config import ModelConfig
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.policies import TEACHER
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, DistillConfig
from lightning_jax.rl.distill import weigh_teacher
from lightning_jax.rl.prepare import prepare_step
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.records import trajectory, transition
from lightning_jax.testing.tiny import tiny_tokenizer
from lightning_jax.train.config import Config
from lightning_jax.train.loop.trainer import train
from lightning_jax.train.state.resume import digests
from lightning_jax.train.tasks.hints import HintError, Hints, end_of_message, make_hints

TOKENIZER = tiny_tokenizer()
HINTS = """
def hint(task):
    return f"The answer is {task['id']}."

def none(task):
    return " "

def leaks(task):
    return task["question"]

def long(task):
    return "x" * 300

def number(task):
    return 12

def fails(task):
    raise KeyError("solution")
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_hf(path, MODEL)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hints.py"
    path.write_text(HINTS)
    return path


def taught(model_dir: Path, run_dir: Path, hint: str, **changes: Any) -> Config:
    distill = DistillConfig(hint=hint, reward_coef=0.0, **changes)
    rollout = RolloutConfig(tasks_per_step=2, group_size=4)
    return toy_config(model_dir, run_dir, num_steps=2, distill=distill, rollout=rollout)


def run(config: Config) -> list[dict[str, Any]]:
    return asyncio.run(train(config, TASKS, TASKS, agent=unrewarded))


@pytest.mark.parametrize("teacher", [None, "initial"])
def test_a_run_learns_from_its_hints_where_all_rewards_are_equal(
    teacher: str | None,
    model_dir: Path,
    file: Path,
    tmp_path: Path,
):
    config = taught(
        model_dir,
        tmp_path / "run",
        f"{file}:hint",
        teacher=teacher,
        final_coef=0.0,
        anneal_steps=1,
    )
    first, second = run(config)[:2]
    assert first["train/equal_groups_share"] == second["train/equal_groups_share"] == 1.0
    assert first["train/num_updates"] == 1.0 and first["train/grad_norm"] > 0.0
    assert first["train/teacher_coef"] == first["train/teacher_share"] == 1.0
    assert first["train/without_teacher"] == first["train/without_hint"] == 0.0
    assert first["train/hints_in_prompts"] == 0.0 and "train/kl_to_teacher" in first
    assert first["train/distill_kl"] > 0.0 and first["train/teacher_named_mass"] <= 1.0
    # At weight 0 the teacher does not run, and nothing is learned.
    assert second["train/teacher_coef"] == second["train/num_updates"] == 0.0
    assert "train/without_hint" not in second
    assert load_model(str(tmp_path / "run" / "policy")).config == MODEL.config


def test_a_hint_that_makes_rows_too_long_is_counted(
    model_dir: Path,
    file: Path,
    tmp_path: Path,
):
    config = taught(model_dir, tmp_path / "run", f"{file}:long")
    row, *_ = run(dataclasses.replace(config, num_steps=1))
    assert row["train/without_teacher"] == 8.0 and row["train/num_updates"] == 0.0
    assert row["train/teacher_share"] == 0.0


def test_a_run_resumes_with_its_hints(
    model_dir: Path,
    file: Path,
    tmp_path: Path,
):
    config = taught(model_dir, tmp_path / "whole", f"{file}:hint")
    whole = run(config)
    parted = dataclasses.replace(config, run_dir=str(tmp_path / "parted"))
    run(dataclasses.replace(parted, num_steps=1))
    rows = run(parted)
    names = ("kl_to_teacher", "distill_kl", "grad_norm", "teacher_share")
    for name in (f"train/{name}" for name in names):
        assert [row.get(name) for row in rows[:2]] == pytest.approx(
            [row.get(name) for row in whole[:2]], rel=1e-4
        )


@pytest.mark.parametrize("rank", [pytest.param(LORA.rank, marks=pytest.mark.slow), 0])
def test_policies_score_their_samples_with_the_hint_by_their_own_weights(
    rank: int, model_dir: Path, file: Path, tmp_path: Path
):
    config = policies_config(
        model_dir,
        tmp_path / "run",
        num_steps=1,
        model=ModelConfig(name=str(model_dir), lora=dataclasses.replace(LORA, rank=rank)),
        distill=DistillConfig(hint=f"{file}:hint", reward_coef=0.0),
        batch=BatchConfig(rows=1, row_len=512, max_targets=128, head_chunk=64),
    )
    row = asyncio.run(train(config, TASKS, TASKS))[0]
    for suffix in [""] if rank else ["/policy=speaker", "/policy=listener"]:
        assert row[f"train/teacher_share{suffix}"] == 1.0
        assert row[f"train/without_teacher{suffix}"] == 0.0
    assert row["train/without_hint"] == 0.0
    assert any(value > 0 for name, value in row.items() if name.startswith("train/grad_norm"))


def hints(file: Path, name: str) -> Hints:
    made = make_hints(f"{file}:{name}", TOKENIZER, [])
    assert made is not None
    return made


def test_a_function_that_is_unsuitable_ends_the_run_before_it_begins(file: Path):
    for name, reason in {"number": "wrong_type", "fails": "failed"}.items():
        with raises_coded(HintError, reason, "distill.hint"):
            make_hints(f"{file}:{name}", TOKENIZER, TASKS)
    with raises_coded(ConfigError, "no_such_function", "absent"):
        make_hints(f"{file}:absent", TOKENIZER, TASKS)
    assert make_hints(None, TOKENIZER, TASKS) is None


def prompt_ids(*messages: str) -> list[int]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return TOKENIZER.encode(TOKENIZER.render_chat(turns))


def added(made: Hints, *prompts: list[int], task: dict[str, Any] | None = None):
    calls = [transition(prompt, [4]) for prompt in prompts]
    step = [trajectory(*calls, group="g", rollout="r")]
    sequences, _ = prepare_step(step, AlgorithmConfig(), policy_version=0)
    mixed = weigh_teacher(sequences, coef=1.0, reward_coef=1.0)
    return made.add(mixed, step, {"g": task or {"id": "t7", "question": "why"}})


def test_a_hint_in_the_first_prompt_is_refused(file: Path):
    with raises_coded(HintError, "leak", "distill.hint"):
        added(hints(file, "leaks"), prompt_ids("Say  \n why"))
    with raises_coded(HintError, "leak", "distill.hint"):
        added(hints(file, "hint"), prompt_ids("The answer is\nt7. Repeat it."))


def test_a_hint_that_came_from_a_response_or_a_tool_is_counted(file: Path):
    first = prompt_ids("Well?")
    later = prompt_ids("Well?", "The answer is t7.", "Sure?")
    made, metrics = added(hints(file, "hint"), first, later)
    assert metrics == {"train/without_hint": 0.0, "train/hints_in_prompts": 1.0}
    texts = [TOKENIZER.decode(item.teacher_prompt_ids, skip_special=False) for item in made]
    assert texts[0] == (
        "<|im_start|>user\nWell?\n\nThe answer is t7.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert texts[1].startswith("<|im_start|>user\nWell?\n\nThe answer is t7.<|im_end|>")
    assert texts[1].count("\n\nThe answer is t7.") == 1


def test_tasks_without_a_hint_and_prompts_without_messages_have_no_teacher(file: Path):
    for made, metrics in (
        added(hints(file, "none"), prompt_ids("Well?")),
        added(hints(file, "hint"), TOKENIZER.encode("Once upon a time")),
    ):
        assert metrics["train/without_hint"] == 1.0
        assert made[0].teacher_coef == 0.0 and made[0].teacher_prompt_ids == ()


def test_special_tokens_in_a_hint_are_ordinary_text(file: Path):
    made, _ = added(hints(file, "hint"), prompt_ids("Well?"), task={"id": "<|im_end|>"})
    end = end_of_message(TOKENIZER)
    assert made[0].teacher_prompt_ids.count(end) == made[0].prompt_token_ids.count(end)


def test_a_template_that_ends_messages_with_text_is_refused():
    plain = TOKENIZER.with_chat(
        template="{% for m in messages %}{{ m['content'] }} END {% endfor %}"
    )
    with raises_coded(HintError, "unsupported", "distill.hint"):
        end_of_message(plain)


def test_a_changed_hint_is_another_way_of_learning(file: Path, model_dir: Path, tmp_path: Path):
    config = taught(model_dir, tmp_path / "run", f"{file}:hint")
    before = digests(config, TASKS, TASKS)
    assert "distill.hint (its file)" in before
    file.write_text(HINTS + "\n# changed\n")
    after = digests(config, TASKS, TASKS)
    assert before["distill.hint (its file)"] != after["distill.hint (its file)"]


@pytest.mark.parametrize("loss", ["dpo", "raft"])
def test_losses_with_advantages_of_their_own_take_no_hint(loss: str, file: Path):
    with raises_coded(ConfigError, "conflict", "distill.hint"):
        load_config(Config, [f"algorithm.loss={loss}", f"distill.hint={file}:hint"])


def test_an_initial_teacher_needs_policies_that_begin_the_same():
    with raises_coded(ConfigError, "conflict", "distill.teacher"):
        load_config(Config, ["distill.teacher=initial", "policies.a.base=other"])
    initial = load_config(Config, ["distill.teacher=initial", "model.name=tiny"])
    other = load_config(Config, ["distill.teacher=org/other"])
    rows = [config.policy_table.row(TEACHER) for config in (initial, other)]
    assert [row and row.base for row in rows] == [None, "org/other"]  # None: the run's model
