"""Tests of rollouts without training: several policies, and roles that the initial weights play."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
import toy_agent
from coded import raises_coded

import lightning_jax as lj
from lightning_jax.models.config import LoraConfig, ModelConfig, PolicyConfig
from lightning_jax.models.formats.load import save_hf
from lightning_jax.models.formats.param_names import ModelError, flatten, unflatten
from lightning_jax.models.lora import adapted
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.testing.tiny import TINY_RUN, tiny_model
from lightning_jax.traces.config import RoleConfig
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.store import TemporaryStore
from lightning_jax.train.config import Config, EvalConfig
from lightning_jax.train.directory import EXPORTED
from lightning_jax.train.loop.inference import PolicySource, open_runner, run_tasks
from lightning_jax.train.state.export import export

ROLES = {
    "speaker": RoleConfig(agent="speaker", policy="a"),
    "listener": RoleConfig(agent="listener", policy="b"),
    "judge": RoleConfig(model="judge", trains=False, served_by="initial"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an initial model, a run of two policies and one of one policy."""
    folder = tmp_path_factory.mktemp("policies")
    for seed, path in enumerate(("initial", "run/policy/a", "run/policy/b", "one/policy")):
        save_hf(folder / path, tiny_model(seed, num_layers=1))
    for run in ("run", "one"):
        (folder / run / EXPORTED).write_text('{"step": 7}')
    return folder


def _config(trained: Path) -> Config:
    config = load_config(Config, [f"{key}={value}" for key, value in TINY_RUN.items()])
    return replace(config, model=ModelConfig(str(trained / "initial"), lora=LoraConfig(rank=2)))


async def test_each_policy_of_a_run_answers_its_role(trained: Path) -> None:
    config = replace(
        _config(trained),
        policies={"a": PolicyConfig(), "b": PolicyConfig()},
        roles=ROLES,
    )
    task = {"id": "t", "question": "Who?"}
    calls = {}
    with closing(TemporaryStore()) as store:
        for step, source in enumerate((PolicySource(run_dir=trained / "run"), PolicySource())):
            agent = toy_agent.three_policies
            async with open_runner(config, source, store, [task], agent=agent) as runner:
                (rollout,) = await run_tasks(runner, [task], "eval", step, 1)
            assert rollout.status == "scored", rollout
            found, _ = spans_to_transitions(store.spans(rollout.rollout_id))
            calls[step] = [(call.policy_versions[0], call.behavior_logprobs[0]) for call in found]
    (speaker, listener, judge), (first, second, third) = calls[0], calls[1]
    assert [version for version, _ in calls[0]] == [7, 7, 0]
    assert len({speaker[1], listener[1], judge[1]}) == 3  # three different weights
    # Before training, adapters change nothing, so all roles get the initial weights.
    assert first[1] == second[1] == third[1] == judge[1]


async def test_policies_with_adapters_answer_as_their_run_served_them(tmp_path: Path) -> None:
    initial = tiny_model(0, num_layers=1)
    save_hf(tmp_path / "initial", initial)
    config = load_config(Config, [f"{key}={value}" for key, value in TINY_RUN.items()])
    config = replace(
        config,
        model=ModelConfig(str(tmp_path / "initial"), "bfloat16", lora=LoraConfig(rank=2)),
        policies={"a": PolicyConfig(), "b": PolicyConfig()},
        roles=ROLES,
    )
    # Adapters so small that no merged weight would be rounded to another one.
    model = adapted(initial, config.model.lora, number=2)
    params = {
        path: leaf + 1e-5 * jnp.arange(2.0)[:, None, None] if path[-1] == "lora_b" else leaf
        for path, leaf in flatten(model.params).items()
    }
    export(tmp_path / "run", model, "", unflatten(params), {"a": 0, "b": 1})
    (tmp_path / "run" / EXPORTED).write_text('{"step": 7}')
    task, agent = {"id": "t", "question": "Who?"}, toy_agent.three_policies
    with closing(TemporaryStore()) as store:
        source = PolicySource(run_dir=tmp_path / "run")
        async with open_runner(config, source, store, [task], agent=agent) as runner:
            (rollout,) = await run_tasks(runner, [task], "eval", 0, 1)
        assert rollout.status == "scored", rollout
        calls, _ = spans_to_transitions(store.spans(rollout.rollout_id))
    a, b, judge = (call.behavior_logprobs[0] for call in calls)
    assert a == judge != b


async def test_a_policy_is_evaluated_in_python(trained: Path) -> None:
    config = replace(_config(trained), eval=EvalConfig(by="kind"))
    tasks = [{"question": "Who?", "kind": "a"}, {"question": "Why?"}]
    found = {}
    for run_dir in (None, trained / "one"):
        rollouts, found[run_dir] = await lj.evaluate(
            config, tasks, agent=toy_agent.plain, run_dir=run_dir, repeats=2
        )
        assert [rollout.task_id for rollout in rollouts] == ["0", "0", "1", "1"]
        assert [rollout.status for rollout in rollouts] == ["scored"] * 4
        assert found[run_dir]["eval/num_tasks"] == 2
        assert found[run_dir]["eval/num_tasks/kind=missing"] == 1
    # An exported policy has the run's template in it, so the file is not needed any more.
    gone = replace(config, model=replace(config.model, chat_template=str(trained / "no.jinja")))
    await lj.evaluate(gone, tasks[:1], agent=toy_agent.plain, run_dir=trained / "one")
    with raises_coded(ModelError, "unreadable", "model.chat_template"):
        await lj.evaluate(gone, tasks[:1], agent=toy_agent.plain)
    with raises_coded(ConfigError, "not_found", str(trained)):
        await lj.evaluate(config, tasks, agent=toy_agent.plain, run_dir=trained)
    (trained / "two/checkpoints/3").mkdir(parents=True)
    several = replace(config, policies={"a": PolicyConfig(), "b": PolicyConfig()})
    with raises_coded(ConfigError, "not_exported", str(trained / "two")):
        await lj.evaluate(several, tasks, agent=toy_agent.plain, run_dir=trained / "two")
