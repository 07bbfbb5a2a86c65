"""Tests of rollouts without training: several policies, and roles that the initial weights play."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import toy_agent

from lightning_jax.models.config import LoraConfig, ModelConfig, PolicyConfig
from lightning_jax.models.formats.load import save_hf
from lightning_jax.settings import load_config
from lightning_jax.testing.tiny import TINY_RUN, tiny_model
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.store import TemporaryStore
from lightning_jax.train.config import Config
from lightning_jax.train.export import EXPORTED
from lightning_jax.train.inference import PolicySource, open_runner, run_tasks

ROLES = {
    "speaker": RoleConfig(agent="speaker", policy="a"),
    "listener": RoleConfig(agent="listener", policy="b"),
    "judge": RoleConfig(model="judge", trains=False, served_by="initial"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a finished run of two policies, with the initial model beside it."""
    folder = tmp_path_factory.mktemp("policies")
    for seed, path in enumerate(("initial", "run/policy/a", "run/policy/b")):
        save_hf(folder / path, tiny_model(seed, num_layers=1))
    (folder / "run" / EXPORTED).write_text('{"step": 7}')
    return folder


async def test_each_policy_of_a_run_answers_its_role(trained: Path) -> None:
    settings = [f"{key}={value}" for key, value in TINY_RUN.items()]
    config = replace(
        load_config(Config, settings),
        model=ModelConfig(str(trained / "initial"), lora=LoraConfig(rank=2)),
        policies={"a": PolicyConfig(), "b": PolicyConfig()},
        roles=ROLES,
    )
    task = {"id": "t", "question": "Who?"}
    calls = {}
    with closing(TemporaryStore()) as store:
        for step, source in enumerate((PolicySource(run_dir=trained / "run"), PolicySource())):
            async with open_runner(config, source, store, agent=toy_agent.three_policies) as runner:
                (rollout,) = await run_tasks(runner, [task], "eval", step, 1)
            assert rollout.status == "scored", rollout
            found, _ = spans_to_transitions(store.spans(rollout.rollout_id))
            calls[step] = [(call.policy_versions[0], call.behavior_logprobs[0]) for call in found]
    (speaker, listener, judge), (first, second, third) = calls[0], calls[1]
    assert [version for version, _ in calls[0]] == [7, 7, 0]
    assert len({speaker[1], listener[1], judge[1]}) == 3  # three different weights
    # Before training, adapters change nothing, so all roles get the initial weights.
    assert first[1] == second[1] == third[1] == judge[1]
