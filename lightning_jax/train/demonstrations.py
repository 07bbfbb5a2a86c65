"""Demonstrated conversations as training sequences, rendered as the gateway would."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_jax.errors import InvalidValue
from lightning_jax.gateway.prompt.render import ConversationMemory, Generated, render
from lightning_jax.gateway.prompt.tool_formats import (
    THOUGHT_MARKS,
    ToolFormat,
    format_of,
    open_thought,
)
from lightning_jax.gateway.routing import Routing, read_traits
from lightning_jax.models.config import policy_indices
from lightning_jax.models.tokenizer import Tokenizer
from lightning_jax.rl.batching import make_supervised_sequences
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.settings import ConfigError
from lightning_jax.train.conversations import (
    Demonstrated,
    Demonstration,
    read_conversations,
    unusable,
)
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
    adapters = policy_indices(routing.policies)
    examples: dict[int | None, list[Pair]] = defaultdict(list)
    for conversation in read_conversations(conversations):
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
    conversation: Demonstration, tokenizer: Tokenizer
) -> list[tuple[Mapping[str, str], Pair]]:
    """Return (routing facts of its call, (prompt ids, response ids)) for each trained message.

    Both are as the gateway would record them.
    """
    memory, form = ConversationMemory(), format_of(tokenizer)
    end = end_of_turn(tokenizer)
    turns = []
    plain = [message.plain for message in conversation.messages]
    facts = read_traits({"messages": plain}, {}, {})
    for index, message in enumerate(conversation.messages):
        if message.plain["role"] != "assistant":
            continue
        try:
            prompt = render(
                plain[:index],
                conversation.tools,
                tokenizer,
                memory,
                form,
                kwargs=conversation.template_kwargs,
            )
            text = _thought_text(message, prompt.token_ids, tokenizer)
        except InvalidValue as error:
            raise unusable(conversation.place(index), error) from error
        if not _is_writable(message.plain):
            continue  # the template writes it into later prompts
        text += response_text(message.plain, form)
        response = (*tokenizer.encode(text, special=False), end)
        memory.add(plain[index], Generated(prompt.token_ids, response, prompt.history))
        if message.trains:
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


def _thought_text(message: Demonstrated, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the message's thought between the marks of the model's family, or "".

    Raises InvalidValue if the policy would learn a thought and the chat template has no marks.
    """
    if not message.thought:
        return ""
    template = tokenizer.template or ""
    marks = next((pair for pair in THOUGHT_MARKS if pair[1] in template), None)
    if marks is None:
        if not message.trains:
            return ""  # as in a prompt of the gateway
        raise InvalidValue(
            "reasoning_content is set, and the chat template has no marks for thoughts; write "
            "the thought into content, or leave it out",
            reason="unsupported",
            key="reasoning_content",
        )
    begin = "" if open_thought(prompt, tokenizer) else f"{marks[0]}\n"
    return f"{begin}{message.thought}\n{marks[1]}\n\n"


def end_of_turn(tokenizer: Tokenizer) -> int:
    """Return the token that the chat template puts after an assistant message.

    Raises ConfigError if that is not an end-of-response token.
    """
    words = "end-of-turn"
    text = tokenizer.render_chat(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": words}],
        add_generation_prompt=False,
    )
    after = tokenizer.encode(text.rpartition(words)[2])
    if not after or after[0] not in tokenizer.eos_ids:
        raise ConfigError(
            f"the chat template puts {after[:1]} after an assistant message, not one of the "
            f"end-of-response tokens {sorted(tokenizer.eos_ids)}; use an instruct model.",
            reason="unsupported",
            key="chat_template",
        )
    return after[0]
