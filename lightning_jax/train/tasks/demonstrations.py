"""Demonstrated conversations as training sequences, rendered as the gateway would."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.dialects.all import read_traits
from lightning_jax.gateway.prompt.habits import habits_of
from lightning_jax.gateway.prompt.render import ConversationMemory, Generated, render_prompt
from lightning_jax.gateway.prompt.tool_formats import (
    THOUGHT_MARKS,
    ToolFormat,
    format_of,
    open_thought,
)
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.batches.batching import make_supervised_sequences
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.settings import ConfigError
from lightning_jax.train.tasks.conversations import Demonstration, read_conversations, unusable
from lightning_jax.types import Message

Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, response ids


def demonstration_sequences(
    conversations: Sequence[Any], tokenizer: Tokenizer, routing: Routing | None = None
) -> list[TrainingSequence]:
    """Return one sequence per assistant message, with the prompt that a gateway would have made.

    A conversation is a list of messages or, with tools, OpenAI's fine-tuning record `{"messages":
    [...], "tools": [...]}`. Messages take the forms that the gateway's take. One with `"train":
    False` or `"weight": 0` is context only. A response is the message's thought and text, its tool
    calls in the format of the model's family, and the end-of-turn token. Later prompts hold the
    same ids, so a conversation is one path of the forest. All tokens have the same weight, and the
    weights sum to 1.

    With several policies, a message goes to the policy of its role, found by the message's
    `"agent"` or the system prompt. Messages without such a role train every policy.

    Raises DatasetError that names the conversation, the message and the field that is unusable.
    """
    routing = routing or Routing()
    named = routing.policies.indices
    examples: dict[int | None, list[Pair]] = defaultdict(list)
    for conversation in read_conversations(conversations):
        for facts, pair in _turns(conversation, tokenizer):
            policy = routing.route(**facts).policy
            mine = [named[policy.name]] if policy and policy.name in named else named.values()
            for index in mine or [None]:
                examples[index].append(pair)
    return [
        replace(sequence, adapter=index)
        for index, pairs in examples.items()
        for sequence in make_supervised_sequences(pairs)
    ]


def _turns(
    conversation: Demonstration, tokenizer: Tokenizer
) -> list[tuple[Mapping[str, str], Pair]]:
    """Return (routing facts of its call, (prompt ids, response ids)) for each trained message.

    Both are as the gateway would record them.
    """
    memory, form = ConversationMemory(), format_of(tokenizer)
    end = end_of_turn(tokenizer)
    turns = []
    plain = [message.plain for message in conversation.messages]
    for index, message in enumerate(conversation.messages):
        if message.plain["role"] != "assistant":
            continue
        try:
            prompt = render_prompt(
                plain[:index],
                conversation.tools,
                tokenizer,
                memory,
                form,
                kwargs=conversation.template_kwargs,
            )
            text = thought_text(
                message.plain.get("reasoning_content", ""), prompt.token_ids, tokenizer
            )
        except InvalidValue as error:
            raise unusable(conversation.place(index), error) from error
        if not _is_writable(message.plain):
            continue  # the template writes it into later prompts
        text += response_text(message.plain, form)
        response = (*tokenizer.encode(text, special=False), end)
        memory.add(plain[index], Generated(prompt, response))
        if message.trains:
            facts = read_traits({"messages": plain[:index]}, {}, {})
            turns.append((facts | {"agent": message.agent}, (prompt.token_ids, response)))
    return turns


def _is_writable(message: Message) -> bool:
    """Return True unless a call's arguments are a text that is no JSON, as in a call cut short."""
    calls = message.get("tool_calls", ())
    return all(isinstance(call["function"]["arguments"], dict) for call in calls)


def response_text(message: Message, form: ToolFormat) -> str:
    """Return the model's text for this assistant message: its content, then its tool calls."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message["content"] + (form.write(calls) if calls else "")


def thought_text(thought: str, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return a thought with its marks, as the model would write it after this prompt, or "".

    They are those that the chat template writes around a thought. If it drops thoughts, they are
    the usual ones. A mark that the prompt ends with is not repeated.
    """
    if not thought:
        return ""
    closing = open_thought(prompt_ids, tokenizer)
    usual = next((pair for pair in THOUGHT_MARKS if pair[1] == closing), THOUGHT_MARKS[0])
    around = (f"{usual[0]}\n", f"\n{usual[1]}\n\n")
    before, after = habits_of(tokenizer).thought or around
    return f"{'' if closing else before}{thought}{after}"


def end_of_turn(tokenizer: Tokenizer) -> int:
    """Return the token that the chat template puts after an assistant message.

    Raises ConfigError if it puts none there.
    """
    end_id = tokenizer.template_end_id
    if end_id is None:
        raise ConfigError.unsupported(
            "chat_template",
            "the chat template puts no special token after an assistant message, so the policy "
            "would not learn to end; use an instruct model.",
        )
    return end_id
