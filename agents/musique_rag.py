"""Question-answering agent that searches paragraphs several times, then answers.

This is an ordinary program on the OpenAI Agents SDK, with its default model class, for any server
with OpenAI's Responses API. It has no code for training. Like in MuSiQue (Trivedi et al., TACL
2022), a question needs several facts, each from a different paragraph, so a search shows no
paragraph twice. The agent and its reward follow arXiv 2508.03680.

    python agents/paragraph_search.py --corpus corpus.jsonl.gz --index runs/index --port 8100
    python agents/musique_rag.py --base-url http://127.0.0.1:8000/v1 \\
        --search-url http://127.0.0.1:8100 --question "..."

A task is a dict with `id`, `question`, `answer`, `answer_aliases`, `supporting` (pids of the
paragraphs that hold the facts) and `search_url`. A demonstration also needs `decomposition`. It
lists for each fact, in order, `question` (with `#1` for the first answer), `answer` and `paragraph`
(pid, title, text).
"""

import argparse
import asyncio
import json
import logging
import re
import ssl
import sys
import urllib.request
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai

try:
    from agents import (
        Agent,
        AgentsException,
        ModelSettings,
        OpenAIResponsesModel,
        RunConfig,
        RunContextWrapper,
        Runner,
        UserError,
        function_tool,
    )
except ImportError as error:  # without the SDK, `agents` may be this directory
    raise ImportError(
        "agents/musique_rag.py needs openai-agents; install the extra: "
        "pip install 'lightning-jax[musique]'"
    ) from error

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from answer_score import score

MAX_SEARCHES = 6
MAX_TOKENS = 80  # per reply; a longer one ends the run with ModelBehaviorError
SEARCH_TIMEOUT_S = 20.0

SYSTEM = (
    "Answer the question. Search for one fact after the other. "
    "Then reply <answer>a few words</answer> and nothing else."
)
NOTHING_FOUND = "Nothing found."
NO_MORE = "No more searches. Reply with the answer."
ANSWER = "\nQuestion: {}\nReply with the shortest answer, between <answer> and </answer>."
logging.getLogger("openai.agents").setLevel(logging.CRITICAL)  # failures are also raised
ONE_CALL = ModelSettings(tool_choice="required", parallel_tool_calls=False)
QUIET = RunConfig(tracing_disabled=True)  # send nothing to OpenAI, regardless of the environment

Task = dict[str, Any]
Message = dict[str, Any]
Paragraph = dict[str, Any]  # pid, title, text


@dataclass
class Library:
    """Search service and the paragraphs found so far."""

    search_url: str
    session: aiohttp.ClientSession
    num_searches: int = 0
    texts: list[str] = field(default_factory=list)  # results
    seen: set[str] = field(default_factory=set)  # pids

    async def find(self, query: str) -> str:
        """Return the text that the model gets for a query: paragraphs that it has not seen.

        Raises ConnectionError if the search service does not answer.
        """
        if self.num_searches >= MAX_SEARCHES:
            return NO_MORE
        self.num_searches += 1
        try:
            async with self.session.post(
                f"{self.search_url}/search", json={"query": query, "without": sorted(self.seen)}
            ) as response:
                response.raise_for_status()
                paragraphs = (await response.json())["paragraphs"]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            # Not the agent's fault: a built-in ConnectionError counts as infrastructure.
            raise ConnectionError(
                f"the search at {self.search_url} gave no answer ({type(error).__name__}: {error})"
            ) from error
        self.seen |= _pids(paragraphs)
        self.texts.append(show(paragraphs))
        return self.texts[-1]


def show(paragraphs: Sequence[Paragraph]) -> str:
    """Format paragraphs for the model, one per line."""
    lines = [
        f"{paragraph['title']}: {' '.join(paragraph['text'].split())}" for paragraph in paragraphs
    ]
    return "\n".join(lines) or NOTHING_FOUND


def _on_failure(_: RunContextWrapper[Any], error: Exception) -> str:
    """Return the message for a call with wrong arguments. Raise it again if the search is down."""
    if isinstance(error, ConnectionError):
        raise error
    return 'Error: expected {"query": "..."}.'


@function_tool(failure_error_function=_on_failure)
async def search(context: RunContextWrapper[Library], query: str) -> str:
    """Find paragraphs of an encyclopedia."""
    return await context.context.find(query)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # takes 20 ms, so all clients share one


@dataclass(frozen=True)
class Answered:
    """Last reply, number of searches, and the pids of the paragraphs found."""

    reply: str
    num_searches: int
    seen: frozenset[str]
    items: list[Any]  # the conversation in the SDK's form


