"""A large answer is what a small one is, written where the event loop does not wait for it."""

import json
import threading
from typing import Any

import pytest
from gateway_bench import Bench
from hypothesis import given
from hypothesis import strategies as st

from lightning_jax.gateway import replies
from lightning_jax.gateway.dialects.chat import ChatReply

BODY: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Say something."}],
    "max_tokens": 8,
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 3,
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON, st.integers(0, 6))
def test_pieces_are_the_text_that_dumps_writes(value: Any, depth: int) -> None:
    assert "".join(replies._pieces(value, depth)) == json.dumps(value)


async def test_a_large_answer_is_written_in_a_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    body_of = ChatReply.body

    def body(self: ChatReply, answers: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return body_of(self, answers)

    monkeypatch.setattr(ChatReply, "body", body)
    status, small, headers = await bench.post(BODY)
    monkeypatch.setattr(replies, "SMALL", 31)  # 8 tokens with 3 alternatives each are 32
    assert (await bench.post(BODY))[1]["choices"] == small["choices"]
    other = await bench.post(BODY)
    assert (status, headers["Content-Type"]) == (other[0], other[2]["Content-Type"])
    assert threads == [True, False, False]
