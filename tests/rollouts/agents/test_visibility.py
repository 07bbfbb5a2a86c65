"""Tests of what programs get of their rollout, and of what they post."""

import sys
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.errors import FieldError
from lightning_jax.rollouts.agents.program import make_agent
from lightning_jax.rollouts.agents.visibility import ANSWERS, visible_llm, visible_task
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.types import LLM

OPEN = LLM("http://h/rollout/r~full/v1", "full", "policy", {}, "http://h/rollout/r~calls/v1", "few")
JUDGED = LLM(OPEN.base_url, "full", "policy", {}, OPEN.calls_url, "few", is_judged=True)
TASK = {"id": "a", "question": "1 + 1?", "answer": 2, "info": {"level": 1, "gold": "2"}}
REWARD = """
def reward(task, output):
    leaks = output.count("gold") + output.count("answer")
    return {"reward": task["answer"] / 2, "leaks": leaks, "has_question": output.count("1 + 1?")}
"""


@pytest.mark.parametrize("name", ["answer", "Answers", "gold_answer", "ground_truth", "test_list"])
def test_name_of_an_answer_is_known(name: str) -> None:
    assert ANSWERS.fullmatch(name)


@pytest.mark.parametrize("name", ["question", "answer_format", "target_language", "id", "context"])
def test_name_of_an_input_is_none_of_an_answer(name: str) -> None:
    assert not ANSWERS.fullmatch(name)


def test_program_that_rewards_itself_gets_the_whole_task() -> None:
    assert visible_task(TASK, AgentConfig(command="sh"), OPEN) == TASK


@pytest.mark.parametrize(("reward", "llm"), [("judge.py:reward", OPEN), (None, JUDGED)])
def test_judged_program_gets_no_answer(reward: str | None, llm: LLM) -> None:
    config = AgentConfig(command="sh", reward=reward)
    assert visible_task(TASK, config, llm) == {
        "id": "a",
        "question": "1 + 1?",
        "info": {"level": 1},
    }
    assert visible_llm(config, llm).base_url == OPEN.calls_url
    assert visible_llm(config, llm).api_key == "few"


def test_fields_that_the_setting_names_are_given() -> None:
    named = AgentConfig(command="sh", task_fields=("answer", "absent"))
    for llm in (OPEN, JUDGED):
        assert visible_task(TASK, named, llm) == {"id": "a", "answer": 2}
    with raises_coded(FieldError, "conflict", "task_fields"):
        AgentConfig("agent.py:run", task_fields=("question",))


@pytest.mark.parametrize(
    ("posts", "llm", "key"),
    [
        ("auto", OPEN, "full"),
        ("auto", JUDGED, "few"),
        ("all", JUDGED, "full"),
        ("own", OPEN, "few"),
    ],
)
def test_setting_says_whose_posts_count(posts: Any, llm: LLM, key: str) -> None:
    assert visible_llm(AgentConfig(command="sh", posts=posts), llm).api_key == key


async def test_reward_reads_what_its_program_does_not_get(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(REWARD)
    command = ["sh", "-c", 'cat; printenv; test "$LIGHTNING_TASK"']
    config = AgentConfig(command=command, reward=f"{tmp_path}/judge.py:reward")
    assert await make_agent(config)(TASK, OPEN) == {"reward": 1.0, "leaks": 0, "has_question": 2}


READS_CHANNEL = """
import json, os, subprocess, sys
number = int(os.environ["LIGHTNING_REPORT_FD"])
with open(number) as file:
    found = json.load(file)
tool = "import os, sys; print(os.read(int(sys.argv[1]), 1000) or 'empty')"
left = subprocess.run([sys.executable, "-c", tool, str(number)], pass_fds=[], capture_output=True)
print(json.dumps({"reward": float(found["api_key"] == "full"), "tool_failed": left.returncode}))
"""


async def test_agent_reads_its_own_url_and_its_tools_do_not(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(READS_CHANNEL)
    config = AgentConfig(command=[sys.executable, f"{tmp_path}/agent.py"], posts="own")
    assert await make_agent(config)(TASK, OPEN) == {"reward": 1.0, "tool_failed": 1}


TOOLS_LOOK = """
import json, os, subprocess, sys

def run(task, llm):
    shell = "printenv; cat; for fd in 3 4 5 6 7 8 9; do echo 1e9 >&$fd; done"
    seen = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, close_fds=False)
    told = seen.stdout
    assert "LIGHTNING_TASK" not in told and "gold" not in told and "1 + 1?" not in told
    return {
        "reward": 1.0,
        "answer": task["answer"],
        "is_own": float(llm.base_url.endswith("r~full/v1") and llm.api_key == "full"),
        "calls_only": float(llm.calls_only().base_url == llm.calls_url),
        "tool_has_own": float("r~full" in told),
    }
"""


@pytest.mark.parametrize(("llm", "tool_has_own"), [(OPEN, 1.0), (JUDGED, 0.0)])
async def test_tools_of_a_function_elsewhere_get_neither_task_nor_result(
    tmp_path: Path, llm: LLM, tool_has_own: float
) -> None:
    (tmp_path / "agent.py").write_text(TOOLS_LOOK)
    config = AgentConfig(f"{tmp_path}/agent.py:run", python=sys.executable)
    assert await make_agent(config)(TASK, llm) == {
        **{"reward": 1.0, "answer": 2, "is_own": 1.0, "calls_only": 1.0},
        "tool_has_own": tool_has_own,
    }
