"""Search in the transcripts of a run: prompts, responses, inputs and outputs of tools, errors."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.studio.build import INPUTS, OUTPUTS
from lightning_jax.studio.load import RunReader
from lightning_jax.studio.records import as_text
from lightning_jax.system.text import printable
from lightning_jax.traces import attributes
from lightning_jax.traces.listing import Filter, StoreListing
from lightning_jax.traces.tree import call_order
from lightning_jax.types import Span

MAX_S = 3.0  # of one search, which a later one can continue
MAX_MATCHES = 50
MAX_ROLLOUT_CHARS = 2_000_000  # of one rollout
PAGE = 20  # rollouts that are read at once
AROUND = 80  # characters before and after a match


@dataclass(frozen=True)
class Match:
    """First place in a rollout that has the text. All texts are safe to print."""

    rollout_id: str
    where: str  # such as "response of call 2"
    before: str
    text: str
    after: str


@dataclass(frozen=True)
class SearchResult:
    """Matches in a part of a run's rollouts, newest first."""

    matches: tuple[Match, ...]
    num_searched: int
    num_cut: int  # rollouts with so much text that only its start was searched
    cursor: int | None  # where a later search continues, None at the end


def search_transcripts(
    open_reader: Callable[[], AbstractContextManager[RunReader]],
    listing: StoreListing,
    text: str,
    query: Filter,
    *,
    cursor: int | None = None,
    max_s: float = MAX_S,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Search the matching rollouts in any case, from the cursor on, for at most about `max_s`.

    Each rollout has at most one match. At least one rollout is searched. The reader is opened for
    a few rollouts at a time, so that others can use it in between.
    """
    pattern, end = re.compile(re.escape(text), re.IGNORECASE), clock() + max_s
    matches: list[Match] = []
    num_searched = num_cut = 0
    while page := listing.newest(query, before=cursor, limit=PAGE):
        with open_reader() as reader:
            for cursor, rollout_id in page:
                match, is_cut = _search(reader, rollout_id, pattern)
                matches += [match] if match is not None else []
                num_searched, num_cut = num_searched + 1, num_cut + is_cut
                if len(matches) >= MAX_MATCHES or clock() >= end:
                    return SearchResult(tuple(matches), num_searched, num_cut, cursor)
    return SearchResult(tuple(matches), num_searched, num_cut, None)


def _search(
    reader: RunReader, rollout_id: str, pattern: re.Pattern[str]
) -> tuple[Match | None, bool]:
    """Return the first match in a rollout, and whether a part of it was not searched."""
    num_left = MAX_ROLLOUT_CHARS
    for where, text in _texts(reader.spans(rollout_id), reader.tokenizer[0]):
        if match := pattern.search(text, 0, max(num_left, 0)):
            start, end = match.span()
            return (
                Match(
                    rollout_id,
                    where,
                    printable(text[max(start - AROUND, 0) : start]),
                    printable(match[0]),
                    printable(text[end : end + AROUND]),
                ),
                False,
            )
        num_left -= len(text)
        if num_left < 0:
            return None, True
    return None, False


def _texts(spans: Sequence[Span], tokenizer: Tokenizer | None) -> Iterator[tuple[str, str]]:
    """Yield (place, text) of a rollout.

    For a prompt that continues the last call, the text is only what is new.
    """
    number, seen = 0, ()
    for span in sorted(spans, key=call_order):
        values = span.attributes
        prompt = tuple(values.get(attributes.PROMPT_TOKEN_IDS, ()))
        if prompt and tokenizer is not None:
            number += 1
            response = tuple(values.get(attributes.RESPONSE_TOKEN_IDS, ()))
            start = len(seen) if prompt[: len(seen)] == seen else 0
            yield f"prompt of call {number}", tokenizer.decode(prompt[start:], skip_special=False)
            yield f"response of call {number}", tokenizer.decode(response, skip_special=False)
            seen = (*prompt, *response)
        for kind, names in (("input", INPUTS), ("output", OUTPUTS)):
            for value in (values[name] for name in names if values.get(name) not in (None, "")):
                yield f"{kind} of {printable(span.name)}", as_text(value)
        if span.error:
            yield f"error of {printable(span.name)}", span.error
