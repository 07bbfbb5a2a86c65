"""Tests of the search for prompts, with a stand-in for the model that proposes them."""

import asyncio
import dataclasses
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import toy_agent
from coded import raises_coded
from scripted_server import Script, serving
from toy_runs import ahead_config

from lightning_jax.errors import InvalidValue
from lightning_jax.rollouts.agents.outcome import DEADLINE_IN_QUEUE
from lightning_jax.rollouts.config import PROMPT, AgentConfig, PromptSearchConfig, RewardConfig
from lightning_jax.rollouts.runner import TooManyFailures
from lightning_jax.settings import ConfigError
from lightning_jax.traces import attributes
from lightning_jax.traces.store import Store, StoreError
from lightning_jax.train.config import Config
from lightning_jax.train.loop import trainer
from lightning_jax.train.loop.inference import evaluate
from lightning_jax.train.prompts.chosen import (
    Chosen,
    forget_chosen,
    present_prompts,
    read_chosen,
    write_chosen,
)
from lightning_jax.train.prompts.gepa import check_measured
from lightning_jax.train.prompts.search import is_due
from lightning_jax.train.watch.curves import describe
from lightning_jax.train.watch.metrics import read_metrics
from lightning_jax.types import LLM, Prompts, Rollout, Task

TASKS: list[Task] = [{"id": f"t{i}", "question": "abcdefghij"[i]} for i in range(10)]
GOOD = "Here it is:\n```\nbe good\n```"
SEARCH: dict[str, Any] = dict(num_train=2, num_dev=2, minibatch=2, max_rollouts=12, num_fresh=4)


async def prompted(task: Task, llm: LLM) -> float:
    """Call the policy, and earn what the prompt says plus a little for the reply."""
    return float("good" in llm.prompts["writer"]) + 0.1 * await toy_agent.run(task, llm)


def config(run_dir: Path, server: Script | None = None, every: int = 2, **changes: Any) -> Config:
    named: dict[str, Any] = (
        {} if server is None else {"served_by": server.base_url, "served_model": "m"}
    )
    search = PromptSearchConfig(every=every, **SEARCH, **named)
    made = dataclasses.replace(ahead_config(run_dir, retry_delay_s=0.0), num_steps=2)
    return dataclasses.replace(
        made, prompts={"writer": "be brief"}, prompt_search=search, **changes
    )


def stored(run_dir: Path, phase: str) -> list[Rollout]:
    with closing(Store(run_dir / "store.sqlite", read_only=True)) as store:
        return store.rollouts(phase=phase)


def prompts_of(run_dir: Path, rollouts: list[Rollout]) -> Counter[str]:
    with closing(Store(run_dir / "store.sqlite", read_only=True)) as store:
        spans = [span for r in rollouts for span in store.spans(r.rollout_id)]
    found = [span.attributes.get(attributes.PROMPTS) for span in spans]
    return Counter(text for text in found if text)


def test_a_prompt_that_is_not_declared_is_one_sentence():
    llm = LLM("u", "k", "m", {"writer": "be brief"})
    assert llm.prompts["writer"] == "be brief" and LLM(**dataclasses.asdict(llm)) == llm
    with pytest.raises(KeyError, match=r"prompts\.reader"):
        llm.prompts["reader"]
    assert Prompts() == {}


@pytest.mark.parametrize(
    ("every", "policy_steps", "expected"),
    [
        (2, range(2), [0]),
        (2, range(5), [0, 2, 4]),
        (2, range(1, 6), [1, 3, 5]),  # after a warm-up of one step
        (2, range(1, 1), [1, 3, 5]),  # no policy step: at the end
        (0, range(5), []),
    ],
)
def test_searches_come_before_every_nth_policy_step(
    every: int, policy_steps: range, expected: list[int]
):
    assert [step for step in range(7) if is_due(step, every, policy_steps)] == expected


def test_present_prompts_are_the_last_chosen_up_to_a_step():
    chosen = [Chosen(0, {"a": "one", "gone": "x"}), Chosen(4, {"a": "two"})]
    assert present_prompts({"a": "zero", "b": "new"}, chosen) == {"a": "two", "b": "new"}
    assert present_prompts({"a": "zero"}, chosen, step=3) == {"a": "one"}


