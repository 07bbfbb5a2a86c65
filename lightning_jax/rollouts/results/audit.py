"""Signals that a policy may game its reward: repetition, copies, components that disagree.

They describe a step. None of them promises an early warning. All functions are pure. Texts are
token ids, so no tokenizer is needed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from lightning_jax.rollouts.config import AGENT
from lightning_jax.rollouts.rewards.components import rank_correlation, ranks
from lightning_jax.types import Metrics, Rollout, Trajectory

COPY_SIMILARITY = 0.8  # Jaccard similarity of the 3-grams of near-copies

Text = Sequence[int]


def repetition(text: Text, n: int = 4) -> float:
    """Return the share of n-grams that repeat an earlier one of the text.

    This is seq-rep-n of Welleck et al. (arXiv 1908.04319). A text of fewer tokens repeats nothing.
    """
    total = len(text) - n + 1
    return 1.0 - len(_ngrams(text, n)) / total if total > 0 else 0.0


def distinct_ngrams(texts: Sequence[Text], n: int = 3) -> float | None:
    """Return the share of n-grams over all texts that are different, or None if there are none.

    This is distinct-n of Li et al. (arXiv 1510.03055).
    """
    total = sum(max(len(text) - n + 1, 0) for text in texts)
    return len(set[Text]().union(*(_ngrams(text, n) for text in texts))) / total if total else None


def near_copies(texts: Sequence[Text], n: int = 3) -> list[bool]:
    """Return for each text whether another one has nearly the same n-grams.

    Texts of fewer tokens are copies if they are equal.
    """
    grams = [_ngrams(text, n) or {tuple(text)} for text in texts]
    copies = [False] * len(texts)
    for i, j in combinations(range(len(texts)), 2):
        if len(grams[i] & grams[j]) / len(grams[i] | grams[j]) >= COPY_SIMILARITY:
            copies[i] = copies[j] = True
    return copies


def correlations(groups: Sequence[Sequence[Mapping[str, float]]]) -> dict[tuple[str, str], float]:
    """Return the rank correlation of each two components within a group, averaged over groups.

    `groups` have the components of each attempt. Groups in which either of the two is constant are
    left out.
    """
    by_pair: dict[tuple[str, str], list[float]] = defaultdict(list)
    for attempts in groups:
        for pair in combinations(sorted(set[str]().union(*attempts)), 2):
            pairs = [(a[pair[0]], a[pair[1]]) for a in attempts if pair[0] in a and pair[1] in a]
            if pairs and (value := rank_correlation(*zip(*pairs, strict=True))) is not None:
                by_pair[pair].append(value)
    return {pair: fmean(values) for pair, values in by_pair.items()}


def audit_metrics(rollouts: Sequence[Rollout], trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the metrics of a step whose reward has components, else {}.

    The text of a rollout is its last response.
    """
    scored = [rollout for rollout in rollouts if set(rollout.components) - {AGENT}]
    if not scored:
        return {}
    by_group: dict[str, list[Text]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.transitions:
            last = trajectory.transitions[-1].response_token_ids
            by_group[trajectory.group_id].append(last)
    texts = [text for group in by_group.values() for text in group]
    metrics: Metrics = {}
    if texts:
        copies = [copy for group in by_group.values() for copy in near_copies(group)]
        metrics["audit/repetition_4"] = fmean(map(repetition, texts))
        metrics["audit/near_copies"] = fmean(copies)
    if (distinct := distinct_ngrams(texts)) is not None:
        metrics["audit/distinct_3"] = distinct
    groups: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for rollout in scored:
        groups[rollout.group_id].append(rollout.components)
    for (first, second), value in correlations(list(groups.values())).items():
        metrics[f"audit/correlation/{first}~{second}"] = value
    return metrics


def most_overrated(rollouts: Sequence[Rollout], held_out: str, number: int = 3) -> list[Rollout]:
    """Return rollouts that the reward ranks higher than a held-out component, largest gap first."""
    scored = [r for r in rollouts if r.reward is not None and held_out in r.components]
    if not scored:
        return []
    by_reward = ranks([r.reward or 0.0 for r in scored])
    gaps = by_reward - ranks([r.components[held_out] for r in scored])
    order = sorted(range(len(scored)), key=lambda index: (-gaps[index], index))
    return [scored[index] for index in order[:number] if gaps[index] > 0]


def _ngrams(text: Text, n: int) -> set[Text]:
    return {tuple(text[start : start + n]) for start in range(len(text) - n + 1)}
