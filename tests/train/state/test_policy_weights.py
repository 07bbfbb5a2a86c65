"""Tests of policies with their own weights: their training data and their joint metrics row."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import MeshConfig, PolicyConfig
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.scope import ALL, PolicyScope, pack_by_policy, unpack_by_policy
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.by_policy import join_metrics, join_values, sequences_of
from lightning_jax.testing.records import sequence, trajectory, transition
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import Config, WarmupConfig
from lightning_jax.train.state.replica import Replica

BOTH_SCOPES = (PolicyScope("a", 0), PolicyScope("b", 1))


def test_each_reads_its_own_sequences_and_no_place() -> None:
    made = [dataclasses.replace(sequence([1], [i]), adapter=index) for i, index in ((3, 1), (4, 0))]
    assert sequences_of(PolicyScope("x", 0), made) == [sequence([1], [4])]
    assert sequences_of(PolicyScope("z", 2), made) == []
    assert sequences_of(ALL, made) == made


def test_values_of_each_critic_return_to_their_calls() -> None:
    calls = [
        dataclasses.replace(transition([1], [i]), answered_by=name) for i, name in enumerate("abba")
    ]
    rollouts = [trajectory(*calls), trajectory(calls[1]), trajectory()]
    found = [
        [
            tuple((float(c.response_token_ids[0]),) for c in t.transitions)
            for t in scope.calls(rollouts)
        ]
        for scope in BOTH_SCOPES
    ]
    joined = join_values(rollouts, BOTH_SCOPES, found)
    assert joined == [((0.0,), (1.0,), (2.0,), (3.0,)), ((1.0,),), ()]
    assert join_values(rollouts, (ALL,), [joined]) == joined
    assert [scope.values(rollouts, joined) for scope in BOTH_SCOPES] == found


def test_checkpoints_have_states_by_policy_or_a_single_one() -> None:
    packed = pack_by_policy(BOTH_SCOPES, [1, 2])
    assert packed == {"a": 1, "b": 2} and unpack_by_policy(BOTH_SCOPES, packed) == [1, 2]
    assert pack_by_policy((ALL,), [1]) == 1 and unpack_by_policy((ALL,), 1) == [1]


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
    others = row(3.0, 8.0, grad_norm=4.0, ratio_max=1.0, tokens_naive=40.0, tokens_per_s=10.0)
    some["train/without_teacher"], others["train/without_teacher"] = 3.0, 2.0
    joined = join_metrics(BOTH_SCOPES, [some | {"time/batching_s": 1.0}, others])
    assert joined["train/without_teacher"] == 5.0
    assert joined["train/entropy"] == 7.0  # (1 x 4 + 3 x 8) / 4
    assert joined["train/num_tokens"] == 4.0 and joined["train/num_updates"] == 2.0
    assert joined["train/grad_norm"] == 5.0 and joined["train/ratio_max"] == 2.0
    assert joined["train/tokens_per_s"] == pytest.approx(50 / 6)  # 10 in 2 s, then 40 in 4 s
    assert joined["train/entropy/policy=a"] == 4.0
    assert joined["time/batching_s"] == 1.0 and "time/batching_s/policy=a" not in joined


def test_joint_shares_of_one_length_weigh_its_tokens() -> None:
    share, tokens = "correction_truncated_share/length=long", "num_tokens/length=long"
    some = row(9.0, 0.0, **{share: 0.5, tokens: 3.0})
    others = row(1.0, 0.0, **{share: 0.1, tokens: 1.0})
    joined = join_metrics(BOTH_SCOPES, [some, others])
    assert joined[f"train/{share}"] == pytest.approx(0.4) and joined[f"train/{tokens}"] == 4.0
    assert joined[f"train/{share}/policy=a"] == 0.5


def test_a_policy_without_data_is_no_skipped_update_beside_one_that_learned() -> None:
    nothing = {"train/num_updates": 0.0, "train/skipped_updates": 1.0, "train/padding_share": 0.0}
    joined = join_metrics(BOTH_SCOPES, [row(2.0, 1.0, padding_share=0.5), nothing])
    assert (joined["train/num_updates"], joined["train/skipped_updates"]) == (1.0, 0.0)
    assert joined["train/entropy"] == 1.0 and joined["train/padding_share"] == 0.5
    assert joined["train/skipped_updates/policy=b"] == 1.0
    neither = join_metrics(BOTH_SCOPES, [nothing, nothing])
    assert (neither["train/num_updates"], neither["train/skipped_updates"]) == (0.0, 1.0)
    broken = row(1.0, math.nan) | {"train/skipped_updates": 1.0}
    assert join_metrics(BOTH_SCOPES, [broken, row(1.0, 1.0)])["train/skipped_updates"] == 1.0
    assert join_metrics((ALL,), [nothing]) == nothing


ALONE = Config(
    algorithm=AlgorithmConfig(kl_coef=0.1),
    serve=ServeConfig(max_len=16),
    batch=BatchConfig(rows=8, row_len=16, max_targets=8, head_chunk=4),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    mesh=MeshConfig(fsdp=1),
)
BOTH = dataclasses.replace(ALONE, policies={"a": PolicyConfig(), "b": PolicyConfig()})


def step(first: int, adapters: tuple[int, ...]) -> list[TrainingSequence]:
    """Return one sequence per index, for the policy at that index."""
    made = [
        sequence([1, k, first], [k + 3, first + 1], advantage=(-1.2) ** k)
        for k in range(len(adapters))
    ]
    return [
        dataclasses.replace(sequence, adapter=p) for sequence, p in zip(made, adapters, strict=True)
    ]


STEPS = [step(5, (0, 1, 1, 0, 1)), step(6, (1, 1)), step(7, (0, 1))]  # a has none in step 2


def replica(config: Config, directory: Path) -> Replica:
    config = dataclasses.replace(config, run_dir=str(directory))
    return Replica(config, tiny_model(num_layers=1))


def after(made: Replica, steps: Any) -> Replica:
    for sequences in steps:
        made.update(sequences)
        made.advance()
    return made


def same(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, theirs)


def test_a_policy_ends_where_it_would_alone_and_after_a_break_too(tmp_path: Path) -> None:
    made = after(replica(BOTH, tmp_path / "both"), STEPS[:2])
    made.save({})
    made.close()
    again = replica(BOTH, tmp_path / "both")
    assert again.step == 2
    after(again, STEPS[2:])
    alone = replica(ALONE, tmp_path / "alone")
    start = jax.device_get(alone.states[0].params)
    after(alone, [sequences_of(BOTH_SCOPES[0], step) for step in STEPS])
    same(again.states[0], alone.states[0])
    for state, reference in zip(again.states, again.reference, strict=True):
        embedding = state.params["embed"]["embedding"]
        assert np.abs(embedding - start["embed"]["embedding"]).max() > 1e-3
        same(reference, start)
    for trained in (again, alone):
        trained.close()


def test_frozen_weights_change_in_a_warm_up_only(tmp_path: Path) -> None:
    """They are published after its last step, and not again."""
    config = dataclasses.replace(
        BOTH,
        algorithm=AlgorithmConfig(),
        policies={"a": PolicyConfig(), "b": PolicyConfig(trains=False)},
        warmup=WarmupConfig(num_steps=2, demonstrations="demos.py:make"),
    )
    made, changed = replica(config, tmp_path), []
    for _ in range(4):
        made.advance()
        changed.append([scope.policy for scope in made.changed])
    assert changed == [["a", "b"], ["a", "b"], ["a"], ["a"]]
    made.close()
