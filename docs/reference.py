"""Write the pages of docs/reference, and others such as settings.md, from the code.

python docs/reference.py
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

import yaml
from pydantic import BaseModel

import lightning_jax as lj
import lightning_jax.types
from lightning_jax.cli.main import COMMANDS, parser_of
from lightning_jax.cli.reference import settings_page
from lightning_jax.gateway.dialects import all as dialects
from lightning_jax.gateway.dialects import anthropic, ollama, openai_chat, openai_completions
from lightning_jax.gateway.dialects.base import Dialect
from lightning_jax.gateway.dialects.gemini import input as gemini
from lightning_jax.gateway.dialects.openai_responses import dialect as responses
from lightning_jax.gateway.dialects.unknown_fields import BINDING
from lightning_jax.gateway.metrics import COUNTERS
from lightning_jax.traces import attributes
from lightning_jax.train.loop import trainer
from lightning_jax.train.watch.curves import DESCRIPTIONS, metric_descriptions

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "lightning_jax"
NOTE = "`python docs/reference.py` writes this page.\n"


def pages() -> dict[str, str]:
    """Return the text of each generated page by its path in docs/."""
    return {
        "settings.md": settings_page(),
        "get_started/troubleshooting.md": troubleshooting(),
        "python_api.md": python_api(),
        "reference/command_line.md": command_line(),
        "reference/metrics.md": metrics(),
        "reference/span_attributes.md": span_attributes(),
        "reference/failures.md": failures(),
        "reference/client_apis.md": client_apis(),
    }


def python_api() -> str:
    """Return the page of the package's public names."""
    text = (
        "# Python API\n\n"
        "    import lightning_jax as lj\n\n"
        "`lj` has the names below. Each one loads its module when it is first used. The\n"
        "[README](../README.md#your-own-loop) puts them together to a training loop.\n"
        f"`help(lj.Engine)` has the arguments. {NOTE}\n"
    )
    rows = []
    for name in lj.__all__:
        value = trainer.train if name == "train" else getattr(lj, name)
        words = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        if isinstance(value, GenericAlias):
            value, words = lj.types, f"Another name for `{value}`."
        module = value if inspect.ismodule(value) else sys.modules[value.__module__]
        path = Path(str(module.__file__)).relative_to(PACKAGE)
        rows.append((f"`{name}`", words, f"[{path}](../{PACKAGE.name}/{path})"))
    return text + _table(("name", "what it is", "defined in"), rows)


