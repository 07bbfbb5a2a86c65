"""Rewards of a note: similarity to its request, required words, and what to keep held out.

A task is a dict with `question`, `topic` and `words`. Each function is a component of `rewards`.
"""

import functools
import re
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # missing when this file is loaded by path
from sentence_encoder import PACKAGED, SentenceEncoder, find_encoder

NGRAM = 3  # words
MIN_WORDS, MAX_WORDS = 6, 40

_WORD = re.compile(r"[a-z']+")
_SENTENCE = re.compile(r"[^.!?]*[a-zA-Z][^.!?]*[.!?]+")
_loading = threading.Lock()


def similarity(task: dict[str, Any], attempt: Any) -> float:
    """Return the cosine of the request and the note, by a sentence encoder.

    It can be gamed: a note that repeats its request is as similar as can be.
    """
    request, note = _encoder().encode([task["question"], attempt.response])
    return float(request @ note)


def follows(task: dict[str, Any], attempt: Any) -> float:
    """Return the share of topic and required words that the note has."""
    words = set(_words(attempt.response))
    required = [*task["words"], task["topic"].split()[-1]]
    return sum(word in words for word in required) / len(required)


def complete(task: dict[str, Any], attempt: Any) -> float:
    """Return 1 if the note is one whole sentence of 6 to 40 words, else 0."""
    note = attempt.response.strip()
    is_whole = note.endswith((".", "!", "?")) and len(_SENTENCE.findall(note)) == 1
    return float(is_whole and MIN_WORDS <= len(_words(note)) <= MAX_WORDS)


def novelty(task: dict[str, Any], attempt: Any) -> float:
    """Return the share of the note's word 3-grams that neither the request nor the note had before.

    A note of fewer words has 0.
    """
    ngrams = _ngrams(_words(attempt.response))
    new = set(ngrams) - set(_ngrams(_words(task["question"])))
    return len(new) / len(ngrams) if ngrams else 0.0


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _ngrams(words: list[str]) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]


def _encoder() -> SentenceEncoder:
    with _loading:  # many threads ask for the first note's similarity at once
        return _load()


@functools.cache
def _load() -> SentenceEncoder:
    return SentenceEncoder(find_encoder(PACKAGED))
