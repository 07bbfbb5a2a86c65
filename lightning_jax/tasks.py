"""Tasks in a Grain pipeline whose place can be saved, and demonstrations as training sequences."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import grain

from lightning_jax.gateway.render import ConversationMemory, Generated, render
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.batching import make_supervised_sequences
from lightning_jax.types import Message, Task, TrainingSequence

Item = TypeVar("Item")


class TaskIterator:
    """Endless shuffled batches of `items`; each pass over them is shuffled anew.

    Batches run over the end of a pass, so all have `batch_size` items. `state()` is a small JSON
    object; after `restore` of it the same batches follow.
    """

    def __init__(self, items: Sequence[Any], batch_size: int, seed: int) -> None:
        if not items:
            raise ValueError("there are 0 tasks to train on; expected at least 1. Check data.root.")
        pipeline = grain.MapDataset.source(items).seed(seed).shuffle().repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
        self._iterator = iter(pipeline.batch(batch_size, batch_fn=list).to_iter_dataset(options))

    def __next__(self) -> list[Any]:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


def group_tasks(tasks: Sequence[Task], field: str | None, size: int) -> list[list[Task]]:
    """Tasks in lists of at most `size` that share the value of `field`, in order of appearance.

    `field` None puts neighbours together. Groups let demonstrations with one long common prefix
    meet in one batch, where the prefix is computed once.
    """
    by_value: dict[Any, list[Task]] = defaultdict(list)
    for task in tasks:
        by_value[task.get(field) if field else None].append(task)
    return [
        members[start : start + size]
        for members in by_value.values()
        for start in range(0, len(members), size)
    ]


def spread(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` items, evenly spaced: a file's beginning may know only one kind."""
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def demonstration_sequences(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer
) -> list[TrainingSequence]:
    """One sequence per assistant message, with the prompt a gateway would have made for it.

    A message with `"train": False` is context only. A response is the message's tokens and the
    end-of-turn token; later prompts hold the same ids, so a conversation is one path of the forest.
    Every token has the same weight, and the weights sum to 1.
    """
    pairs = [pair for messages in conversations for pair in _turns(messages, tokenizer)]
    return make_supervised_sequences(pairs)


def _turns(
    messages: Sequence[Message], tokenizer: Tokenizer
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt ids, response ids) of each assistant message to learn, as the gateway would record
    them.
    """
    memory = ConversationMemory()
    end = end_of_turn(tokenizer)
    turns = []
    plain = [{key: value for key, value in m.items() if key != "train"} for m in messages]
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(plain[:index], None, tokenizer, memory)
        response = (*tokenizer.encode(message["content"], special=False), end)
        memory.add(plain[index], Generated(prompt.token_ids, response, prompt.history))
        if message.get("train", True):
            turns.append((prompt.token_ids, response))
    return turns


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The token that the chat template puts after an assistant's words. Raises ValueError without
    one.
    """
    words = "end-of-turn"
    text = tokenizer.render_chat(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}],
        add_generation_prompt=False,
    )
    after = tokenizer.encode(text.rpartition(words)[2])
    if not after or after[0] not in tokenizer.eos_ids:
        raise ValueError(
            f"the chat template puts {after[:1]} after an assistant's words; expected one of the "
            f"end-of-response tokens {sorted(tokenizer.eos_ids)}. Use an instruct model."
        )
    return after[0]