async def answer(
    task: Task,
    llm: Any,
    *,
    max_tokens: int = MAX_TOKENS,
    rounds: int | None = None,
) -> Answered:
    """Answer `question` with searches at `search_url`. `llm` has base_url, api_key and model.

    If `llm` has a prompt `ask`, that stands after the question. `rounds` is the number of searches
    that the model must make; by default it decides. With `rounds`, each request repeats the
    question after the results so far, and a second agent writes the answer.

    Raises ValueError for `rounds` outside 1 to MAX_SEARCHES, AgentsException if the model's replies
    cannot be used, ConnectionError if the search is down, and openai.OpenAIError if the model's
    server fails.
    """
    if rounds is not None and not 1 <= rounds <= MAX_SEARCHES:
        raise ValueError(f"rounds is {rounds}; expected 1 to {MAX_SEARCHES}.")
    timeout = aiohttp.ClientTimeout(total=SEARCH_TIMEOUT_S)
    async with (
        openai.DefaultAsyncHttpxClient(verify=_tls()) as http,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, http_client=http)
        library = Library(task["search_url"].rstrip("/"), session)
        settings = ModelSettings(max_tokens=max_tokens)
        agent = Agent[Library](
            name="researcher",
            instructions=SYSTEM,
            tools=[search],
            model=OpenAIResponsesModel(model=llm.model, openai_client=client),
            model_settings=settings,
        )
        options: dict[str, Any] = {
            "context": library,
            "max_turns": MAX_SEARCHES + 2,  # one over the limit, one for the answer
            "run_config": QUIET,
        }
        ask = getattr(llm, "prompts", {}).get("ask", "")
        question = f"{task['question']}\n{ask}" if ask else task["question"]
        try:
            if rounds is not None:
                searcher = agent.clone(
                    model_settings=settings.resolve(ONE_CALL),
                    tool_use_behavior="stop_on_first_tool",
                )
                for _ in range(rounds):
                    await Runner.run(searcher, "\n".join([*library.texts, question]), **options)
                agent = agent.clone(name="reader", instructions=None, tools=[])
                question = "\n".join([*library.texts, ANSWER.format(task["question"])])
            result = await Runner.run(agent, question, **options)
        except UserError as error:  # the SDK wraps a tool's exceptions in this
            if isinstance(error.__cause__, ConnectionError):
                raise error.__cause__ from None
            raise
    return Answered(
        str(result.final_output),
        library.num_searches,
        frozenset(library.seen),
        result.to_input_list(),
    )


async def run(
    task: Task,
    llm: Any,
    *,
    max_tokens: int = MAX_TOKENS,
    rounds: int | None = None,
) -> dict[str, float]:
    """Return one rollout's `reward`, 0.9 * F1 + 0.1 * format, and metrics worth plotting.

    `em`, `f1` and `format` are parts of the reward. `recall` is the share of supporting paragraphs
    that the searches found. See `answer`.
    """
    answered = await answer(task, llm, max_tokens=max_tokens, rounds=rounds)
    supporting = set(task["supporting"])
    return score(answered.reply, task["answer"], task["answer_aliases"]) | {
        "searches": float(answered.num_searches),
        "recall": len(supporting & answered.seen) / max(len(supporting), 1),
    }


def recall_of_attempt(task: Task, attempt: Any) -> float:
    """Return the `recall` of a stored rollout, as a component of `rewards`."""
    return attempt.metrics["recall"]


# ---- Demonstrations ----------------------------------------------------------------------------


def demonstrate(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return demonstrations: a search for each fact, then the answer.

    Each is a dict of `messages` and `tools` in OpenAI's chat form. The tasks' search service runs
    the queries. If it misses a paragraph, that paragraph replaces the last result. Raises
    ConnectionError if the search is down.
    """
    return [{"messages": _conversation(task), "tools": [offered()]} for task in tasks]


def offered() -> dict[str, Any]:
    """Return the tool as a chat request would offer it."""
    function = {
        "name": search.name,
        "description": search.description,
        "parameters": search.params_json_schema,
    }
    return {"type": "function", "function": function}


def _conversation(task: Task) -> list[Message]:
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    seen: set[str] = set()
    for number, query in enumerate(queries(task["decomposition"])):
        function = {"name": search.name, "arguments": json.dumps({"query": query})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        gold = task["decomposition"][number]["paragraph"]
        results = _find(task["search_url"], query, seen)
        if gold["pid"] not in seen | _pids(results):
            results = [*results[:-1], gold]
        seen |= _pids(results)
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": show(results)},
        ]
    return [*messages, {"role": "assistant", "content": f"<answer>{task['answer']}</answer>"}]


def queries(decomposition: Sequence[dict[str, Any]]) -> list[str]:
    """Return the question of each fact, with references such as `#1` replaced by those answers."""
    answers = [step["answer"] for step in decomposition]

    def known(match: re.Match[str]) -> str:
        number = int(match[1])
        return answers[number - 1] if 1 <= number <= len(answers) else match[0]

    return [
        " ".join(re.sub(r"#(\d+)", known, step["question"]).replace(">>", " ").split())
        for step in decomposition
    ]


def _pids(paragraphs: Sequence[Paragraph]) -> set[str]:
    return {paragraph["pid"] for paragraph in paragraphs}


def _find(search_url: str, query: str, without: Collection[str]) -> list[Paragraph]:
    request = urllib.request.Request(
        f"{search_url.rstrip('/')}/search",
        json.dumps({"query": query, "without": sorted(without)}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=SEARCH_TIMEOUT_S) as response:
            return json.load(response)["paragraphs"]
    except (OSError, ValueError, LookupError) as error:
        raise ConnectionError(f"the search at {search_url} gave no answer ({error})") from error


# ---- Command line ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer a question from paragraphs.")
    parser.add_argument(
        "--base-url", required=True, help="base URL of a server with OpenAI's /v1/responses"
    )
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--search-url", required=True, help="of agents/paragraph_search.py")
    parser.add_argument("--question", required=True)
    args = parser.parse_args()
    task = {"question": args.question, "search_url": args.search_url}
    llm = SimpleNamespace(base_url=args.base_url, api_key=args.api_key, model=args.model)
    try:
        answered = asyncio.run(answer(task, llm))
    except (openai.OpenAIError, AgentsException, ConnectionError) as error:
        parser.exit(1, f"no answer: {type(error).__name__}: {error}\n")
    for item in answered.items:
        if item.get("type") == "function_call":
            print(f"[search] {item['arguments']}")
        elif item.get("type") == "function_call_output":
            print(f"[found] {item['output']}")
    print(f"\n{answered.reply}")


if __name__ == "__main__":
    main()
