"""Tests of the table of policies: which weights and adapter each reads, and what is fixed."""

import pytest

from lightning_jax.models.config import PolicyConfig
from lightning_jax.models.policies import ALL, INITIAL, SINGLE, TEACHER, Policy, PolicyTable
from lightning_jax.settings import load_config
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.roles import select_policy
from lightning_jax.train.config import Config

POLICIES = {"a": PolicyConfig(), "b": PolicyConfig(trains=False, base="other")}
ROLE = RoleConfig(agent="*")


def test_adapters_share_one_set_of_weights_and_others_have_one_each() -> None:
    adapters = PolicyTable.of({"a": PolicyConfig(), "b": PolicyConfig()}, are_adapters=True)
    assert adapters.rows == (Policy("a", 0, 0), Policy("b", 0, 1))
    assert adapters.sets == (ALL,) and adapters.adapters == {"a": 0, "b": 1}
    weights = PolicyTable.of(POLICIES)
    assert weights.rows == (Policy("a"), Policy("b", 1, None, "other", trains=False))
    assert weights.sets == weights.rows and weights.num_adapters is None
    assert weights.indices == adapters.indices == {"a": 0, "b": 1}
    for is_adapter in (False, True):
        assert PolicyTable.of({}, are_adapters=is_adapter) == SINGLE
    assert SINGLE.sets == (ALL,) and SINGLE.indices == SINGLE.named == {}


@pytest.mark.parametrize("rank", [0, 2])
def test_fixed_rows_are_no_policies_of_the_run(rank: int) -> None:
    config = load_config(
        Config,
        [
            f"model.lora.rank={rank}",
            "policies={a: {}, b: {}}",
            "roles.r={agent: r, trains: false, served_by: initial}",
            "distill.teacher=large",
        ],
    )
    table = config.policy_table
    assert list(table.named) == ["a", "b"] and len(table.sets) == (1 if rank else 2)
    initial, teacher = table.row(INITIAL), table.row(TEACHER)
    adapter = 0 if rank else None
    assert initial == Policy(INITIAL, len(table.sets), adapter, trains=False, is_fixed=True)
    assert teacher is not None and initial is not None
    assert (teacher.base, teacher.weights) == ("large", initial.weights + 1)
    assert load_config(Config, ["policies={a: {}, b: {}}"]).policy_table.row(INITIAL) is None


def test_the_role_or_the_model_of_a_call_names_its_row() -> None:
    table = PolicyTable.of(POLICIES).with_fixed(INITIAL)
    assert select_policy(table, ROLE, "b:latest") == table.rows[1]
    assert select_policy(table, RoleConfig(agent="*", policy="a"), "b") == table.rows[0]
    fixed = RoleConfig(agent="*", trains=False, served_by="initial")
    assert select_policy(table, fixed, "b") == table.rows[2]
    # A model's name reaches no fixed row, and an unknown one nobody.
    assert select_policy(table, ROLE, INITIAL) is select_policy(table, ROLE, "c") is None
    assert select_policy(SINGLE, ROLE, "anything") == ALL
    far = RoleConfig(agent="*", trains=False, served_by="http://127.0.0.1:1/v1")
    assert select_policy(SINGLE, far, "anything") is None
