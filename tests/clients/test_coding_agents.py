"""Coding agents of the command line, unmodified, on a task of their templates.

Run with `python tests/clients/run.py coding_agents`. The policy writes a plan: it reads a file,
edits it, runs a command and says that it is done.
"""

# pyright: reportMissingImports=false
# tests/gateway is on the path only when this runs.

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
sys.path += map(str, (TESTS, TESTS / "gateway"))

from planned_engine import PlannedEngine  # noqa: E402
from templates import QWEN25  # noqa: E402

from lightning_jax.cli.catalog import STARTER  # noqa: E402
from lightning_jax.cli.main import main  # noqa: E402
from lightning_jax.environments import harbor, sandbox  # noqa: E402
from lightning_jax.gateway.app import Gateway, RolloutSettings  # noqa: E402
from lightning_jax.gateway.calls.routing import Routing  # noqa: E402
from lightning_jax.models.tokenizer import Tokenizer  # noqa: E402
from lightning_jax.settings import load_config  # noqa: E402
from lightning_jax.testing.tiny import tiny_tokenizer  # noqa: E402
from lightning_jax.traces import attributes  # noqa: E402
from lightning_jax.traces.store import Store  # noqa: E402
from lightning_jax.traces.tree import is_gateway_call  # noqa: E402
from lightning_jax.train.config import Config  # noqa: E402
from lightning_jax.types import Span  # noqa: E402

pytestmark = pytest.mark.clients

PACKAGES = json.loads((Path(__file__).parent / "npm-coding_agents.json").read_text())
TASK = "train/002"  # replaces a word in a file
# Calls that solve it; OLD and NEW are the words, FILE is the file.
SHOW = "cat FILE; tty"
EDIT = {"old_string": "OLD", "new_string": "NEW"}
PLANS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "claude-code": [
        ("Read", {"file_path": "FILE"}),
        ("Edit", {"file_path": "FILE", **EDIT}),
        ("Bash", {"command": SHOW}),
    ],
    "codex": [
        ("exec_command", {"cmd": "sed -i s/OLD/NEW/ FILE"}),
        ("exec_command", {"cmd": SHOW, "tty": True}),
    ],
    "gemini-cli": [
        ("read_file", {"file_path": "FILE"}),
        ("replace", {"file_path": "FILE", **EDIT, "instruction": "Replace the word."}),
        ("run_shell_command", {"command": SHOW}),
    ],
    "opencode": [
        ("read", {"filePath": "FILE"}),
        ("edit", {"filePath": "FILE", "oldString": "OLD", "newString": "NEW"}),
        ("bash", {"command": SHOW, "description": "Shows the file"}),
    ],
    "qwen-code": [
        ("read_file", {"file_path": "/app/FILE"}),
        ("edit", {"file_path": "/app/FILE", **EDIT}),
        ("run_shell_command", {"command": SHOW, "is_background": False}),
    ],
}
TERMINALS = ("codex", "qwen-code")  # agents whose shell has one
SIDE_CALLS = {"opencode": {"title"}}


def tokenizer() -> Tokenizer:
    return tiny_tokenizer().with_chat(template=QWEN25)


def plan_of(template: str, instruction: str) -> Callable[[str], str]:
    """Return what the policy writes after a prompt, by the number of results in it."""
    *_, old, _, new, _, file = instruction.rstrip(".").split()
    calls = []
    for name, arguments in PLANS[template]:
        text = json.dumps({"name": name, "arguments": arguments})
        calls.append(text.replace("FILE", file).replace("OLD", old).replace("NEW", new))

    def plan(prompt: str) -> str:
        number = prompt.count("<tool_response>")
        if number >= len(calls) or "<tools>" not in prompt:
            return "The word is replaced."
        return f"I go on.\n<tool_call>\n{calls[number]}\n</tool_call>"

    return plan


@asynccontextmanager
async def serving(folder: Path, plan: Callable[[str], str], config: Config) -> AsyncIterator[Any]:
    with closing(Store(folder / "planned.sqlite")) as store:
        engine = PlannedEngine(plan, tokenizer(), max_len=400_000)
        async with Gateway(engine, store, routing=Routing(config.roles)) as gateway:
            yield gateway


@pytest.fixture(params=PLANS)
def template(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A template, in whose folder the test runs."""
    folder = tmp_path / "mine"
    assert main(["new", str(folder), "--template", request.param]) == 0
    monkeypatch.chdir(folder)
    yield request.param


def test_versions_are_those_of_the_templates() -> None:
    lines = [
        line
        for name in PLANS
        for line in load_config(Config, [str(STARTER / name / "config.yaml")])
        .agent.options["programs"]
        .values()
    ]
    pinned = {f"{name}@{version}" for name, version in PACKAGES["dependencies"].items()}
    assert {line.split()[-1] for line in lines} == pinned


def test_agent_solves_a_task_in_the_sandbox(template: str, tmp_path: Path) -> None:
    config = load_config(Config, ["config.yaml"])
    tasks, _ = harbor.load("tasks", "train", tmp_path)
    task = next(task for task in tasks if task["id"] == TASK)

    async def solve() -> tuple[dict[str, Any], list[Span], list[str]]:
        async with serving(tmp_path, plan_of(template, task["instruction"]), config) as gateway:
            llm = gateway.open_rollout(RolloutSettings("r1", 7))
            result = await harbor.run(task, llm, **config.agent.options)
            spans = [span for span in gateway.store.spans("r1") if is_gateway_call(span)]
            ids = [span.attributes[attributes.PROMPT_TOKEN_IDS] for span in spans]
            return result, spans, list(map(gateway.engine.tokenizer.decode, ids))

    result, spans, prompts = asyncio.run(solve())
    assert result == {"reward": 1.0, "agent_in_time": 1.0}
    roles = [span.attributes[attributes.ROLE] for span in spans]
    assert {*roles} == {"agent", *SIDE_CALLS.get(template, ())}
    assert roles.count("agent") == len(PLANS[template]) + 1
    assert [span.attributes[attributes.TRAINS] for span in spans] == [r == "agent" for r in roles]
    assert not any(span.attributes[attributes.PREFIX_BREAKS] for span in spans)
    if template in TERMINALS and not sandbox.namespace_error():
        assert "/dev/pts/" in prompts[-1]


def test_try_runs_the_template(template: str, tmp_path: Path) -> None:
    config = load_config(Config, ["config.yaml"])
    instruction = Path("tasks", TASK, "instruction.md").read_text().strip()
    record = tmp_path / "tried.sqlite"

    async def attempt() -> int:
        async with serving(tmp_path, plan_of(template, instruction), config) as gateway:
            words = ["--url", f"{gateway.url}/v1", "--api-key", "right-key", "--model", "policy"]
            words += ["--task", TASK, "--record", str(record)]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "lightning_jax", "try"), *words
            )
            return await process.wait()

    assert asyncio.run(attempt()) == 0
    with closing(Store(record)) as store:
        (rollout,) = store.rollouts()
    assert (rollout.status, rollout.reward) == ("scored", 1.0)
