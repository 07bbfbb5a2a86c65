"""Task, URL and key of a rollout as far as an agent that is a program gets them.

The policy steers a program's tools, and they inherit what the program got. Where something else
gives the reward, a program gets neither the answer nor a URL at which posted rewards count.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_jax.rollouts.config import MAX_VARIABLE, AgentConfig
from lightning_jax.traces.config import ENDPOINTS
from lightning_jax.traces.context import trace_headers
from lightning_jax.types import LLM, Task

REPORT_FD = "LIGHTNING_REPORT_FD"
# Names of fields that by convention hold what only a reward reads.
_KINDS = "answers?|solutions?|gold|golden|ground_?truths?|labels?|targets?|expected"
_FORMS = "texts?|values?|code|sql|outputs?|index|key|ids?"
ANSWERS = re.compile(
    rf"(.*_)?({_KINDS})(_({_FORMS}))?|(unit_)?tests?|test_(cases?|list)|rewards?", re.IGNORECASE
)


def is_judged(config: AgentConfig, llm: LLM) -> bool:
    """Return whether something other than the program gives the reward."""
    return config.reward is not None or llm.is_judged


def visible_task(task: Task, config: AgentConfig, llm: LLM) -> Task:
    """Return the fields of a task that a command gets."""
    if config.task_fields is not None:
        return {name: task[name] for name in ("id", *config.task_fields) if name in task}
    return _without_answers(task) if is_judged(config, llm) else task


def visible_llm(config: AgentConfig, llm: LLM) -> LLM:
    """Return the settings that a program and its tools find in their environment."""
    is_open = config.posts == "all" or (config.posts == "auto" and not is_judged(config, llm))
    return llm if is_open else llm.calls_only()


@contextmanager
def report_channel(llm: LLM) -> Iterator[int]:
    """Yield a descriptor with the URLs and keys of a rollout as JSON, which can be read once.

    An agent reads it when it starts. Then nothing is left for its tools.
    """
    reader, writer = os.pipe()
    try:
        names = ("base_url", "api_key", "calls_url", "calls_key")
        with os.fdopen(writer, "w") as file:
            file.write(json.dumps({name: getattr(llm, name) for name in names}))
        yield reader
    finally:
        os.close(reader)


def program_environment(
    llm: LLM, outer: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the variables of a program: those of its rollout, and the `outer` ones.

    An OTLP exporter that the outer ones name stays, and the rollout does not get its spans.
    """
    root = llm.base_url.removesuffix("/v1")  # other clients than OpenAI's append a path
    of_spans = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{root}/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    return {
        **outer,
        "OPENAI_BASE_URL": llm.base_url,
        "OPENAI_API_KEY": llm.api_key,
        "OPENAI_MODEL": llm.model,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": llm.api_key,
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": llm.api_key,
        "OLLAMA_HOST": root,
        **({} if outer.keys() & ENDPOINTS else of_spans),
        "LIGHTNING_OPTIONS": json.dumps(options or {}),
        "LIGHTNING_PROMPTS": json.dumps(llm.prompts),
        **trace_headers(),
    }


def task_variable(task: Task) -> dict[str, str]:
    """Return the variable with the task, or none if the task is longer than a variable may be."""
    text = json.dumps(task)
    is_short = len("LIGHTNING_TASK=") + len(text) < MAX_VARIABLE
    return {"LIGHTNING_TASK": text} if is_short else {}


def _without_answers(value: Any) -> Any:
    """Return a value without the fields of mappings that are named like answers, at any depth."""
    if isinstance(value, Mapping):
        return {
            name: _without_answers(item)
            for name, item in value.items()
            if not (isinstance(name, str) and ANSWERS.fullmatch(name))
        }
    if isinstance(value, list | tuple):
        return [_without_answers(item) for item in value]
    return value
