"""The chat-completions dialect, outbound: completions as response bodies and as stream chunks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.types import Completion

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class ChatReply:
    """Builds the bodies that answer one request."""

    response_id: str
    created: int  # seconds since the epoch
    model: str
    prompt_ids: tuple[int, ...]
    logprobs: bool  # the request's own settings
    return_token_ids: bool
    include_usage: bool
    tokenizer: Tokenizer

    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The whole answer, one choice per completion."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                **self._token_fields(completion.token_ids, completion.behavior_logprobs),
                "finish_reason": completion.finish_reason,
            }
            for index, completion in enumerate(completions)
        ]
        versions = completions[-1].policy_versions
        return {
            **self._envelope("chat.completion"),
            "choices": choices,
            "usage": self._usage(completions),
            "system_fingerprint": f"policy-{versions[-1]}" if versions else None,
            **self._prompt_fields(),
        }

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of one choice of a stream."""
        return self._chunk(
            [_choice(index, {"role": "assistant", "content": ""})], self._prompt_fields()
        )

    def piece(
        self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
    ) -> dict[str, Any] | None:
        """The chunk for newly stable text; None when it would tell the client nothing."""
        if not text and not (self.logprobs or self.return_token_ids):
            return None
        choice = _choice(index, {"content": text})
        return self._chunk([choice | self._token_fields(token_ids, logprobs)])

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """The last chunk of one choice."""
        return self._chunk([_choice(index, {}, completion.finish_reason)])

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The chunk after all choices, for a client that asked for usage."""
        return self._chunk([], {"usage": self._usage(completions)})

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _chunk(
        self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        usage = {"usage": None} if self.include_usage else {}
        envelope = self._envelope("chat.completion.chunk")
        return {**envelope, "choices": choices, **usage, **(extra or {})}

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt_ids)} if self.return_token_ids else {}

    def _token_fields(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        entries = None
        if self.logprobs:
            pairs = zip(token_ids, logprobs, strict=True)
            content = [self._logprob(token_id, logprob) for token_id, logprob in pairs]
            entries = {"content": content, "refusal": None}
        ids = {"token_ids": list(token_ids)} if self.return_token_ids else {}
        return {"logprobs": entries, **ids}

    def _logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode([token_id], skip_special=False)
        # A token may hold part of a character; its bytes are then not those of the text.
        whole = "\ufffd" not in text
        return {
            "token": text,
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(text.encode()) if whole else None,
            "top_logprobs": [],
        }

    def _usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        sampled = sum(len(completion.token_ids) for completion in completions)
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(self.prompt_ids) + sampled,
        }


def _choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
