"""Test of the agent that writes notes, against a scripted server."""

import note_writer
from scripted_server import serving

TASK = {"id": "train0", "question": "Write one short sentence about a zoo."}


async def test_the_request_is_the_prompt_and_no_reward_is_returned() -> None:
    async with serving(["A zoo is fun. It is big."]) as server:
        assert await note_writer.run(TASK, server) is None
        messages = server.bodies[0]["messages"]
    assert messages == [{"role": "user", "content": TASK["question"]}]
