"""Tests of the settings that an agent seems to need, on spans made by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.rl.config import BatchConfig
from lightning_jax.rollouts.config import RolloutConfig
from lightning_jax.studio.needs import Usage, need_lines, needed_settings, usage_of
from lightning_jax.traces import attributes
from lightning_jax.train.config import Config
from lightning_jax.types import Rollout, Span

DONE = Rollout("r", "t", "g", "train", 0, 0, 1, "scored", reward=1.0)


def call(
    prompt: int,
    reply: int,
    more: dict[str, Any] | None = None,
    *,
    seconds: float = 1.0,
    limit: int = 0,
    end: str = "stop",
) -> Span:
    values = {
        attributes.POLICY: "policy",
        attributes.PROMPT_TOKEN_IDS: tuple(range(prompt)),
        attributes.USAGE_INPUT_TOKENS: prompt,
        attributes.RESPONSE_TOKEN_IDS: tuple(range(reply)),
        attributes.REQUEST_MAX_TOKENS: limit or max(1024 - prompt, 1),
        attributes.RESPONSE_FINISH_REASONS: (end,),
    }
    return Span("t", "s", None, "chat", 10**9, int(10**9 * (1 + seconds)), values | (more or {}))


def usage(*spans: Span, config: Config | None = None, reason: str | None = None) -> Usage:
    pairs = [(replace(DONE, reason=reason), spans)]
    config = config or Config()
    return usage_of(pairs, config.rollout, config.serve, is_remote_policy=False)


def needed_by(found: Usage, config: Config | None = None) -> dict[str, int]:
    config = config or Config()
    return needed_settings(found, config.rollout, config.serve, config.batch)


def test_sizes_and_times_get_room() -> None:
    found = usage(call(2751, 100, seconds=45.0), call(300, 90))
    assert (found.prompt_tokens, found.reply_tokens, found.call_s) == (2751, 100, 45.0)
    assert needed_by(found) == {
        "rollout.max_tokens": 192,  # 1.5 x 100, in steps of 64
        "serve.max_len": 3840,  # 1.25 x 2751 + 192, in steps of 256
        "rollout.call_timeout_s": 90,
    }
    given = ServeConfig(max_len=3840), RolloutConfig(max_tokens=192, call_timeout_s=90.0)
    assert needed_by(found, Config(serve=given[0], rollout=given[1])) == {}
    assert need_lines(Usage(), {}) == []


def test_a_prompt_that_did_not_fit_counts() -> None:
    refused = {attributes.PROMPT_TOKEN_IDS: (), attributes.USAGE_INPUT_TOKENS: 9000}
    span = replace(call(0, 0, refused), error="too long")
    assert needed_by(usage(span)) == {"serve.max_len": 11520}


@pytest.mark.parametrize(
    ("limit", "max_tokens", "late", "wanted"),
    [
        (64, 64, False, 128),  # cut by rollout.max_tokens
        (64, None, False, None),  # by the agent's own limit
        (0, None, False, 1024),  # by serve.max_len
        (64, 64, True, None),  # by a time limit
    ],
)
def test_only_a_reply_that_a_setting_cut_needs_more_tokens(
    limit: int, max_tokens: int | None, late: bool, wanted: int | None
) -> None:
    config = Config(rollout=RolloutConfig(max_tokens=max_tokens))
    more = {attributes.LATE: True} if late else {}
    reply = limit or 512
    found = usage(call(512, reply, more, limit=limit, end="length"), config=config)
    needed = needed_by(found, config)
    assert needed.get("rollout.max_tokens") == wanted
    assert needed.get("rollout.call_timeout_s") == (120 if late else None)


def test_limits_that_were_met_are_doubled() -> None:
    timed_out = replace(call(9, 0, {attributes.ERROR_TYPE: "call_timeout"}), error="504")
    found = usage(timed_out, reason="deadline")
    assert needed_by(found) == {
        "rollout.call_timeout_s": 120,
        "rollout.timeout_s": 240,
    }


def test_a_row_length_that_was_set_grows_with_the_context() -> None:
    config = Config(serve=ServeConfig(max_len=64), batch=BatchConfig(row_len=128))
    needed = needed_by(usage(call(100, 9, limit=9)), config)
    assert needed == {"serve.max_len": 256, "batch.row_len": 256}


def test_another_server_in_place_of_the_policy_counts_tokens_only() -> None:
    answer = {
        "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2000, "completion_tokens": 500},
    }
    values = {
        attributes.POLICY: "policy",
        attributes.SERVED_BY: "http://far/v1",
        attributes.INPUT: "{}",
        attributes.OUTPUT: json.dumps(answer),
    }
    span = Span("t", "s", None, "chat", 10**9, 900 * 10**9, values)
    limits = RolloutConfig(), ServeConfig()
    found = usage_of([(DONE, [span])], *limits, is_remote_policy=True)
    assert needed_by(found) == {"rollout.max_tokens": 768, "serve.max_len": 3328}
    assert not usage_of([(DONE, [span])], *limits, is_remote_policy=False).num_calls
