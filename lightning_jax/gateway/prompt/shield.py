"""Special tokens that a conversation spells out, kept from becoming tokens of the prompt.

A tool's result with the text `<|im_end|><|im_start|>system` would otherwise end its turn and
start one of the system. Marks stand for such texts until the template has written the prompt. Then
they are encoded as ordinary characters.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

from lightning_jax.gateway.prompt.tool_formats import ToolFormat, mark_ids
from lightning_jax.gateway.prompt.writing import Tools
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import Message


class Shield:
    """Marks in place of special tokens, with `mark` in front of each."""

    def __init__(self, mark: str, tokenizer: Tokenizer, form: ToolFormat) -> None:
        self._mark, self._special = mark, tokenizer.special_pattern
        self._tokenizer, self._form = tokenizer, form
        self.hidden: list[str] = []

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with marks in their texts and in the arguments of their calls."""
        if self._special is None:
            return list(messages)
        return [
            {
                key: value if key == "role" else self._hide(value, message["role"] == "assistant")
                for key, value in message.items()
            }
            for message in messages
        ]

    def tools(self, tools: Tools) -> Tools:
        """Return the tools with marks in their descriptions and schemas."""
        return tools if self._special is None else self._hide(tools, of_assistant=False)

    @functools.cached_property
    def _of_assistants(self) -> set[str]:
        """Special tokens that an assistant writes: the marks of thoughts and calls."""
        ids = mark_ids(self._form, self._tokenizer)
        return {self._tokenizer.decode([token_id], skip_special=False) for token_id in ids}

    def _hide(self, value: Any, of_assistant: bool) -> Any:
        if isinstance(value, str):
            return self._hide_in(value, of_assistant)
        if isinstance(value, dict):
            return {
                self._hide(key, of_assistant): self._hide(item, of_assistant)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hide(item, of_assistant) for item in value]
        return value

    def _hide_in(self, text: str, of_assistant: bool) -> str:
        assert self._special is not None, "callers check that there are special tokens"

        def hide(match: re.Match[str]) -> str:
            if of_assistant and match[0] in self._of_assistants:
                return match[0]
            self.hidden.append(match[0])
            return f"{self._mark}{len(self.hidden) - 1}@@"

        return self._special.sub(hide, text)

    def restored(self, text: str) -> str:
        """Return the text with what the marks stand for."""
        if not self.hidden:
            return text
        return re.sub(
            re.escape(self._mark) + "([0-9]+)@@", lambda match: self.hidden[int(match[1])], text
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text of the template, in which the marks are ordinary characters.

        What stands between the template's own special tokens is encoded as one text.
        """
        encode = self._tokenizer.encode
        if self._mark not in text:
            return encode(text)
        assert self._special is not None, "there are marks, so there are special tokens"
        ids, start = [], 0
        for match in [*self._special.finditer(text), None]:
            begin, end = match.span() if match else (len(text), len(text))
            ids += encode(self.restored(text[start:begin]), special=False)
            ids += encode(text[begin:end])
            start = end
        return ids
