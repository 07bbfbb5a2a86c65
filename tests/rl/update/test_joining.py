"""Tests of joining: policies with their own weights, and the updates of a step, in one row."""

import dataclasses
import math

import pytest

from lightning_jax.models.policies import ALL, Policy
from lightning_jax.rl.update.joining import (
    join_metrics,
    join_values,
    merge_updates,
    sequences_of,
)
from lightning_jax.testing.records import sequence, trajectory, transition

ROWS = (Policy("a"), Policy("b", 1))


def test_each_reads_its_own_sequences_and_no_place() -> None:
    made = [dataclasses.replace(sequence([1], [i]), adapter=index) for i, index in ((3, 1), (4, 0))]
    assert sequences_of(Policy("x", 0), made) == [sequence([1], [4])]
    assert sequences_of(Policy("z", 2), made) == []
    assert sequences_of(ALL, made) == made


def test_values_of_each_critic_return_to_their_calls() -> None:
    calls = [
        dataclasses.replace(transition([1], [i]), answered_by=name) for i, name in enumerate("abba")
    ]
    rollouts = [trajectory(*calls), trajectory(calls[1]), trajectory()]
    found = [
        [
            tuple((float(c.response_token_ids[0]),) for c in t.transitions)
            for t in policy.calls(rollouts)
        ]
        for policy in ROWS
    ]
    joined = join_values(rollouts, ROWS, found)
    assert joined == [((0.0,), (1.0,), (2.0,), (3.0,)), ((1.0,),), ()]
    assert join_values(rollouts, (ALL,), [joined]) == joined
    assert [policy.values(rollouts, joined) for policy in ROWS] == found


def row(num_tokens: float, entropy: float, **more: float) -> dict[str, float]:
    found = {
        "train/num_updates": 1.0,
        "train/skipped_updates": 0.0,
        "train/num_tokens": num_tokens,
        "train/entropy": entropy,
    }
    return found | {f"train/{name}": value for name, value in more.items()}


def test_a_joint_row_counts_adds_and_weighs() -> None:
    some = row(1.0, 4.0, grad_norm=3.0, ratio_max=2.0, tokens_naive=10.0, tokens_per_s=5.0)
    some |= {"train/tokens_forest": 6.0, "train/forest_tokens_per_s": 3.0, "train/mfu": 0.3}
    others = row(3.0, 8.0, grad_norm=4.0, ratio_max=1.0, tokens_naive=40.0, tokens_per_s=10.0)
    others |= {"train/tokens_forest": 8.0, "train/forest_tokens_per_s": 2.0, "train/mfu": 0.6}
    some["train/without_teacher"], others["train/without_teacher"] = 3.0, 2.0
    joined = join_metrics(ROWS, [some | {"time/batching_s": 1.0}, others])
    assert joined["train/without_teacher"] == 5.0
    assert joined["train/entropy"] == 7.0  # (1 x 4 + 3 x 8) / 4
    assert joined["train/num_tokens"] == 4.0 and joined["train/num_updates"] == 2.0
    assert joined["train/grad_norm"] == 5.0 and joined["train/ratio_max"] == 2.0
    assert joined["train/mfu"] == pytest.approx((2 * 0.3 + 4 * 0.6) / 6)
    assert joined["train/tokens_per_s"] == pytest.approx(50 / 6)  # 10 in 2 s, then 40 in 4 s
    assert joined["train/entropy/policy=a"] == 4.0
    assert joined["time/batching_s"] == 1.0 and "time/batching_s/policy=a" not in joined


def test_joint_shares_of_one_length_weigh_its_tokens() -> None:
    share, tokens = "correction_truncated_share/length=long", "num_tokens/length=long"
    some = row(9.0, 0.0, **{share: 0.5, tokens: 3.0})
    others = row(1.0, 0.0, **{share: 0.1, tokens: 1.0})
    joined = join_metrics(ROWS, [some, others])
    assert joined[f"train/{share}"] == pytest.approx(0.4) and joined[f"train/{tokens}"] == 4.0
    assert joined[f"train/{share}/policy=a"] == 0.5


def test_a_policy_without_data_is_no_skipped_update_beside_one_that_learned() -> None:
    nothing = {"train/num_updates": 0.0, "train/skipped_updates": 1.0, "train/padding_share": 0.0}
    joined = join_metrics(ROWS, [row(2.0, 1.0, padding_share=0.5), nothing])
    assert (joined["train/num_updates"], joined["train/skipped_updates"]) == (1.0, 0.0)
    assert joined["train/entropy"] == 1.0 and joined["train/padding_share"] == 0.5
    assert joined["train/skipped_updates/policy=b"] == 1.0
    neither = join_metrics(ROWS, [nothing, nothing])
    assert (neither["train/num_updates"], neither["train/skipped_updates"]) == (0.0, 1.0)
    broken = row(1.0, math.nan) | {"train/skipped_updates": 1.0}
    assert join_metrics(ROWS, [broken, row(1.0, 1.0)])["train/skipped_updates"] == 1.0
    assert join_metrics((ALL,), [nothing]) == nothing


def test_merged_metrics_by_hand() -> None:
    rows = [
        {"train/mismatch_kl": 0.1, "train/ratio_max": 2.0, "train/num_tokens": 3.0,
         "train/skipped_updates": 1.0, "train/loss": 1.0},
        {"train/mismatch_kl": 0.5, "train/ratio_max": 1.5, "train/num_tokens": 5.0,
         "train/skipped_updates": 0.0, "train/loss": 2.0, "train/distill_kl": 3.0},
    ]  # fmt: skip
    assert merge_updates(rows) == {
        "train/num_updates": 2.0,
        "train/mismatch_kl": 0.1,
        "train/ratio_max": 2.0,
        "train/num_tokens": 8.0,
        "train/skipped_updates": 1.0,
        "train/loss": pytest.approx(1.5),
        "train/distill_kl": 3.0,  # only the second update had a teacher
    }


def test_merged_metrics_of_one_length_are_means_over_its_tokens() -> None:
    share, tokens = "train/correction_truncated_share/length=long", "train/num_tokens/length=long"
    rows = [{tokens: 3.0, share: 0.5}, {"train/loss": 1.0}, {tokens: 1.0, share: 0.1}]
    assert merge_updates(rows) == {
        "train/num_updates": 3.0,
        "train/loss": 1.0,
        tokens: 4.0,
        share: pytest.approx(0.4),
    }
