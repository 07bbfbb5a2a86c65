"""Trial of a chat template with a small conversation, to learn what it supports."""

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_jax.gateway.prompt.tool_formats import ToolFormat, format_of
from lightning_jax.gateway.prompt.writing import (
    AS_IT_IS,
    Tools,
    Writing,
    alternatives,
    arrange_messages,
    dropped_parts,
)
from lightning_jax.models.chat_template import TemplateError
from lightning_jax.models.template_limits import LimitError
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import Message

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Habits:
    """Use of a tokenizer's chat template.

    `thought` has the texts around the thought of the last message, or is None if the template
    drops it.
    """

    writing: Writing = AS_IT_IS
    thought: tuple[str, str] | None = None
    lacks: tuple[str, ...] = ()  # what it does not take even in the plainest writing

    def facts(self) -> dict[str, str]:
        """Return how each part of a conversation is written, in words."""
        chosen, calls = self.writing, {"objects": "", "strings": "arguments as text"}
        offers = {"template": "", "system": "in the system message's field"}
        system = {"role": "", "first": "after the first in the user's role"}
        words = {
            "system messages": system.get(chosen.system, "in the user's first message"),
            "tools": offers.get(chosen.offers, "as text"),
            "calls": calls.get(chosen.calls, "as text"),
            "results": "" if chosen.results == "tool" else "in the user's role",
            "several calls": "one by one" if chosen.one_call else "",
            "thoughts": "" if self.thought else "left out",
        }
        lost = {*self.lacks, *(["results"] if "calls" in self.lacks else [])}  # tried together
        return {what: "lost" if what in lost else how for what, how in words.items()}

    def describe(self) -> str:
        """Return one sentence for the log, without what the template supports."""
        unusual = [f"{what} {how}" for what, how in self.facts().items() if how]
        if not unusual:
            return "the chat template takes conversations as they are"
        if unusual == ["thoughts left out"]:
            return "the chat template takes conversations as they are, without thoughts"
        return (
            "the chat template does not support some parts of a conversation; instead: "
            f"{', '.join(unusual)}"
        )


@functools.lru_cache(maxsize=16)
def habits_of(tokenizer: Tokenizer) -> Habits:
    """Return how the tokenizer's chat template is used. Without one they are the defaults."""
    if tokenizer.template is None:
        return Habits()
    trial = _Trial(tokenizer, format_of(tokenizer))
    writing = trial.writing()
    return Habits(writing, trial.thought(writing), tuple(trial.lacks))


_SYSTEM = {"role": "system", "content": "system-text"}
_USER = {"role": "user", "content": "user-text"}
_NEXT = {"role": "user", "content": "next-text"}
_TOOLS: Tools = [
    {
        "type": "function",
        "function": {
            "name": "offered_name",
            "description": "offered-description",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "key-description"}},
                "required": ["key"],
            },
        },
    }
]


def _asked(*numbers: int) -> Message:
    """Return a message with calls that have these numbers."""
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "offered_name", "arguments": {"key": f"argument-{number}"}},
        }
        for number in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"result-{number}"}


def _ways(writing: Writing, **options: tuple[Any, ...]) -> list[Writing]:
    """Return the writing with each combination of options. The last option varies fastest."""
    return [
        replace(writing, **dict(zip(options, values, strict=True)))
        for values in itertools.product(*options.values())
    ]


