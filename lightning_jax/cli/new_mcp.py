"""Directory of an MCP server: its tools, an agent that uses them, and tasks that a model drafts."""

import asyncio
import json
import math
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_jax.cli.catalog import STARTER, Settings, copy_template, with_settings
from lightning_jax.cli.runtime import keep_compiled, stop_on_sigterm
from lightning_jax.environments.drafts import Draft, Drafter, as_tasks
from lightning_jax.environments.mcp import ServerBroken, open_server
from lightning_jax.errors import UserError
from lightning_jax.system.text import printable

TEMPLATE = "mcp"
KEY = "OPENAI_API_KEY"
CHARS_PER_TOKEN = 3  # of JSON, at least
MIN_TASKS = 2  # one to train on and one for evaluation
MAX_RESULT_CHARS = 400  # of the example in the prompt


@dataclass(frozen=True)
class Drafts:
    """Who drafts the tasks of a server, and how many it tries."""

    command: str
    number: int
    url: str | None = None  # of a server; by default the policy drafts
    model: str | None = None  # of the server, or the policy's


def create(folder: Path, drafts: Drafts) -> None:
    """Write the directory.

    Raises UserError for a server that does not work, or without drafts that can be trained on. In
    the second case the directory is there, and lacks tasks.
    """
    functions = list_tools(drafts.command)
    for function in functions:
        line = function["function"]["description"].strip().partition("\n")[0]
        print(printable(f"tool {function['function']['name']}: {line}"))
    settings = settings_of(drafts, functions)
    drafter = Drafter(drafts.command, functions)
    if drafts.number:
        run_drafter(drafter, drafts, settings)
    copy_template(TEMPLATE, folder)
    config = folder / "config.yaml"
    config.write_text(with_settings(config.read_text(), settings))
    lines = [json.dumps(task, ensure_ascii=False) for task in as_tasks(drafter.drafts)]
    (folder / "tasks.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if drafter.drafts:
        example = json.dumps(example_of(drafter.drafts[0]), indent=2, ensure_ascii=False)
        (folder / "example.json").write_text(f"{example}\n")
    reasons = ", ".join(
        f"{number} {reason}" for reason, number in drafter.left_out.items() if number
    )
    left_out = f" (left out: {reasons})" if reasons else ""
    print(f"{len(lines)} tasks of {drafts.number} drafts{left_out}")
    if len(lines) < MIN_TASKS:
        raise UserError.empty(
            "tasks.jsonl",
            f"{folder / 'tasks.jsonl'} has {len(lines)} tasks, too few to train on; add lines with "
            "a request, or make another directory with a better model (--url and --model).",
        )


def list_tools(command: str) -> list[dict[str, Any]]:
    """Return the tools of a server as functions. Raises UserError."""

    async def listed() -> list[dict[str, Any]]:
        async with open_server(command) as server:
            return server.functions

    try:
        functions = asyncio.run(listed())
    except ServerBroken as error:
        raise UserError(
            f"the command {command!r} is no usable MCP server: {printable(str(error))}; pass a "
            "command that speaks MCP on its standard input and output.",
            reason="not_usable",
            key="--mcp",
        ) from error
    if not functions:
        raise UserError.empty("--mcp", f"the MCP server {command!r} has no tools; pass another.")
    return functions


def settings_of(drafts: Drafts, functions: Sequence[Any]) -> Settings:
    """Return the lines of config.yaml that depend on the server and on who drafts."""
    num_tokens = len(json.dumps(functions)) / CHARS_PER_TOKEN
    max_len = max(2048, 256 * math.ceil((num_tokens + 1536) / 256))
    settings = {"server": drafts.command, "max_len": max_len}
    if drafts.url is None:
        return settings | ({"name": drafts.model} if drafts.model else {})
    has_key = bool(os.environ.get(KEY))
    judge = {"served_by": drafts.url, "served_model": drafts.model}
    return settings | judge | {"api_key_env": KEY if has_key else None}


def run_drafter(drafter: Drafter, drafts: Drafts, settings: Settings) -> None:
    """Let the policy, or a model behind a URL, draft. Raises UserError if it cannot answer."""
    keep_compiled()
    stop_on_sigterm()

    from lightning_jax.cli.try_agent import run_agent  # imports JAX
    from lightning_jax.gateway.calls.remote import remote_role
    from lightning_jax.rollouts.results.failures import FailureWatch
    from lightning_jax.settings import load_config
    from lightning_jax.traces.store import TemporaryStore
    from lightning_jax.train.config import Config
    from lightning_jax.train.loop.check import check_model
    from lightning_jax.train.loop.inference import PolicySource, open_runner

    config = load_config(
        Config,
        [str(STARTER / TEMPLATE / "config.yaml"), f"serve.max_len={settings['max_len']}"],
    )
    config = replace(config, rewards={}, agent=replace(config.agent, options={}))
    tasks = drafter.tasks(drafts.number)
    if drafts.url is None:
        config = replace(
            config, model=replace(config.model, name=drafts.model or config.model.name)
        )
        check_model(config)
        source = PolicySource()
    else:
        source = PolicySource(server=remote_role(drafts.url, os.environ.get(KEY), drafts.model))
    print(f"{source.label(config)} drafts {drafts.number} tasks", flush=True)
    with closing(TemporaryStore()) as store:
        opened = open_runner(config, source, store, tasks, agent=drafter.run)
        rollouts, _ = asyncio.run(run_agent(opened, tasks, "train", 0, 1))
        FailureWatch(store).observe(rollouts, "the drafts")


def example_of(draft: Draft) -> list[dict[str, Any]]:
    """Return a conversation that solves the request of a draft, for the agent's prompt."""
    arguments = json.dumps(draft.arguments, ensure_ascii=False)
    call = {"name": draft.tool, "arguments": arguments}
    result = draft.result[:MAX_RESULT_CHARS]
    return [
        {"role": "user", "content": draft.request},
        {"role": "assistant", "tool_calls": [{"type": "function", "id": "0", "function": call}]},
        {"role": "tool", "tool_call_id": "0", "content": result},
        {"role": "assistant", "content": " ".join(result.split())},
    ]
