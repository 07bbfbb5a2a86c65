"""Assembly of one response on the host: tokens in, text and finish reason out.

The tokens are packed records in one buffer, and a decode step only appends to it. Chunks and the
completion are cut from the buffer when somebody needs them, and text is decoded then. Only stop
strings need the text of each token at once. No JAX, no threads.
"""

import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32

from lightning_jax.engine.types import Completion, PromptScores, SamplingParams, TopLogprobs
from lightning_jax.models.tokenizer import StreamDecoder
from lightning_jax.types import FinishReason


class TimeLimit:
    """Limit that ends a response as "length", with the tokens sampled so far.

    The time runs from the first token: the wait before it is not the response's. It is that of
    `now_s`, a clock that may stand still. Without `seconds`, only `end` ends the response.

    A response checks its limit at each token. Any thread may call `end`.
    """

    def __init__(
        self, seconds: float | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.now_s = now_s
        self._seconds = seconds
        self._began_s: float | None = None
        self._has_ended = False

    def end(self) -> None:
        """Let the next token be the last one."""
        self._has_ended = True

    def is_over(self, now_s: float) -> bool:
        """Return True if the token that was sampled just now is the last one.

        `now_s` is the time of the clock, without the seconds in which the engine stood still.
        """
        if self._began_s is None:
            self._began_s = now_s
        is_late = self._seconds is not None and now_s - self._began_s >= self._seconds
        return is_late or self._has_ended


@dataclass(frozen=True)
class Chunk:
    """Tokens added to a response since its last chunk. `text` may be empty, or lag behind them."""

    text: str
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    forced: tuple[bool, ...]
    top_logprobs: tuple[TopLogprobs, ...]


def rest_of(completion: Completion, num_tokens: int = 0, num_chars: int = 0) -> Chunk:
    """Return what follows the first tokens and characters of a completion, by default all of it."""
    return Chunk(
        completion.text[num_chars:],
        completion.token_ids[num_tokens:],
        completion.behavior_logprobs[num_tokens:],
        completion.sampling_logprobs[num_tokens:],
        completion.policy_versions[num_tokens:],
        completion.forced[num_tokens:],
        completion.top_logprobs[num_tokens:],
    )


@dataclass(frozen=True)
class SampledToken:
    """One token as the engine sampled it."""

    token_id: int
    behavior_logprob: float
    sampling_logprob: float
    tempered_logprob: float
    policy_version: int
    forced: bool = False  # the grammar left no choice
    top_logprobs: TopLogprobs = ()


# Token id, log-probabilities (behavior, sampling, tempered), policy version, and 1 if forced.
_RECORD = struct.Struct("=i3f2i")


def pack_records(
    sampled: Int32[np.ndarray, "4 N"], version: int, forced: Iterable[int] = ()
) -> list[bytes]:
    """Return a record for each token of a step, for `Response.append`.

    `sampled` has the first rows that `table.pack_sampled` returns. `forced` has the indices of the
    tokens to which a grammar left no choice.
    """
    numbers = np.zeros((sampled.shape[1], 6), np.int32)
    numbers[:, :4], numbers[:, 4] = sampled.T, version
    numbers[list(forced), 5] = 1
    packed, size = numbers.tobytes(), _RECORD.size
    return [packed[start : start + size] for start in range(0, len(packed), size)]


class StopStrings:
    """Filter that passes text on until a stop string appears.

    It holds back a possible start of one.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Return the text that is safe to show, and the stop string that ended it or "".

        `final` means that no text follows. With "END", pushing "aE" gives "a", then "ND" gives ""
        and "END". Of several, the string that is complete first counts, and of those that are
        complete together the longest. So the result is the same however the text is split.
        """
        if not self._stops:
            return text, ""
        self._held += text
        matches = [
            (index + len(stop), index, stop)
            for stop in self._stops
            if (index := self._held.find(stop)) >= 0
        ]
        if matches:
            _, index, stop = min(matches)
            visible, self._held = self._held[:index], ""
            return visible, stop
        keep = 0 if final else self._overlap()
        visible = self._held[: len(self._held) - keep]
        self._held = self._held[len(visible) :]
        return visible, ""

    def _overlap(self) -> int:
        """Return the length of the longest suffix of the held text that starts a stop string."""
        text, stops = self._held, self._stops
        starts = (stop[:n] for stop in stops for n in range(1, min(len(stop), len(text) + 1)))
        return max((len(start) for start in starts if text.endswith(start)), default=0)


@dataclass
class Response:
    """Tokens of one request so far, at most `limit`, from which its text is decoded."""

    decoder: StreamDecoder
    eos_ids: frozenset[int]
    sampling: SamplingParams
    limit: int
    time_limit: TimeLimit | None = None
    prompt_scores: PromptScores | None = None
    is_late: bool = False  # the time limit ended it
    stop: str = ""  # the stop string that ended it
    num_cached: int = 0  # tokens of the prompt that the prefix cache had
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # of each token, if requested

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.sampling.stop)
        self._records = bytearray()
        self._reason: FinishReason | None = None
        self._text, self._num_read, self._has_all_text = "", 0, False  # of the tokens read so far
        self._num_given = self._num_chars_given = 0  # in chunks

    def __len__(self) -> int:
        return len(self._records) // _RECORD.size

    @property
    def token_ids(self) -> list[int]:
        """Tokens sampled so far."""
        return self._ids(0)

    @property
    def last_id(self) -> int:
        """Token sampled last."""
        return _RECORD.unpack_from(self._records, len(self._records) - _RECORD.size)[0]

    def append(self, record: bytes) -> None:
        """Add a token from `pack_records`. Its alternatives go to `top_logprobs`, if requested."""
        self._records += record

    def push(self, token: SampledToken, stalled_s: float = 0.0) -> FinishReason | None:
        """Add a token. Return the finish reason if the response ends with it.

        `stalled_s` counts the seconds in which the engine stood still, which no time limit counts.
        """
        logprobs = token.behavior_logprob, token.sampling_logprob, token.tempered_logprob
        self.append(_RECORD.pack(token.token_id, *logprobs, token.policy_version, token.forced))
        if self.sampling.top_logprobs:
            self.top_logprobs.append(token.top_logprobs)
        limit = self.time_limit
        return self.end(limit is not None and limit.is_over(limit.now_s() - stalled_s))

    def end(self, is_late: bool = False) -> FinishReason | None:
        """Return the finish reason if the response ends with its last token.

        `is_late` says that the time limit is over. With stop strings, call it after each token.
        """
        if self._ends_turn():
            self._reason = "stop"
        elif is_late or len(self) >= self.limit:
            self._reason = "length"
        if self.sampling.stop:
            self._read(self._reason)
            self._reason = "stop" if self.stop else self._reason
        self.is_late = is_late and self._reason == "length" and len(self) < self.limit
        return self._reason

    def chunk(self) -> Chunk:
        """Return the tokens and the text since the last chunk."""
        self._read(self._reason)
        ids, behavior, drawn, _, versions, forced = self._columns(self._num_given)
        text, top = self._text[self._num_chars_given :], self.top_logprobs[self._num_given :]
        self._num_given += len(ids)
        self._num_chars_given = len(self._text)
        top = tuple(top) or ((),) * len(ids)
        return Chunk(text, ids, behavior, drawn, versions, tuple(map(bool, forced)), top)

    def completion(self, reason: FinishReason) -> Completion:
        """Return the whole response."""
        self._read(reason)
        ids, behavior, drawn, tempered, versions, forced = self._columns()
        return Completion(
            token_ids=ids,
            text=self._text,
            behavior_logprobs=behavior,
            sampling_logprobs=drawn,
            tempered_logprobs=tempered,
            policy_versions=versions,
            finish_reason=reason,
            forced=tuple(map(bool, forced)),
            top_logprobs=tuple(self.top_logprobs),
            prompt_scores=self.prompt_scores,
            is_late=self.is_late,
            stop=self.stop,
            num_cached=self.num_cached,
        )

    def _ids(self, first: int) -> list[int]:
        places = range(first * _RECORD.size, len(self._records), _RECORD.size)
        return [_RECORD.unpack_from(self._records, place)[0] for place in places]

    def _columns(self, first: int = 0) -> tuple[tuple, ...]:
        """Return the fields of the records, each for all tokens from the first on."""
        records = _RECORD.iter_unpack(self._records[first * _RECORD.size :])
        return tuple(zip(*records, strict=True)) or ((),) * 6

    def _ends_turn(self) -> bool:
        return not self.sampling.ignore_eos and self.last_id in self.eos_ids

    def _read(self, reason: FinishReason | None) -> None:
        """Decode the tokens that are new. The text is whole if the response has ended by itself."""
        is_last = reason in ("stop", "length")
        if self._has_all_text or (self._num_read == len(self) and not is_last):
            return
        ids = self._ids(self._num_read)
        self._num_read += len(ids)
        if is_last and ids and self._ends_turn():
            ids = ids[:-1]  # its text is not shown, even if it is no special token
        text = self.decoder.extend(ids)
        text += self.decoder.flush() if is_last else ""
        visible, self.stop = self._stops.push(text, final=is_last)
        self._text += visible
        self._has_all_text = is_last or self.stop != ""
