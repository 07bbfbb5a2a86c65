"""Tasks that a model drafts for the tools of an MCP server.

The model writes the arguments of a call. If the server answers them without an error, the model
writes the request of a user that the call answers. Both parts follow JSON schemas.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import openai

from lightning_jax.environments.mcp import ServerBroken, open_server
from lightning_jax.types import LLM, Task

MAX_TOKENS = 200  # of an answer of the model
MAX_VALUE_CHARS = 120  # of a text among the arguments
MAX_REQUEST_CHARS = 160
MAX_SHOWN_CHARS = 2000  # of a schema or a result in a prompt
NUM_TRIES = 4  # of the arguments of a call
ARGUMENTS_TEMPERATURE = 1.0  # for many values
REQUEST_TEMPERATURE = 0.7  # a small model writes nonsense at 1
SYSTEM = "You write test data for tools. Reply with JSON only."
REQUEST_SCHEMA = {
    "type": "object",
    "properties": {"request": {"type": "string", "minLength": 8, "maxLength": MAX_REQUEST_CHARS}},
    "required": ["request"],
    "additionalProperties": False,
}


def _arguments_question(schema: Mapping[str, Any]) -> str:
    text = json.dumps(schema)[:MAX_SHOWN_CHARS]
    return f"Its arguments: {text}\nWrite the arguments of one realistic call."


def _request_question(arguments: Mapping[str, Any], result: str) -> str:
    call = f"It was called with {json.dumps(arguments, ensure_ascii=False)}\n"
    call += f"It returned: {result[:MAX_SHOWN_CHARS]}\n"
    return f"{call}Write the question of a user that this call answers, in one sentence."


# A small model sees from it what to write. For arguments, it would repeat an example's values.
REQUEST_EXAMPLE = (
    "The tool get_weather: Return the weather of a city.\n"
    + _request_question({"city": "Lima"}, "18 degrees and clouds"),
    '{"request": "How warm is it in Lima now?"}',
)


@dataclass(frozen=True)
class Draft:
    """Request of a user, the call that answers it, and what the server answered."""

    request: str
    tool: str
    arguments: Mapping[str, Any]
    result: str


@dataclass
class Drafter:
    """Agent that drafts a task in each rollout, and keeps those whose call works."""

    command: str
    functions: Sequence[Mapping[str, Any]]  # see `Server.functions`
    drafts: list[Draft] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)  # by the reason

    def tasks(self, number: int) -> list[Task]:
        """Return what to run the agent on: each function in turn."""
        names = [function["function"]["name"] for function in self.functions]
        return [
            {"id": f"draft-{index:03d}", "tool": names[index % len(names)]}
            for index in range(number)
        ]

    async def run(self, task: Task, llm: LLM) -> float:
        """Return 1 if the task of this rollout is usable, else 0.

        Raises an error if the model did not answer or the server did not start.
        """
        reason = await self._draft(task["tool"], llm)
        self.left_out[reason] += bool(reason)
        return float(not reason)

    async def _draft(self, name: str, llm: LLM) -> str:
        """Keep a new draft, or return why there is none."""
        functions = (function["function"] for function in self.functions)
        function = next(function for function in functions if function["name"] == name)
        about = f"The tool {name}: {function['description'][:MAX_SHOWN_CHARS]}\n"
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            call = await self._call(
                client, llm.model, name, about, _bounded(function["parameters"])
            )
            if isinstance(call, str):
                return call
            arguments, result = call
            texts = [*REQUEST_EXAMPLE, f"{about}{_request_question(arguments, result)}"]
            answer = await _ask(client, llm.model, texts, REQUEST_SCHEMA, REQUEST_TEMPERATURE)
        text = answer.get("request") if answer else None
        if not isinstance(text, str) or not text.strip():
            return "no_request"
        draft = Draft(complete(text, arguments), name, arguments, result)
        if self._has(name, arguments) or draft in self.drafts:  # of a rollout that ran beside it
            return "repeated"
        self.drafts.append(draft)
        return ""

    async def _call(
        self,
        client: openai.AsyncOpenAI,
        model: str,
        name: str,
        about: str,
        schema: Mapping[str, Any],
    ) -> tuple[dict[str, Any], str] | str:
        """Return the arguments and the result of a call that works, or why there is none.

        The model tries again, and reads what was wrong. It does not read its own mistakes, because
        a small model repeats them.
        """
        question = f"{about}{_arguments_question(schema)}"
        reason, refusal = "", ""
        async with open_server(self.command) as server:
            for _ in range(NUM_TRIES):
                arguments = await _ask(
                    client, model, [question + refusal], schema, ARGUMENTS_TEMPERATURE
                )
                if arguments is None:
                    reason, refusal = "no_json", ""
                elif self._has(name, arguments):
                    reason = "repeated"
                    refusal = f" Use others than {json.dumps(arguments, ensure_ascii=False)}."
                else:
                    try:
                        result = await server.call(name, arguments)
                    except ServerBroken:
                        return "broke_the_server"
                    if not result.is_error:
                        return arguments, result.text
                    reason = "refused_by_the_tool"
                    refusal = f" Other arguments were refused: {result.text[:MAX_SHOWN_CHARS]}"
        return reason

    def _has(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether a draft has this call. Calls without arguments do not count."""
        calls = ((draft.tool, draft.arguments) for draft in self.drafts)
        return bool(arguments) and (name, arguments) in calls


def as_tasks(drafts: Sequence[Draft]) -> list[Task]:
    """Return the lines of a file of tasks."""
    return [{"id": f"task-{index:03d}", **asdict(draft)} for index, draft in enumerate(drafts)]


def complete(request: str, arguments: Mapping[str, Any]) -> str:
    """Return a request with the arguments that it does not name in brackets after it."""
    request = " ".join(request.split())[:MAX_REQUEST_CHARS]
    missing = [
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in arguments.items()
        if str(value).lower() not in request.lower()
    ]
    return f"{request} ({', '.join(missing)})" if missing else request


def _bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without unnamed arguments, whose texts end."""
    properties = schema.get("properties")
    bounded = {
        name: {"maxLength": MAX_VALUE_CHARS, **value} if _is_free_text(value) else value
        for name, value in (properties if isinstance(properties, dict) else {}).items()
    }
    return {"type": "object", "additionalProperties": False, **schema, "properties": bounded}


def _is_free_text(schema: Any) -> bool:
    has_bound = isinstance(schema, dict) and {"enum", "const", "format", "pattern"} & {*schema}
    return isinstance(schema, dict) and schema.get("type") == "string" and not has_bound


async def _ask(
    client: openai.AsyncOpenAI,
    model: str,
    texts: Sequence[str],
    schema: Mapping[str, Any],
    temperature: float,
) -> dict[str, Any] | None:
    """Return the object that a model writes, or None. A server may know no schema, or temperature.

    `texts` are a question, its answer, and so on.
    """
    messages: Any = [{"role": "system", "content": SYSTEM}]
    messages += [
        {"role": "assistant" if index % 2 else "user", "content": text}
        for index, text in enumerate(texts)
    ]
    create = client.chat.completions.create
    form: Any = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    try:
        completion = await create(
            model=model,
            messages=messages,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            response_format=form,
        )
    except openai.BadRequestError:
        completion = await create(model=model, messages=messages, max_tokens=MAX_TOKENS)
    text = completion.choices[0].message.content or ""
    try:
        value = json.loads(text[text.find("{") : text.rfind("}") + 1])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
