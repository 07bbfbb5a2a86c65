"""Demonstrated conversations as training sequences, rendered as the gateway would."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.messages import normalize_message
from lightning_jax.gateway.prompt.habits import habits_of
from lightning_jax.gateway.prompt.render import ConversationMemory, Generated, render
from lightning_jax.gateway.prompt.tool_formats import (
    THOUGHT_MARKS,
    ToolFormat,
    format_of,
    open_thought,
)
from lightning_jax.gateway.request import Function
from lightning_jax.gateway.routing import Routing, read_traits
from lightning_jax.models.config import policy_indices
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.batching import make_supervised_sequences
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.types import Message

Conversation = Sequence[Message] | Mapping[str, Any]
Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, response ids
OURS = ("train", "agent")  # fields of a demonstration's message that the model never sees


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
        if thought := normalize_message(message, f"messages[{index}]").get("reasoning_content"):
            text = thought_text(thought, prompt.token_ids, tokenizer) + text
        response = (*tokenizer.encode(text, special=False), end)
        memory.add(plain[index], Generated(prompt.token_ids, response, prompt.history))
        if message.get("train", True):
            agent = {"agent": str(message.get("agent", ""))}
            turns.append((facts | agent, (prompt.token_ids, response)))
    return turns


def _messages_and_tools(conversation: Conversation) -> tuple[Sequence[Message], Any]:
    """Return the messages, and the tools as the gateway shows them to the model."""
    if not isinstance(conversation, Mapping):
        return conversation, None
    functions = [tool["function"] for tool in conversation.get("tools", ())]
    tools = [  # without fields that only clients read
        Function(f["name"], f.get("description") or "", f.get("parameters")).as_tool()
        for f in functions
    ]
    return conversation["messages"], tools or None


def response_text(message: Message, form: ToolFormat) -> str:
    """Return the model's text for this assistant message: its content, then its tool calls."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return (message.get("content") or "") + (form.write(calls) if calls else "")


def thought_text(thought: str, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return a thought with its marks, as the model would write it after this prompt.

    They are those that the chat template writes around a thought. If it drops thoughts, they are
    the usual ones. A mark that the prompt ends with is not repeated.
    """
    closing = open_thought(prompt_ids, tokenizer)
    usual = next((pair for pair in THOUGHT_MARKS if pair[1] == closing), THOUGHT_MARKS[0])
    around = (f"{usual[0]}\n", f"\n{usual[1]}\n\n")
    before, after = habits_of(tokenizer).thought or around
    return f"{'' if closing else before}{thought}{after}"


def end_of_turn(tokenizer: Tokenizer) -> int:
    """Return the token that the chat template puts after an assistant message.

    Raises ValueError if that is not an end-of-response token.
    """
    end_id = tokenizer.template_end_id
    if end_id is None:
        raise InvalidValue(
            "the chat template ends an assistant message with none of the end-of-response tokens "
            f"{sorted(tokenizer.eos_ids)}; use an instruct model.",
            reason="unsupported",
            key="chat_template",
        )
    return end_id
