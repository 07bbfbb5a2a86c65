"""MuSiQue's measures of how well an answer matches the gold one. Pure functions.

Answers are compared as in SQuAD (Rajpurkar et al., EMNLP 2016): in lower case, without
punctuation and articles. MuSiQue (Trivedi et al., TACL 2022) lists aliases of an answer, and the
best match counts.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

ANSWER_SHARE = 0.9  # share of the reward; the rest is for the format (arXiv 2508.03680)

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OPENING, _CLOSING = (re.compile(tag, re.IGNORECASE) for tag in ("<answer>", "</answer>"))


def score(reply: str, answer: str, aliases: Sequence[str] = ()) -> dict[str, float]:
    """Return a reply's `reward`, 0.9 * f1 + 0.1 * format, and separately `em`, `f1`, `format`.

    MuSiQue's published evaluation reports `em` and `f1`.
    """
    text, golds = extract_answer(reply), (answer, *aliases)
    f1 = max(token_f1(text, gold) for gold in golds)
    well_formed = float(has_format(reply))
    return {
        "reward": ANSWER_SHARE * f1 + (1 - ANSWER_SHARE) * well_formed,
        "em": max(exact_match(text, gold) for gold in golds),
        "f1": f1,
        "format": well_formed,
    }


def extract_answer(reply: str) -> str:
    """Return the text of the last answer between tags, or the whole reply without a tag.

    If no answer has both tags, one is enough: a reply may have been cut.
    """
    *closed, rest = _CLOSING.split(reply)
    between = [text for text in closed if _OPENING.search(text)]
    texts = between or ([rest] if _OPENING.search(rest) else closed) or [rest]
    return _OPENING.split(texts[-1])[-1].strip()


def has_format(reply: str) -> bool:
    """Return True if the reply is one answer between tags and nothing else."""
    match = _TAGGED.fullmatch(reply.strip())
    return match is not None and bool(match[1].strip()) and "<answer>" not in match[1]


def exact_match(text: str, gold: str) -> float:
    """Return 1.0 if the two are equal after `normalize`, else 0.0."""
    return float(normalize(text) == normalize(gold))


def token_f1(text: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over words, counting repeats.

    If either has no words after `normalize`, return 1.0 if both have none, else 0.0.
    """
    words, gold_words = normalize(text).split(), normalize(gold).split()
    if not words or not gold_words:
        return float(words == gold_words)
    common = (Counter(words) & Counter(gold_words)).total()
    return 2 * common / (len(words) + len(gold_words))


def normalize(text: str) -> str:
    """Return the text in lower case, without punctuation and articles, with single blanks."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def baselines(tasks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean reward of the best answer that is always the same, in the right form."""
    common = Counter(task["answer"] for task in tasks).most_common(20)
    means = [
        fmean(
            score(f"<answer>{text}</answer>", task["answer"], task["answer_aliases"])["reward"]
            for task in tasks
        )
        for text, _ in common
    ]
    return {"constant": max(means, default=0.0)}


# ---- Scores of stored attempts, for `lightning-jax rescore` ------------------------------------


def reward_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return the reward of a stored rollout."""
    return _score_of(task, attempt)["reward"]


def em_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return the exact match of the answer of a stored rollout."""
    return _score_of(task, attempt)["em"]


def f1_of_attempt(task: dict[str, Any], attempt: Any) -> float:
    """Return the F1 of the answer of a stored rollout."""
    return _score_of(task, attempt)["f1"]


def _score_of(task: dict[str, Any], attempt: Any) -> dict[str, float]:
    aliases = task["answer_aliases"]
    if isinstance(aliases, str):  # as a run's store keeps them
        aliases = json.loads(aliases)
    return score(attempt.response, task["answer"], aliases)