def test_a_record_from_before_the_fresh_tasks_is_read(tmp_path: Path):
    (tmp_path / "prompts.yaml").write_text(
        "- {step: 0, prompts: {a: one}, score_before: 0.25, score_after: 0.5}\n"
    )
    assert read_chosen(tmp_path) == [Chosen(0, {"a": "one"}, 0.25, 0.5)]


def test_a_change_forgets_what_searches_chose_for_discarded_steps_and_prompts(tmp_path: Path):
    first, later = Chosen(0, {"a": "one", "b": "uno"}), Chosen(4, {"a": "two", "b": "dos"})
    write_chosen(tmp_path, [first, later])
    forget_chosen(tmp_path, [], 4)
    assert read_chosen(tmp_path) == [first, later]
    forget_chosen(tmp_path, ["optimizer.learning_rate"], 4)  # keeps the rollouts of step 4
    assert read_chosen(tmp_path) == [first, later]
    forget_chosen(tmp_path, ["rollout.timeout_s"], 4)
    assert read_chosen(tmp_path) == [first]
    forget_chosen(tmp_path, ["prompts.a"], 4)
    assert read_chosen(tmp_path) == [Chosen(0, {"b": "uno"})]


async def test_a_better_prompt_is_found_used_and_kept(tmp_path: Path):
    async with serving([GOOD] * 20) as server:
        made = config(tmp_path / "run", server)
        rows = await trainer.train(made, TASKS[:8], TASKS[8:], agent=prompted)
        number = len(server.bodies)
        assert number >= 1 and "be brief" in server.bodies[0]["messages"][0]["content"]
        assert "reward 0" in server.bodies[0]["messages"][0]["content"]
        # The same command does nothing more: neither a search nor a rollout is repeated.
        again = await trainer.train(made, TASKS[:8], TASKS[8:], agent=prompted)
        assert len(server.bodies) == number and len(again) == len(rows)
    first = rows[0]
    assert first["prompts/changed"] == 1.0 and first["prompts/failed"] == 0.0
    assert first["prompts/score_before"] < 0.5 < 1.0 <= first["prompts/score_after"]
    assert "prompts/changed" not in rows[1]
    assert all(describe(name) for name in first if name.startswith("prompts/"))
    (chosen,) = read_chosen(tmp_path / "run")
    assert chosen.step == 0 and chosen.prompts == {"writer": "be good"}
    assert chosen.num_fresh_tasks == first["prompts/num_fresh_tasks"] == 4
    assert first["prompts/p_value"] == 1 / 16  # better on all four
    assert first["prompts/fresh_before"] < 0.5 < 1.0 <= first["prompts/fresh_after"]
    searched = stored(tmp_path / "run", PROMPT)
    assert len(searched) == first["prompts/num_rollouts"] <= 12 + 2 + 2 * 4
    assert {r.task_id for r in searched} <= {task["id"] for task in TASKS[:8]}
    used = prompts_of(tmp_path / "run", searched)
    assert used['{"writer": "be brief"}'] >= 4 and used['{"writer": "be good"}'] >= 2
    trained = stored(tmp_path / "run", "train")
    assert len(trained) == 12 and all(r.reward is not None and r.reward >= 1 for r in trained)
    assert set(prompts_of(tmp_path / "run", trained)) == {'{"writer": "be good"}'}
    assert rows[0]["rollout/num_rollouts"] == 6.0
    # An evaluation of the run uses them, too.
    rollouts, _ = await evaluate(made, TASKS[:2], agent=prompted, run_dir=tmp_path / "run")
    assert all(rollout.reward is not None and rollout.reward >= 1 for rollout in rollouts)


async def test_a_prompt_that_had_luck_on_the_dev_tasks_is_not_used(tmp_path: Path):
    num_lucky = 0

    async def lucky(task: Task, llm: LLM) -> float:
        nonlocal num_lucky
        is_lucky = "good" in llm.prompts["writer"] and num_lucky < 4  # a minibatch, the dev tasks
        num_lucky += is_lucky
        return float(is_lucky) + 0.1 * await toy_agent.run(task, llm)

    async with serving([GOOD] * 40) as server:
        made = config(tmp_path / "run", server, num_steps=0)
        (row,) = await trainer.train(made, TASKS[:8], TASKS[8:], agent=lucky)
    assert num_lucky == 4 and row["prompts/num_candidates"] > 1
    assert row["prompts/changed"] == 0.0 and row["prompts/failed"] == 0.0
    assert row["prompts/score_after"] == row["prompts/score_before"]
    assert row["prompts/num_fresh_tasks"] == 3 and row["prompts/p_value"] == 1.0
    assert row["prompts/fresh_after"] == row["prompts/fresh_before"]
    (chosen,) = read_chosen(tmp_path / "run")
    assert chosen.prompts == {"writer": "be brief"}


