"""Tests that saved responses are forgotten, oldest first, if they take too much memory."""

from lightning_jax.gateway.dialects.saved_responses import SavedConversations, SavedResponse


def _saved(*messages: dict, filler: str = "") -> SavedResponse:
    return SavedResponse({"metadata": {"x": filler}}, messages)


def test_the_oldest_are_forgotten_over_the_limit() -> None:
    kept = SavedConversations(250_000)
    for number in range(10):
        kept.save(str(number), _saved(filler="x" * 50_000))
    assert [kept.get(str(number)) is not None for number in range(10)] == [False] * 6 + [True] * 4
    assert kept.num_forgotten == 6 and kept.num_bytes <= 250_000


def test_one_that_is_larger_than_the_limit_is_not_kept() -> None:
    kept = SavedConversations(1000)
    kept.save("a", _saved(filler="x" * 2000))
    assert kept.get("a") is None and kept.num_bytes == 0


def test_messages_that_responses_share_count_once() -> None:
    kept = SavedConversations(10**6)
    messages = [{"role": "user", "content": "x" * 1000} for _ in range(100)]
    for number in range(1, 101):
        kept.save(str(number), _saved(*messages[:number]))
    assert 100_000 < kept.num_bytes < 250_000
    for number in range(1, 101):
        kept.forget(str(number))
    assert kept.num_bytes == 0
