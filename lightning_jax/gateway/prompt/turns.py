"""Messages read back from recorded token ids, for people. They are never training data."""

import json
from collections.abc import Sequence
from typing import Any

from lightning_jax.gateway.prompt.tool_calls import CallArguments, CallStart, ToolCallParser
from lightning_jax.gateway.prompt.tool_formats import format_of, mark_ids
from lightning_jax.models.tokenizer import StreamDecoder, Tokenizer

# First token of a turn and what ends its header, by model family.
TURNS = (
    ("<|im_start|>", "\n"),  # ChatML: Qwen, SmolLM and others
    ("<|start_header_id|>", "<|end_header_id|>"),  # Llama 3
    ("<start_of_turn>", "\n"),  # Gemma
)
ROLES = {"model": "assistant", "ipython": "tool", "developer": "system"}
MAX_ROLE_CHARS = 32


def read_prompt(prompt: Sequence[int], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return (role, text) of each turn of a prompt, without an empty one at its end.

    Turns are split at tokens, so text that only looks like a mark stays text. A prompt of another
    family is one turn of the user, with its special tokens.
    """
    ids = ((tokenizer.token_id(mark), end) for mark, end in TURNS)
    marks = [(start, end) for start, end in ids if start in tokenizer.special_ids & {*prompt}]
    if not marks:
        return [("user", tokenizer.decode(prompt, skip_special=False))]
    start, header_end = marks[0]
    begins = [index for index, token_id in enumerate(prompt) if token_id == start]
    turns = [("system", tokenizer.decode(prompt[: begins[0]]))] if begins[0] else []
    for begin, end in zip(begins, (*begins[1:], len(prompt)), strict=True):
        whole = prompt[begin + 1 : end]
        if tokenizer.end_of_turn_id in whole:
            whole = whole[: whole.index(tokenizer.end_of_turn_id)]
        role, is_split, text = tokenizer.decode(whole, skip_special=False).partition(header_end)
        if not is_split or len(role) > MAX_ROLE_CHARS:
            role, text = "user", role + header_end * bool(is_split) + text
        turns.append((ROLES.get(role.strip(), role.strip()), text.lstrip("\n")))
    return [turn for turn in turns[:-1] if turn[1].strip()] + [t for t in turns[-1:] if t[1]]


def read_response(
    response: Sequence[int], tokenizer: Tokenizer, thought_end: str = ""
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the tool calls, as (name, arguments), of a response.

    They are what the gateway would read if tools were offered. `thought_end` is the closing mark of
    a thought that the prompt began.
    """
    form = format_of(tokenizer)
    parser = ToolCallParser(form, thought_end=thought_end)
    decoder = StreamDecoder(tokenizer, mark_ids(form, tokenizer))
    whole = "".join(map(decoder.push, response)) + decoder.flush()
    text, calls = "", list[tuple[str, str]]()
    for piece in (*parser.push(whole), *parser.finish()):
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            name, before = calls[-1]
            calls[-1] = (name, before + piece.text)
        else:
            text += piece.text
    return text, calls


def as_arguments(text: str) -> Any:
    """Return the arguments of a tool call as an object, or as they are if they are none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
