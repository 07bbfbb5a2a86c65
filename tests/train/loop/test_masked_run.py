"""Test of a run whose agent asks for JSON by a schema."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from toy_runs import toy_config

from lightning_jax.engine.config import ServeConfig
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.train.loop import trainer
from lightning_jax.train.watch.curves import describe
from lightning_jax.types import LLM, Task

pytestmark = pytest.mark.slow

TASKS: list[Task] = [{"id": f"t{i}", "question": "abcd"[i]} for i in range(2)]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


async def agent(task: Task, llm: LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        messages: Any = [{"role": "user", "content": task["question"]}]
        reply = await client.chat.completions.create(
            model=llm.model, messages=messages, max_tokens=12, response_format=JSON
        )
    return float(len(reply.choices[0].message.content or ""))


def test_a_run_trains_under_the_masks_that_it_sampled_under(tmp_path: Path) -> None:
    config = toy_config(
        Path("tiny"),
        tmp_path / "run",
        num_steps=2,
        serve=ServeConfig(slots=4, max_len=512, prefill_buckets=(128,)),
        rollout=RolloutConfig(tasks_per_step=2, group_size=4),
        algorithm=AlgorithmConfig(num_minibatches=2, num_epochs=2),
        batch=BatchConfig(rows=1, row_len=512, max_targets=64, head_chunk=16),
    )
    rows = asyncio.run(trainer.train(config, TASKS, TASKS, agent=agent))[:2]
    for row in rows:
        assert (row["train/masked_share"], row["train/adjusted_share"]) == (1.0, 0.0)
        assert row["train/calls_without_mask"] == 0.0 < row["train/tokens_forced"]
        assert row["train/mismatch_kl"] < 1e-9 and row["train/num_updates"] > 1.0
        assert row["time/masks_s"] > 0.0
        assert all(describe(name) for name in row if name != "step")