async def test_prompts_that_earn_no_more_change_nothing(tmp_path: Path):
    tasks = [task | {"table": {(1, 2): 3}} for task in TASKS]  # need not have a JSON form
    async with serving(["```\nbe quick\n```"] * 40) as server:
        made = config(tmp_path / "run", server, num_steps=0)
        rows = await trainer.train(made, tasks[:8], tasks[8:], agent=prompted)
    (row,) = rows  # without policy steps, the search is all there is
    assert row["prompts/changed"] == 0.0 and row["prompts/num_rollouts"] > 2
    assert read_chosen(tmp_path / "run")[0].prompts == {"writer": "be brief"}


@pytest.mark.parametrize("replies", [[500] * 40, [""] * 40], ids=["down", "empty"])
async def test_a_model_that_fails_leaves_the_prompts(tmp_path: Path, replies: list[Any], caplog):
    async with serving(replies) as server:
        made = config(tmp_path / "run", server)
        rows = await trainer.train(made, TASKS[:8], TASKS[8:], agent=prompted)
    assert rows[0]["prompts/failed"] == 1.0 and rows[0]["prompts/failed_calls"] >= 1.0
    assert rows[0]["prompts/changed"] == 0.0 and rows[0]["rollout/num_rollouts"] == 6.0
    assert "ended early" in caplog.text


@pytest.mark.parametrize("text", ["good " * 50, "good \ud800"], ids=["too_long", "not_utf8"])
async def test_a_proposal_that_cannot_be_used_is_refused(tmp_path: Path, text: str):
    async with serving([f"```\n{text}\n```"] * 40) as server:
        made = config(tmp_path / "run", server, num_steps=0)
        made = dataclasses.replace(
            made, prompt_search=dataclasses.replace(made.prompt_search, max_chars=100)
        )
        (row,) = await trainer.train(made, TASKS[:8], TASKS[8:], agent=prompted)
    assert row["prompts/num_refused"] >= 1.0 and row["prompts/changed"] == 0.0


async def test_a_search_that_a_stop_ends_is_begun_again_with_new_rollouts(tmp_path: Path):
    calls = 0

    async def slow(task: Task, llm: LLM) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:
            training.cancel()
        return await prompted(task, llm)

    async with serving([GOOD] * 20) as server:
        made = config(tmp_path / "run", server)
        training = asyncio.create_task(trainer.train(made, TASKS[:8], TASKS[8:], agent=slow))
        with pytest.raises(asyncio.CancelledError):
            await training
        assert read_chosen(tmp_path / "run") == []
        before = {rollout.rollout_id for rollout in stored(tmp_path / "run", PROMPT)}
        assert before
        rows = await trainer.train(made, TASKS[:8], TASKS[8:], agent=prompted)
    assert rows[0]["prompts/changed"] == 1.0
    ids = [rollout.rollout_id for rollout in stored(tmp_path / "run", PROMPT)]
    assert len(set(ids)) == len(ids) == len(before) + rows[0]["prompts/num_rollouts"]


async def test_a_new_text_in_the_settings_replaces_what_a_search_chose(tmp_path: Path):
    async with serving([GOOD] * 40) as server:
        made = config(tmp_path / "run", server)
        await trainer.train(made, TASKS[:8], TASKS[8:], agent=prompted)
        longer = dataclasses.replace(made, prompts={"writer": "be calm"}, num_steps=4)
        await trainer.train(longer, TASKS[:8], TASKS[8:], agent=prompted)
    searched = [r for r in stored(tmp_path / "run", PROMPT) if r.step == 2]
    assert prompts_of(tmp_path / "run", searched)['{"writer": "be calm"}'] >= 2
    assert read_chosen(tmp_path / "run")[-1].prompts == {"writer": "be good"}


