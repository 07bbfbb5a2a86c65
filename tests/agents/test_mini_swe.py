"""Tests of mini-swe-agent with our prompts for a small model, where it is installed."""

import shutil
from pathlib import Path

import pytest
from file_tasks import load_files
from scripted_server import serving

from lightning_jax.environments import harbor
from lightning_jax.types import LLM

CONFIG = Path(__file__).parents[2] / "agents/mini_swe/small.yaml"
ENV = ["MSWEA_CONFIGURED=true", "LITELLM_LOCAL_MODEL_COST_MAP=True"]


@pytest.fixture
def command() -> list[str]:
    pytest.importorskip("minisweagent")
    program = shutil.which("mini")
    if program is None:
        pytest.skip("the command mini is not on the PATH")
    return [program, "-y", "--exit-immediately", "-t", "{instruction}", "-c", str(CONFIG)]


@pytest.mark.slow  # the agent imports for seconds
async def test_it_solves_a_task_in_the_sandbox(command: list[str], tmp_path: Path) -> None:
    (task, *_), _ = load_files(tmp_path, "train", tmp_path, size=2)
    *_, word, _, path = task["instruction"].rstrip(".").split()
    replies = ["no command", f"So:\n```bash\necho {word} > {path}\n```"]
    async with serving(replies) as server:
        llm = LLM(server.base_url, server.api_key, server.model)
        found = await harbor.run(task, llm, command=command, env=ENV)
    assert found == {"reward": 1.0, "agent_in_time": 1.0}
    first, second = (body["messages"] for body in server.bodies)
    assert first[1]["content"] == task["instruction"]
    assert [message["role"] for message in second] == ["system", "user", "user"]  # no bad reply
