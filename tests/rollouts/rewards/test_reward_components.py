"""Tests of the weighted sum, what a component sees of a rollout, and comparisons of rewards."""

import pytest
from coded import raises_coded

from lightning_jax.rollouts.config import JudgeConfig, RewardConfig, reward_rules
from lightning_jax.rollouts.rewards.components import (
    attempt_of,
    component_metrics,
    flipped,
    rank_correlation,
    weighted_sum,
)
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.settings.schema import check_rules
from lightning_jax.traces import attributes
from lightning_jax.train.config import Config
from lightning_jax.types import Rollout, Span

ROLLOUT = Rollout("r0", "t", "g", "train", 0, 0, 1, "scored", 0.5, metrics={"f1": 0.25})


def _call(name: str, prompt: str, response: str, sequence: int) -> Span:
    ids = tuple(map(ord, response))
    values = {
        attributes.OPERATION_NAME: attributes.CHAT,
        attributes.POLICY: "policy",
        attributes.PROMPT_TOKEN_IDS: tuple(map(ord, prompt)),
        attributes.RESPONSE_TOKEN_IDS: ids,
        attributes.BEHAVIOR_LOGPROBS: (-1.0,) * len(ids),
        attributes.SAMPLING_LOGPROBS: (-1.0,) * len(ids),
        attributes.POLICY_VERSIONS: (0,) * len(ids),
        attributes.RESPONSE_FINISH_REASONS: ("stop",),
    }
    return Span("t", name, None, name, sequence, sequence + 1, values, sequence=sequence)


def _decode(ids: object) -> str:
    return "".join(map(chr, ids))  # type: ignore[call-overload]


def test_a_transcript_has_what_each_call_adds() -> None:
    spans = [
        _call("a", "ask", "one", 1),
        _call("b", "askone then", "two", 2),
        _call("c", "another", "three", 3),
    ]
    attempt = attempt_of(ROLLOUT, spans, _decode)
    assert [message["content"] for message in attempt.transcript] == [
        *("ask", "one", "then", "two", "another", "three")
    ]
    assert [message["role"] for message in attempt.transcript] == ["user", "assistant"] * 3
    assert (attempt.response, attempt.reward, attempt.metrics) == ("three", 0.5, {"f1": 0.25})
    assert attempt_of(ROLLOUT, [], _decode).response == ""
    empty = _call("d", "askonethentwo and", " ", 4)  # a response without a text is the last one
    assert attempt_of(ROLLOUT, [*spans[:2], empty], _decode).response == ""


def test_the_reward_is_the_weighted_sum_and_held_out_components_count_nothing() -> None:
    rewards = {
        "agent": RewardConfig(weight=0.5),
        "short": RewardConfig(weight=-2.0, function=len),
        "audit": RewardConfig(weight=0.0, function=len),
    }
    assert weighted_sum({"agent": 1.0, "short": 0.25, "audit": 9.0}, rewards, "train") == 0.0
    best = {"best": rewards["short"]}
    assert weighted_sum({"agent": 0.75, "audit": 9.0}, best, "train") == 0.75
    assert weighted_sum({"short": 1.0}, rewards, "train") == -2.0


@pytest.mark.parametrize(
    ("phase", "reward"),
    [("train", 1.75), ("probe", 1.75), ("eval", 0.5), ("sampled", 0.5), ("prompt", 0.5)],
)
def test_a_component_that_only_helps_training_is_left_out_of_evaluations(
    phase: str, reward: float
) -> None:
    rewards = {
        "agent": RewardConfig(weight=0.5),
        "partial": RewardConfig(weight=5.0, function=len, in_evaluations=False),
    }
    assert weighted_sum({"agent": 1.0, "partial": 0.25}, rewards, phase) == reward


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [5.0, 4.0, -9.0]) == pytest.approx(-1.0)
    # Ranks 1.5, 1.5, 3 and 1, 2, 3: products of deviations sum to 1.5, squares to 1.5 and 2.
    assert rank_correlation([0.0, 0.0, 1.0], [1.0, 2.0, 3.0]) == pytest.approx(1.5 / 3.0**0.5)
    assert rank_correlation([1.0, 1.0], [1.0, 2.0]) is None
    assert rank_correlation([], []) is None


def test_an_advantage_flips_if_its_sign_changes() -> None:
    assert flipped([0.0, 1.0, 1.0], [1.0, 0.0, 1.0]) == [True, True, False]
    assert flipped([0.1, 0.1, 0.1], [1.0, 0.0, 5.0]) == [False] * 3
    assert flipped([3.0], [4.0]) == [False]


def test_components_have_a_mean_and_a_spread() -> None:
    def of(**components: float) -> Rollout:
        return Rollout("r", "t", "g", "train", 0, 0, 1, "scored", 0.0, components=components)

    metrics = component_metrics([of(a=1.0, b=3.0), of(a=0.0), of()], "reward/")
    assert metrics == {
        "reward/a_mean": 0.5,
        "reward/a_std": 0.5,
        "reward/b_mean": 3.0,
        "reward/b_std": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "reward", "reason", "key"),
    [
        ("agent", RewardConfig(function=len), "conflict", "rewards.agent"),
        ("short", RewardConfig(), "conflict", "rewards.short"),
        ("short", RewardConfig(function=len, group=len), "conflict", "rewards.short"),
        ("a b", RewardConfig(function=len), "invalid", "rewards.a b"),
        ("short", RewardConfig(weight=0.0, function=len), "conflict", "rewards"),
    ],
)
def test_an_unusable_component_is_refused(
    name: str, reward: RewardConfig, reason: str, key: str
) -> None:
    with raises_coded(ValueError, reason, key):
        check_rules(None, reward_rules({name: reward}))


def test_a_judge_is_a_policy_of_the_run() -> None:
    settings = ["rewards.best.judge.served_by=writer"]
    with raises_coded(ConfigError, "unknown", "rewards.best.judge.served_by"):
        load_config(Config, [*settings, "policies={reader: {}}"])
    load_config(Config, [*settings, "policies={writer: {}}"])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"served_by": "http://me:pw@host/v1", "served_model": "m"}, "served_by"),
        ({"served_by": "http://host/v1"}, "served_model"),
        ({"served_model": "m"}, "served_model"),
        ({"api_key_env": "KEY"}, "api_key_env"),
        ({"rubric": "r.yaml", "repeats": 2}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_an_unusable_judge_is_refused(settings: dict, key: str) -> None:
    with pytest.raises(ValueError) as caught:
        JudgeConfig(**settings)
    assert caught.value.key == key  # type: ignore[attr-defined]