class _Trial:
    """Trial of a template, one ability after the other."""

    def __init__(self, tokenizer: Tokenizer, form: ToolFormat) -> None:
        self._tokenizer, self._form = tokenizer, form
        self.lacks: list[str] = []

    def writing(self) -> Writing:
        """Return how to write what the template takes."""
        best, results = AS_IT_IS, ("tool", "user")
        ways = _ways(best, system=("role", "user"))
        best = self._first("system messages", ways, [_SYSTEM, _USER])
        ways = _ways(best, merged=(False, True))
        best = self._first("neighbouring messages of the user", ways, [_USER, _NEXT])
        ways = _ways(best, offers=("template", "system", "text"))
        best = self._first("tools", ways, [_USER], _TOOLS)
        # The model reads how to call from the offer. So calls are text where offers are.
        ways = _ways(best, results=results, calls=("text",))
        if best.offers != "text":
            by_template = {"short_ids": (False, True), "calls": ("objects", "strings")}
            ways = [*_ways(best, results=results, **by_template), *ways]
        best = self._first("calls", ways, [_USER, _asked(1), _result(1)], _TOOLS)
        ways = _ways(best, one_call=(False, True))
        messages = [_USER, _asked(1, 2), _result(1), _result(2)]
        return self._first("several calls", ways, messages, _TOOLS)

    def _first(
        self, what: str, ways: Sequence[Writing], messages: Sequence[Message], tools: Tools = None
    ) -> Writing:
        """Return the first way that loses nothing, or the last one if all do."""
        for writing in ways:
            try:
                text = self._text(messages, tools, writing)
            except TemplateError:
                continue
            if not dropped_parts(messages, tools, text):
                return writing
        self.lacks.append(what)
        return ways[-1]

    def _text(
        self, messages: Sequence[Message], tools: Tools, writing: Writing, **options: Any
    ) -> str:
        turns, offer = arrange_messages(messages, tools, self._form, writing)
        return self._tokenizer.render_chat(turns, tools=offer, **options)

    def thought(self, writing: Writing) -> tuple[str, str] | None:
        """Return the texts before and after a thought in the last message, if it is shown."""
        answer = {"role": "assistant", "content": "answer", "reasoning_content": "the-thought"}
        try:
            prompt = self._text([_USER], None, writing)
            whole = self._text([_USER, answer], None, writing, add_generation_prompt=False)
        except TemplateError:
            return None
        before, thought, after = whole.partition("the-thought")
        pairs = zip(prompt, before, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return (before[same:], after.partition("answer")[0]) if thought else None


def template_text(
    messages: Sequence[Message],
    tools: Tools,
    tokenizer: Tokenizer,
    form: ToolFormat,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the template's text of a conversation, of which nothing is lost.

    Ways that are not the template's habit are tried if it rejects or drops something, and the first
    conversation that needs one of them is logged. `kwargs` are other variables for the template.
    Raises TemplateError.
    """
    refusal: TemplateError | None = None
    tried: list[tuple[list[Message], Tools]] = []
    usual = habits_of(tokenizer).writing
    for way in itertools.chain([usual], alternatives(usual)):  # made only where one is needed
        arrangement = arrange_messages(messages, tools, form, way)
        if arrangement in tried:
            continue
        tried.append(arrangement)
        try:
            text = tokenizer.render_chat(arrangement[0], tools=arrangement[1], kwargs=kwargs)
        except TemplateError as error:
            refusal = refusal or error
            if error.reason == "missing" or isinstance(error.__cause__, LimitError):
                break
            continue
        lost = dropped_parts(messages, tools, text)
        if not lost:
            if refusal is not None:
                _note_change(tokenizer, way)
            return text
        refusal = refusal or TemplateError(
            f"the chat template leaves out {'; '.join(lost[:3])}, whichever way it is written; "
            "send messages without it, or set model.chat_template to a template that includes it.",
            reason="drops",
        )
    assert refusal is not None, "at least one way was tried"
    raise refusal


@functools.lru_cache(maxsize=64)
def _note_change(tokenizer: Tokenizer, way: Writing) -> None:
    """Log once that a conversation is written in another way than usual."""
    habits = habits_of(tokenizer)
    usual, changed = habits.facts(), replace(habits, writing=way).facts()
    changes = [f"{what} {how}" for what, how in changed.items() if how != usual[what]]
    log.info(
        "the chat template refuses some conversations as they are usually written, which are "
        "written with %s instead",
        ", ".join(changes) or "the user's neighbouring messages joined and short ids of calls",
        extra={"event": "conversation_rewritten", "changes": changes},
    )
