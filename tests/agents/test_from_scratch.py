"""Tests of the agent without a framework against a scripted server."""

import from_scratch
import pytest
from scripted_server import serving
from sum_answers import HINT, SYSTEM

TASK = {"id": "s0", "question": "What is 17 + 25?", "answer": 42}


@pytest.mark.parametrize(
    ("replies", "result"),
    [
        (["Answer: 42"], {"reward": 1.0, "replies": 1}),
        (["Answer: 43"], {"reward": 0.1, "replies": 1}),
        (["It is 42.", "Answer: 42"], {"reward": 0.5, "replies": 2}),
        (["", "what?"], {"reward": 0.0, "replies": 2}),
    ],
)
async def test_the_last_reply_is_rewarded(replies: list[str], result: dict[str, float]) -> None:
    async with serving(replies) as server:
        assert await from_scratch.run(TASK, server) == result
        assert len(server.bodies) == len(replies)
        roles = [message["role"] for message in server.bodies[-1]["messages"]]
    assert roles == ["system", *["user", "assistant"] * 3][: 2 + 2 * len(replies)]
    assert server.bodies[0]["messages"][3]["content"] == TASK["question"]
    if len(replies) == 2:
        reply, hint = server.bodies[1]["messages"][4:]
        assert (reply["content"], hint["content"]) == (replies[0], HINT)


async def test_a_prompt_of_the_run_is_the_system_message() -> None:
    async with serving(["Answer: 42"] * 2) as server:
        await from_scratch.run(TASK, server)
        server.prompts = {"system": "Add."}
        await from_scratch.run(TASK, server)
        first, second = (body["messages"][0]["content"] for body in server.bodies)
    assert (first, second) == (SYSTEM, "Add.")
