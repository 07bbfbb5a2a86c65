"""Formats of tool calls by model family, as data."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_jax.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolFormat:
    """Text around a call and the shape of its JSON.

    `object` is one JSON object for each call, and `list` is one JSON list of all calls. If `begin`
    is empty, the call is the whole answer, which then starts with one of `starts`. If only `end` is
    empty, the calls last until the end of the answer.
    """

    name: str
    begin: str
    end: str
    body: Literal["object", "list"]
    arguments: str = "arguments"  # key of a call's arguments
    between: str = "\n"  # between two calls of one answer
    starts: tuple[str, ...] = ()
    pythonic: bool = False  # [name(key=value), ...] is parsed too

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of (name, arguments) pairs, as the model would write it."""
        objects = [
            json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
            for name, arguments in calls
        ]
        if self.body == "list":
            return f"{self.begin}[{', '.join(objects)}]{self.end}"
        return self.between.join(f"{self.begin}{item}{self.end}" for item in objects)

    def instructions(self, tools: Sequence[Any]) -> str:
        """Return a system text that offers the tools, for chat templates without tool support."""
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = self.write([("NAME", {"KEY": "VALUE"})])
        return (
            f"You can call these functions:\n<tools>\n{lines}\n</tools>\n"
            f"To call functions, answer with nothing but:\n{example}"
        )


HERMES = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "object")
SMOLLM = ToolFormat("smollm", "<tool_call>", "</tool_call>", "list")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS] ", "", "list")
PHI = ToolFormat("phi", "<|tool_call|>", "<|/tool_call|>", "list")
GRANITE = ToolFormat("granite", "<|tool_call|>", "", "list")
LLAMA3 = ToolFormat(
    "llama3",
    "",
    "",
    "object",
    arguments="parameters",
    between="; ",
    starts=("{", "<|python_tag|>", "["),
    pythonic=True,
)

# Opening and closing marks of thoughts, by model family. No opening mark starts another one.
THOUGHT_MARKS = (
    ("<think>", "</think>"),  # Qwen, DeepSeek, SmolLM3 and most others
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
)

FORMATS = {form.name: form for form in (HERMES, SMOLLM, MISTRAL, PHI, GRANITE, LLAMA3)}


@functools.lru_cache(maxsize=32)
def mark_ids(form: ToolFormat | None, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that are marks of thoughts, or of a format's calls.

    The parser needs their text, which a client does not get of other special tokens.
    """
    calls = (form.begin, form.end, *form.starts) if form else ()
    marks = [*calls, *(mark for pair in THOUGHT_MARKS for mark in pair)]
    ids = {tokenizer.token_id(mark.strip()) for mark in marks}
    return tuple(sorted((tokenizer.special_ids & ids) - tokenizer.eos_ids))


def open_thought(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the closing mark of the thought that a prompt ends in, or "" if it ends in none."""
    longest = max(len(begin) for begin, _ in THOUGHT_MARKS)
    # A mark has at most a token for each byte, and blanks may follow it.
    tail = tokenizer.decode(prompt_ids[-longest - 4 :], skip_special=False).rstrip()
    return next((end for begin, end in THOUGHT_MARKS if tail.endswith(begin)), "")


# Markers in a chat template that identify the model family.
_SIGNS = (
    ("<tool_call>", HERMES),
    ("<|start_header_id|>", LLAMA3),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|/tool_call|>", PHI),  # before Granite 3's, which has the same opening mark alone
    ("<|tool_call|>", GRANITE),
)


def format_of(tokenizer: Tokenizer) -> ToolFormat:
    """Return the format that `model.tool_format` or the model's family names.

    Without one it is that of the family whose chat template the model has, or SmolLM's.
    """
    if tokenizer.tool_format:
        return FORMATS[tokenizer.tool_format]
    template = tokenizer.tool_template or tokenizer.template or ""
    return next((form for sign, form in _SIGNS if sign in template), SMOLLM)
