"""Tasks in a Grain pipeline with a resumable position, and demonstrations as training sequences."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grain

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.prompt.render import ConversationMemory, Generated, render
from lightning_jax.gateway.prompt.tool_formats import ToolFormat, format_of
from lightning_jax.gateway.request import Function
from lightning_jax.gateway.routing import Routing, read_traits
from lightning_jax.models.config import policy_indices
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.batch import TrainingSequence
from lightning_jax.rl.batching import make_supervised_sequences
from lightning_jax.settings import ConfigError
from lightning_jax.types import Message, Task

Item = TypeVar("Item")
Conversation = Sequence[Message] | Mapping[str, Any]
Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, response ids
OURS = ("train", "agent")  # fields of a demonstration's message that the model never sees


class TaskIterator:
    """Endless shuffled batches of `items`, reshuffled in each pass.

    Batches continue across passes, so all have `batch_size` items. `state()` is a small JSON
    object. After `restore` of it the same batches follow.
    """

    def __init__(self, items: Sequence[Any], batch_size: int, seed: int) -> None:
        if not items:
            raise ConfigError(
                "there are no tasks to train on; check data.root.",
                reason="empty",
                key="data.root",
            )
        pipeline = grain.MapDataset.source(items).seed(seed).shuffle().repeat()
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)
        if batch_size > 1:
            batches = pipeline.batch(batch_size, batch_fn=list)
        else:  # Grain cannot count endless batches of one
            batches = pipeline.map(_alone)
        self._iterator = iter(batches.to_iter_dataset(options))

    def __next__(self) -> list[Any]:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state()

    def restore(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


def _alone(item: Item) -> list[Item]:
    return [item]


def group_tasks(tasks: Sequence[Task], field: str | None, size: int) -> list[list[Task]]:
    """Group tasks with the same value of `field` into lists of at most `size`, in order.

    If `field` is None, neighbors are grouped. Groups put demonstrations with a long shared prefix
    into one batch, where the prefix is computed once.
    """
    by_value: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_value[json.dumps(task.get(field), default=repr) if field else ""].append(task)
    return [
        members[start : start + size]
        for members in by_value.values()
        for start in range(0, len(members), size)
    ]


def evenly_spaced(items: Sequence[Item], limit: int) -> list[Item]:
    """Return at most `limit` items, evenly spaced.

    The start of a file may not be representative.
    """
    if len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def demonstration_sequences(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, routing: Routing | None = None
) -> list[TrainingSequence]:
    """Return one sequence per assistant message, with the prompt that a gateway would have made.

    A conversation is a list of messages or, with tools, OpenAI's fine-tuning record `{"messages":
    [...], "tools": [...]}`. A message with `"train": False` is context only. A response is the
    message's tokens, its tool calls in the format of the model's family, and the end-of-turn token.
    Later prompts hold the same ids, so a conversation is one path of the forest. All tokens have
    the same weight, and the weights sum to 1.

    With several policies, a message goes to the policy of its role, found by the message's
    `"agent"` or the system prompt. Messages without such a role train every policy.
    """
    routing = routing or Routing()
    adapters = policy_indices(routing.policies)
    examples: dict[int | None, list[Pair]] = defaultdict(list)
    for conversation in conversations:
        for facts, pair in _turns(conversation, tokenizer):
            route = routing.route(**facts)
            indices = [route.adapter] if route.policy else [*adapters.values()] or [None]
            for index in indices:
                examples[index].append(pair)
    return [
        replace(sequence, adapter=index)
        for index, pairs in examples.items()
        for sequence in make_supervised_sequences(pairs)
    ]


def _turns(
    conversation: Conversation, tokenizer: Tokenizer
) -> list[tuple[Mapping[str, str], Pair]]:
    """Return (routing facts of its call, (prompt ids, response ids)) for each trained message.

    Both are as the gateway would record them.
    """
    messages, tools = _messages_and_tools(conversation)
    memory, form = ConversationMemory(), format_of(tokenizer)
    end = end_of_turn(tokenizer)
    turns = []
    plain = [{key: value for key, value in m.items() if key not in OURS} for m in messages]
    facts = read_traits({"messages": plain}, {}, {})
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(plain[:index], tools, tokenizer, memory, form)
        text = response_text(message, form)
        response = (*tokenizer.encode(text, special=False), end)
        memory.add(plain[index], Generated(prompt.token_ids, response, prompt.history))
        if message.get("train", True):
            agent = {"agent": str(message.get("agent", ""))}
            turns.append((facts | agent, (prompt.token_ids, response)))
    return turns


def _messages_and_tools(conversation: Conversation) -> tuple[Sequence[Message], Any]:
    if isinstance(conversation, Mapping):
        tools = [tool["function"] for tool in conversation.get("tools", ())]
        return conversation["messages"], [_offered(tool) for tool in tools] or None
    return conversation, None


def _offered(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool as the gateway shows it to the model, without client-only fields."""
    description, parameters = function.get("description") or "", function.get("parameters")
    return Function(function["name"], description, parameters).as_tool()


def response_text(message: Message, form: ToolFormat) -> str:
    """Return the model's text for this assistant message: its content, then its tool calls."""
    text = message.get("content") or ""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if not calls:
        return text
    return text + form.write([(call["name"], json.loads(call["arguments"])) for call in calls])


def end_of_turn(tokenizer: Tokenizer) -> int:
    """Return the token that the chat template puts after an assistant message.

    Raises ValueError if that is not an end-of-response token.
    """
    words = "end-of-turn"
    text = tokenizer.render_chat(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}],
        add_generation_prompt=False,
    )
    after = tokenizer.encode(text.rpartition(words)[2])
    if not after or after[0] not in tokenizer.eos_ids:
        raise InvalidValue(
            f"the chat template puts {after[:1]} after an assistant message, not one of the "
            f"end-of-response tokens {sorted(tokenizer.eos_ids)}; use an instruct model.",
            reason="unsupported",
            key="chat_template",
        )
    return after[0]
