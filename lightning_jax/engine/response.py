"""Assembly of one response on the host: tokens in, text and finish reason out.

No JAX, no threads.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
        self._seconds, self._now_s = seconds, now_s
        self._began_s: float | None = None
        self._has_ended = False

    def end(self) -> None:
        """Let the next token be the last one."""
        self._has_ended = True

    def is_over(self, stalled_s: float = 0.0) -> bool:
        """Return True if the token that was just sampled is the last one.

        `stalled_s` counts the seconds in which the engine stood still, which do not count.
        """
        now_s = self._now_s() - stalled_s
        if self._began_s is None:
            self._began_s = now_s
        is_late = self._seconds is not None and now_s - self._began_s >= self._seconds
        return is_late or self._has_ended


@dataclass(frozen=True)
class Chunk:
    """Tokens that one step added to a response. `text` may be empty, or lag behind the tokens."""

    text: str
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    forced: tuple[bool, ...]
    top_logprobs: tuple[TopLogprobs, ...]


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
    """Tokens and text of one request so far, at most `limit` tokens.

    `stalled_s` returns the seconds in which the engine stood still, which no `time_limit` counts.
    """

    decoder: StreamDecoder
    eos_ids: frozenset[int]
    sampling: SamplingParams
    limit: int
    time_limit: TimeLimit | None = None
    stalled_s: Callable[[], float] = float
    tokens: list[SampledToken] = field(default_factory=list)
    text: str = ""
    prompt_scores: PromptScores | None = None
    is_late: bool = False  # the time limit ended it
    stop: str = ""  # the stop string that ended it
    num_cached: int = 0  # tokens of the prompt that the prefix cache had

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.sampling.stop)

    def push(self, token: SampledToken) -> tuple[Chunk, FinishReason | None]:
        """Add a token. Return its chunk, and the finish reason if the response ends with it."""
        self.tokens.append(token)
        is_late = self.time_limit is not None and self.time_limit.is_over(self.stalled_s())
        reason: FinishReason | None = None
        text = ""
        if token.token_id in self.eos_ids and not self.sampling.ignore_eos:
            reason = "stop"  # its text is not shown, even if it is no special token
        else:
            text = self.decoder.push(token.token_id)
        if reason is None and (is_late or len(self.tokens) >= self.limit):
            reason = "length"
        if reason:
            text += self.decoder.flush()
        visible, self.stop = self._stops.push(text, final=reason is not None)
        reason = "stop" if self.stop else reason
        self.is_late = is_late and reason == "length" and len(self.tokens) < self.limit
        self.text += visible
        chunk = Chunk(
            visible,
            (token.token_id,),
            (token.behavior_logprob,),
            (token.sampling_logprob,),
            (token.policy_version,),
            (token.forced,),
            (token.top_logprobs,),
        )
        return chunk, reason

    def completion(self, reason: FinishReason) -> Completion:
        """Return the whole response."""
        return Completion(
            token_ids=tuple(token.token_id for token in self.tokens),
            text=self.text,
            behavior_logprobs=tuple(token.behavior_logprob for token in self.tokens),
            sampling_logprobs=tuple(token.sampling_logprob for token in self.tokens),
            tempered_logprobs=tuple(token.tempered_logprob for token in self.tokens),
            policy_versions=tuple(token.policy_version for token in self.tokens),
            finish_reason=reason,
            forced=tuple(token.forced for token in self.tokens),
            top_logprobs=tuple(token.top_logprobs for token in self.tokens),
            prompt_scores=self.prompt_scores,
            is_late=self.is_late,
            stop=self.stop,
            num_cached=self.num_cached,
        )
