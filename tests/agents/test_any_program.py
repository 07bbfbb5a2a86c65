"""Tests of agents in other languages, started as in a rollout, against a scripted server."""

import shutil
import subprocess
from pathlib import Path

import pytest
from scripted_server import Script, serving
from sum_answers import first_messages

from lightning_jax.rollouts.agents.functions import Agent
from lightning_jax.rollouts.agents.program import make_agent
from lightning_jax.rollouts.config import AgentConfig
from lightning_jax.types import LLM

AGENTS = Path(__file__).parents[2] / "agents"
TASK = {"id": "s0", "question": "What is 17 + 25, \"or\" '\N{LATIN SMALL LETTER A WITH ACUTE}'?"}
TASK_AND_ANSWER = TASK | {"answer": 42}
NODE = shutil.which("node")
COMMANDS = [
    pytest.param(
        ["node", f"{AGENTS}/any_program/ask.mjs"],
        marks=pytest.mark.skipif(NODE is None, reason="there is no node on this machine"),
        id="node",
    ),
    pytest.param(
        ["sh", f"{AGENTS}/any_program/ask.sh"],
        marks=pytest.mark.skipif(
            shutil.which("curl") is None, reason="there is no curl on this machine"
        ),
        id="shell",
    ),
]


def agent_of(command: list[str]) -> Agent:
    score = f"{AGENTS}/sum_answers.py:reward"
    return make_agent(AgentConfig(command=command, reward=score))


def llm_of(server: Script) -> LLM:
    return LLM(server.base_url, server.api_key, server.model)


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_program_asks_and_its_output_is_rewarded(command: list[str]) -> None:
    async with serving(["Answer: 42"]) as server:
        assert await agent_of(command)(TASK_AND_ANSWER, llm_of(server)) == 1.0
    (body,) = server.bodies
    assert body["model"] == "policy"
    assert body["messages"] == first_messages(TASK["question"])
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("command", COMMANDS[:1])
async def test_the_node_program_says_what_is_wrong_once(command: list[str]) -> None:
    async with serving(["It is 42.", "Answer: 41"]) as server:
        assert await agent_of(command)(TASK_AND_ANSWER, llm_of(server)) == 0.1
    assert server.bodies[1]["messages"][4]["content"] == "It is 42."


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_server_that_refuses_is_its_last_word(command: list[str]) -> None:
    async with serving([400]) as server:
        with pytest.raises(Exception, match=r"\d+: .*400") as caught:
            await agent_of(command)(TASK_AND_ANSWER, llm_of(server))
        assert type(caught.value).__name__ == "ExitStatus"


@pytest.mark.parametrize("command", COMMANDS)
def test_it_says_how_it_is_used(command: list[str]) -> None:
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "OPENAI_BASE_URL=URL" in shown.stdout