def command_line() -> str:
    """Return the page of all commands and their arguments."""
    text = "# Command line\n\n    lightning-jax COMMAND --help\n\n" + NOTE + "\n"
    text += _table(
        ("command", "what it does"),
        [(f"[`{name}`](#lightning-jax-{name})", line) for name, (*_, line) in COMMANDS.items()],
    )
    for name in COMMANDS:
        parser = parser_of(name)
        formatter = parser._get_formatter()
        words = [_flag(action).strip("`") for action in parser._actions if _is_shown(action)]
        text += (
            f"\n## `lightning-jax {name}`\n\n    {' '.join(['lightning-jax', name, *words])}\n\n"
        )
        text += inspect.cleandoc(parser.description or "") + "\n"
        rows = [
            (_flag(action), formatter._expand_help(action) if action.help else "")
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        text += "\n" + _table(("argument", "meaning"), rows) if rows else ""
    return text


def _is_shown(action: argparse.Action) -> bool:
    return action.required and action.nargs != "*"


def _flag(action: argparse.Action) -> str:
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    value = value[0] if isinstance(value, tuple) else value
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    names = action.option_strings or [""]
    return f"`{' '.join(filter(None, (names[0], value)))}`"


def metrics() -> str:
    """Return the page of the metrics that a run and a server write."""
    text = (
        "# Metrics\n\n"
        "    python -m json.tool --json-lines runs/first/metrics.jsonl\n\n"
        "A run appends one JSON object per step to `metrics.jsonl`. A metric that has no value in\n"
        "a step is missing. NAME and REASON stand for any name and reason.\n\n"
        f"{NOTE}\n"
        "A suffix narrows a metric: `/agent=NAME` to a sub-agent, `/policy=NAME` to a policy, and\n"
        "in `eval/` the field of `eval.by`, such as `/source=svamp`, to tasks with that value. In\n"
        "a warm-up step the metrics of `train/` are called `warmup/`.\n"
    )
    for area, words in yaml.safe_load(DESCRIPTIONS.read_text())["areas"].items():
        rows = [
            (f"`{name}`", *description)
            for name, description in metric_descriptions().items()
            if name.startswith(f"{area}/")
        ]
        text += f"\n## `{area}/`\n\n{words}\n\n" + _table(("metric", "unit", "meaning"), rows)
    text += (
        "\n## Prometheus\n\n"
        "`GET /metrics` of a server has totals since its start: `lightning_calls_total` and\n"
        "`lightning_call_seconds` by client API, `lightning_first_token_seconds`, the counters of\n"
        "the engine, and these.\n\n"
    )
    rows = [(f"`lightning_{name}_total`", words) for name, words in COUNTERS.items()]
    return text + _table(("counter", "meaning"), rows)


def span_attributes() -> str:
    """Return the page of the attributes of spans, from the comments beside their names."""
    lines = inspect.getsource(attributes).splitlines()
    ours, theirs = [], []
    for node in ast.parse("\n".join(lines)).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        value = getattr(attributes, node.targets[0].id)
        if isinstance(value, str) and "." in value:
            comment = lines[(node.end_lineno or node.lineno) - 1].partition("  # ")[2]
            (ours if value.startswith("lightning.") else theirs).append((f"`{value}`", comment))
    return (
        "# Span attributes\n\n"
        "    lightning-jax view RUN ROLLOUT\n\n"
        "The gateway writes one span for each call. Agents may send their own\n"
        "([spans](../traces.md)).\n\n" + NOTE + "\n## Ours\n\n"
        "Attributes that begin with `lightning.` are removed from spans that an agent sends. Ids\n"
        "and log-probabilities are lists with a value for each token; log-probabilities are in\n"
        "nats.\n\n" + _table(("attribute", "meaning"), ours) + "\n## OpenTelemetry's\n\n"
        "Calls also have these attributes of the GenAI and error conventions, and of\n"
        "OpenInference, where they apply.\n\n" + _list([name for name, _ in theirs])
    )


def failures() -> str:
    """Return the page of reasons of failed rollouts and codes of refused calls."""
    text = (
        "# Failure reasons\n\n"
        "    lightning-jax view RUN\n\n"
        "The table at its end groups failed rollouts by reason. [Failures](../concepts/failures.md)"
        f"\nsays how the two kinds differ. {NOTE}\n"
        "## Of a rollout\n\n"
        "Any other reason is the name of the exception that the agent raised, with its message,\n"
        "file and line as the detail. It is the infrastructure's failure if the exception is a\n"
        "connection error of a client library.\n\n"
    )
    reasons = yaml.safe_load((PACKAGE / "rollouts/reasons.yaml").read_text())
    rows = [(f"`{name}`", *texts.values()) for name, texts in reasons.items()]
    text += _table(("reason", "failed by", "what happened", "what to do"), rows)
    text += (
        "\n## Of a call\n\n"
        "The gateway refuses a call in the error format of its client API. Errors of 500 and\n"
        "above are the infrastructure's: if no retry is answered, the whole rollout is tried\n"
        "again.\n\n"
    )
    codes = yaml.safe_load((PACKAGE / "gateway/error_codes.yaml").read_text())
    rows = [
        (str(status), f"`{code}`", words)
        for status, texts in codes.items()
        for code, words in texts.items()
    ]
    return text + _table(("status", "code", "meaning"), rows)


def troubleshooting() -> str:
    """Return the page of what to do if a run does not learn, with where its rows come from."""
    signs = yaml.safe_load((PACKAGE / "cli/commands/troubleshooting.yaml").read_text())
    text = (
        f"# {signs['title']}\n\n{signs['introduction']} "
        "[Metrics](../reference/metrics.md) explains the names.\n"
        f"`lightning-jax help troubleshooting` prints the rows. {NOTE}"
    )
    heads = ("what you see", "what it means", "what to do")
    for title, rows in signs["sections"].items():
        text += f"\n## {title}\n\n" + _table(heads, [tuple(row.values()) for row in rows])
    return text + "\n## Where these rows come from\n\n" + _table(("row", "seen in"), EVIDENCE)


# Runs in which rows of the page were seen.
EVIDENCE = (
    (
        "an example in the prompt",
        "dates: reward of sampled attempts 0.01 without, 0.28 with one "
        "([dates](../results/dates.md))",
    ),
    (
        "warm-up first",
        "SQL: 12 GRPO steps without a warm-up changed nothing ([Spider](../results/spider.md))",
    ),
    (
        "length of the warm-up",
        "word problems: 8 steps left groups equal, 16 made GRPO work "
        "([Calc-X](../results/calcx.md))",
    ),
    (
        "small rewards of calls",
        "SQL with two policies ([Spider](../results/spider.md#two-policies))",
    ),
    ("the same number of calls", "multi-hop questions ([MuSiQue](../results/musique.md))"),
)

# Body classes of each client API; the second holds sampling options.
BODIES: dict[str, tuple[Dialect, tuple[type[BaseModel], ...], ModuleType]] = {
    "OpenAI chat": (dialects.CHAT, (openai_chat.ChatBody,), openai_chat),
    "OpenAI completions": (
        dialects.COMPLETIONS,
        (openai_completions.CompletionsBody,),
        openai_completions,
    ),
    "OpenAI responses": (dialects.RESPONSES, (responses.ResponsesBody,), responses),
    "Anthropic": (dialects.ANTHROPIC, (anthropic.MessagesBody,), anthropic),
    "Ollama": (dialects.OLLAMA_CHAT, (ollama.ChatBody, ollama.Options), ollama),
    "Gemini": (dialects.GEMINI, (gemini.GeminiBody, gemini.Config), gemini),
}
# Features and the fields that ask for them, if these have other names in Python.
FEATURES = {
    "conversation": ("messages", "prompts", "input", "contents"),
    "system prompt": ("system", "instructions", "system_instruction", "messages"),
    "tools": ("tools",),
    "tool choice": ("tool_choice", "tool_config"),
    "JSON schema": ("response_format", "text", "output_config", "format", "response_json_schema"),
    "several choices": ("num_choices", "candidate_count"),
    "token limit": ("max_tokens", "max_output_tokens"),
    "temperature": ("temperature",),
    "top-p": ("top_p",),
    "top-k": ("top_k",),
    "min-p": ("min_p",),
    "seed": ("seed",),
    "stop strings": ("stop", "stop_sequences"),
    "presence penalty": ("presence_penalty",),
    "frequency penalty": ("frequency_penalty",),
    "logit bias": ("logit_bias",),
    "log-probabilities": ("logprobs", "response_logprobs", "top_logprobs"),
    "sub-agent's name": ("metadata",),
    "token ids": ("return_token_ids",),
    "streaming": ("stream",),
    "saved conversation": ("previous_response_id",),
}


def client_apis() -> str:
    """Return the page that compares what requests of the client APIs may ask for."""
    text = (
        "# Client APIs\n\n"
        "    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=mine python agent.py\n\n"
        "[The server](../serving.md) says what is exact about the answers. The cells name the\n"
        f"field that asks for a feature. {NOTE}\n"
    )
    rows = [
        (feature, *(_field(bodies, names, dialect) for dialect, bodies, _ in BODIES.values()))
        for feature, names in FEATURES.items()
    ]
    text += _table(("feature", *BODIES), rows)
    text += (
        "\nOther servers have more names for what binds or changes an answer. A field that an API\n"
        "does not know is refused with `unsupported_parameter` if it is one of these, unless it\n"
        "asks for nothing. Any other unknown field is ignored, and the server logs it once.\n\n"
    )
    text += _sentence([f"`{name}`" for name in sorted(BINDING)])
    for name, (dialect, bodies, module) in BODIES.items():
        paths = [("POST", path) for path in dialect.paths]
        paths += [(listing.method, listing.path) for listing in dialect.listings]
        if dialect is dialects.OLLAMA_CHAT:
            paths += [("POST", path) for path in dialects.OLLAMA_GENERATE.paths]
        text += f"\n## {name}\n\n" + _list([f"`{method} {_plain(path)}`" for method, path in paths])
        ignored = sorted(_ignored(module))
        if ignored:
            text += "\nIgnored, because they change nothing here: "
            text += _sentence([f"`{field}`" for field in ignored])
        refused = list(_refused(bodies))
        if refused:
            text += "\nRefused with `unsupported_parameter`, unless they ask for nothing: "
            text += _sentence(refused)
    return text


def _field(bodies: tuple[type[BaseModel], ...], names: tuple[str, ...], dialect: Dialect) -> str:
    for body in bodies:
        for name in names:
            if name in body.model_fields:
                return f"`{_wire_name(body, name)}`"
    if dialect is dialects.GEMINI and names == ("stream",):
        return "another path"
    return ""


def _wire_name(body: type[BaseModel], name: str) -> str:
    field = body.model_fields[name]
    generator = body.model_config.get("alias_generator")
    alias = field.alias or field.validation_alias
    if not isinstance(alias, str) and callable(generator):
        alias = generator(name)
    return alias if isinstance(alias, str) else name


def _refused(bodies: tuple[type[BaseModel], ...]) -> Iterator[str]:
    for body in bodies:
        for name, field in body.model_fields.items():
            for check in field.metadata:
                if getattr(getattr(check, "func", None), "__qualname__", "").startswith("harmless"):
                    yield f"`{_wire_name(body, name)}`"


def _ignored(module: ModuleType) -> set[str]:
    ignored = {
        name
        for variable in ("IGNORED", "_IGNORED", "_IGNORED_OPTIONS")
        for name in getattr(module, variable, ())
    }
    return ignored - set(FEATURES["conversation"]) - {"tools", "prompt", "system", "raw"}


def _plain(path: str) -> str:
    return path.replace(":.+}", "}").replace(":generateContent|streamGenerateContent}", "}")


def _table(heads: tuple[str, ...], rows: list[Any]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in lines)


def _sentence(items: list[str]) -> str:
    return ", ".join(items) + ".\n"


def _list(items: list[str]) -> str:
    return "".join(f"* {item}\n" for item in items)


if __name__ == "__main__":
    for path, text in pages().items():
        (HERE / path).write_text(text)