async def test_an_error_of_the_run_ends_the_search(tmp_path: Path):
    calls = 0

    async def damages(task: Task, llm: LLM) -> float:
        nonlocal calls
        calls += 1
        if calls == 3:  # GEPA has begun, and goes on after errors
            with closing(sqlite3.connect(tmp_path / "run" / "store.sqlite")) as db:
                db.execute("DROP TABLE spans")
        return await prompted(task, llm)

    async with serving([GOOD] * 20) as server:
        made = config(tmp_path / "run", server)
        with pytest.raises(StoreError):
            await asyncio.wait_for(trainer.train(made, TASKS[:8], TASKS[8:], agent=damages), 60)


async def test_the_initial_policy_can_propose(tmp_path: Path):
    made = config(tmp_path / "run")
    serve = dataclasses.replace(made.serve, max_len=2048, prefill_buckets=(512,))
    batch = dataclasses.replace(made.batch, row_len=2048)
    search = dataclasses.replace(made.prompt_search, max_tokens=16)
    made = dataclasses.replace(made, serve=serve, batch=batch, prompt_search=search, num_steps=0)
    (row,) = await trainer.train(made, TASKS[:8], TASKS[8:], agent=prompted)
    assert row["prompts/calls"] >= 1.0 and row["prompts/failed_calls"] == 0.0
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["prompts/changed"] == 0.0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"prompts": {}}, "prompts"),
        ({"prompts": {"a b": "text"}}, "prompts.a b"),
        ({"prompts": {"a": " "}}, "prompts.a"),
        ({"prompts": {"a": "text", "b": "x" * 8001}}, "prompts.b"),
        ({"rewards": {"best": RewardConfig(group="file.py:best")}}, "rewards"),
        ({"prompt_search": PromptSearchConfig(every=1, served_by="nobody")}, None),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, changes: Any, key: str | None):
    with pytest.raises(InvalidValue) as caught:
        dataclasses.replace(config(tmp_path), **changes)
    assert caught.value.key == (key or "prompt_search.served_by")


def test_prompts_longer_than_a_variable_are_refused_for_programs(tmp_path: Path):
    made = config(tmp_path)
    long = {"prompts": {"a": "x" * 2**17}, "prompt_search": PromptSearchConfig()}
    assert dataclasses.replace(made, **long).prompts["a"]  # the agent is in this process
    program = dataclasses.replace(made, agent=AgentConfig(command=("true",)))
    with pytest.raises(InvalidValue) as caught:
        dataclasses.replace(program, **long)
    assert caught.value.key == "prompts" and caught.value.reason == "too_large"
    # 17 short prompts that may grow to 8,000 characters each
    grown = {"prompts": {f"p{number}": "text" for number in range(17)}}
    with pytest.raises(InvalidValue) as caught:
        dataclasses.replace(program, **grown)
    assert caught.value.key == "prompts"


@pytest.mark.parametrize("changes", [{"ahead": 2}, {"agent_failure_reward": None}], ids=str)
def test_rollouts_that_a_search_cannot_use_are_refused(tmp_path: Path, changes: Any):
    made = config(tmp_path)
    with pytest.raises(InvalidValue) as caught:
        dataclasses.replace(made, rollout=dataclasses.replace(made.rollout, **changes))
    (name,) = changes
    assert caught.value.key == f"rollout.{name}"


async def test_what_a_search_lacks_is_told_before_the_model_is_loaded(tmp_path: Path):
    few = config(tmp_path / "few")
    with raises_coded(ConfigError, "too_few", "prompt_search.num_dev"):
        await trainer.train(few, TASKS[:3], TASKS[8:], agent=prompted)
    search = PromptSearchConfig(
        every=1, served_by="http://localhost:1/v1", served_model="m", api_key_env="NO_SUCH_KEY"
    )
    unset = dataclasses.replace(few, prompt_search=search)
    with raises_coded(ConfigError, "missing", "NO_SUCH_KEY"):
        await trainer.train(unset, TASKS, TASKS[8:], agent=prompted)
    assert not (tmp_path / "few").exists()


def test_rollouts_that_only_waited_say_nothing_about_a_prompt():
    wrong = Rollout("a", "t", "g", PROMPT, 0, 0, 1, "agent_failure", 0.0, "ValueError")
    waited = dataclasses.replace(wrong, rollout_id="b", reason=DEADLINE_IN_QUEUE)
    broken = dataclasses.replace(wrong, rollout_id="c", reward=None)
    check_measured([wrong, dataclasses.replace(wrong, status="scored", reward=1.0)])
    for rollout in (waited, broken):
        with raises_coded(TooManyFailures, "too_many_failures", rollout.rollout_id):
            check_measured([wrong, rollout])
