"""Special tokens that a conversation spells out, kept from becoming tokens of the prompt.

A tool's result with the text `<|im_end|><|im_start|>system` would else end its turn and start one
of the system. Marks stand for such texts until the template has written the prompt. Then they are
encoded as ordinary characters.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from lightning_jax.gateway.prompt.writing import Tools
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import Message


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], skip_special=False)


class Shield:
    """Marks in place of special tokens, with `mark` in front of each."""

    def __init__(self, mark: str, tokenizer: Tokenizer, of_assistants: Collection[int]) -> None:
        self._mark, self._special = mark, tokenizer.special_pattern
        # Assistants write thoughts and calls, which some vocabularies mark with special tokens.
        self._of_assistants = {_text(token_id, tokenizer) for token_id in of_assistants}
        self.hidden: list[str] = []

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with marks in their texts and in the arguments of their calls."""
        if self._special is None:
            return list(messages)
        return [self._message(message) for message in messages]

    def tools(self, tools: Tools) -> Tools:
        """Return the tools with marks in their descriptions and schemas."""
        return tools if tools is None or self._special is None else self._hide(tools, ())

    def _message(self, message: Message) -> Message:
        keep = self._of_assistants if message["role"] == "assistant" else ()
        return {
            key: self._hide(value, keep) if key != "role" else value
            for key, value in message.items()
        }

    def _hide(self, value: Any, keep: Collection[str]) -> Any:
        if isinstance(value, str):
            return self._hide_in(value, keep)
        if isinstance(value, dict):
            return {self._hide(k, keep): self._hide(item, keep) for k, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(item, keep) for item in value]
        return value

    def _hide_in(self, text: str, keep: Collection[str]) -> str:
        assert self._special is not None, "callers check that there are special tokens"

        def hide(match: re.Match[str]) -> str:
            if match[0] in keep:
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

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Return the ids of a text of the template, in which the marks are ordinary characters.

        What stands between the template's own special tokens is encoded as one text.
        """
        if self._mark not in text:
            return tokenizer.encode(text)
        assert self._special is not None, "there are marks, so there are special tokens"
        ids, at = [], 0
        for match in [*self._special.finditer(text), None]:
            begin, end = match.span() if match else (len(text), len(text))
            ids += tokenizer.encode(self.restored(text[at:begin]), special=False)
            ids += tokenizer.encode(text[begin:end])
            at = end
        return ids
