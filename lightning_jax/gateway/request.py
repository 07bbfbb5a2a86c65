"""Dialect-neutral form of a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from lightning_jax.errors import InvalidValue, brief
from lightning_jax.gateway.errors import ApiError, invalid, to_api_error
from lightning_jax.models.template_limits import check_kwargs

POLICY = "policy"
AGENT_HEADER = "x-agent-name"
MAX_CHOICES = 64
MAX_MESSAGES = 4096
MAX_TOOLS = 256

JsonSchema = dict[str, Any]
# Variables for the chat template of a request that turns thinking off in its dialect's own way.
NO_THINKING: Mapping[str, Any] = {"enable_thinking": False}


@dataclass(frozen=True)
class Function:
    """Function that the policy may call. If `parameters` is None, it takes any object."""

    name: str
    description: str = ""
    parameters: JsonSchema | None = None

    def as_tool(self) -> dict[str, Any]:
        """Return the function in OpenAI's chat format, which chat templates expect."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Choice that the policy may ("auto"), must ("required") or must not ("none") call a function.

    `names` are the functions to choose from if a call is required. Empty means any.
    """

    mode: str = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyRequest:
    """Content of one request. None leaves a choice to the server.

    Exactly one of `messages` and `prompts` is set. `messages` are in OpenAI's chat format and
    rendered by the chat template. `prompts` are texts or token ids. Ids are used unchanged.
    """

    dialect: str  # chat, completions, responses, ...
    model: str
    id_prefix: str = ""  # a response's id is this plus a random token
    agent: str = ""
    messages: tuple[Any, ...] | None = None  # not validated before rendering
    prompts: tuple[str | tuple[int, ...], ...] | None = None
    add_special_tokens: bool = True  # to prompts that are texts: those of the tokenizer, like BOS
    functions: tuple[Function, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output_schema: JsonSchema | None = None  # schema of a JSON answer; {}: any object
    num_choices: int = 1  # for each prompt
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[str, Any] = field(default_factory=dict)  # as the caller sent it
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    score_prompt: bool = False  # also return the log-probabilities of the prompt's tokens
    stream: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # name tokens token_id:ID in log-probabilities
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Kinds of tools and of content that the policy has no use for: web_search, image, ...
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert (self.messages is None) != (self.prompts is None), "messages or prompts, not both"
        if self.messages is not None and len(self.messages) > MAX_MESSAGES:
            raise invalid(
                f"messages has {len(self.messages)} entries; expected at most {MAX_MESSAGES}.",
                "messages",
                reason="too_many",
            )
        _check_tools(self.functions, self.tool_choice)
        try:
            check_kwargs(self.chat_template_kwargs)
        except InvalidValue as error:
            raise to_api_error(error, "chat_template_kwargs") from error


def _check_tools(functions: tuple[Function, ...], choice: ToolChoice) -> None:
    if len(functions) > MAX_TOOLS:
        message = f"tools has {len(functions)} entries; expected at most {MAX_TOOLS}."
        raise invalid(message, "tools", reason="too_many")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        message = f"tools has two functions named {brief(twice)}; rename one."
        raise invalid(message, "tools", reason="duplicate")
    if choice.mode == "required" and not functions:
        message = "tool_choice requires a call, but tools is empty; pass tools."
        raise invalid(message, "tools", reason="empty")
    if unknown := [name for name in choice.names if name not in names]:
        message = (
            f"tool_choice names {brief(unknown[0])}, which is not in tools; expected one of "
            f"{brief(names)}."
        )
        raise invalid(message, "tool_choice", reason="unknown_tool")


def is_policy(model: str) -> bool:
    """Return whether the model name is the policy's, with or without an agent."""
    name, colon, agent = model.partition(":")
    return name == POLICY and bool(colon) == bool(agent)


def is_accepted(model: str, accepted: Sequence[str]) -> bool:
    """Return whether the model name matches one of the accepted patterns."""
    return any(fnmatchcase(model.removesuffix(":latest"), pattern) for pattern in accepted)


def check_model(model: str, accepted: Sequence[str]) -> None:
    """Raise ApiError if the model is not the policy and matches none of the accepted patterns."""
    if is_policy(model) or is_accepted(model, accepted):
        return
    others = " or ".join(repr(pattern) for pattern in accepted)
    message = f"model is {brief(model)}; expected {POLICY!r}, '{POLICY}:AGENT' or {others}."
    raise ApiError(404, "model_not_found", message, param="model")


def named_agent(
    model: str, headers: Mapping[str, str], metadata: Mapping[str, Any] | None = None
) -> str:
    """Return the sub-agent's name from the header, else the metadata, else the model name.

    A model name has one if it is `policy:AGENT`.
    """
    named = _header_text(headers.get(AGENT_HEADER, "")) or (metadata or {}).get("agent")
    if named:
        return str(named)
    name, _, agent = model.partition(":")
    # Ollama's clients write NAME:latest.
    return agent if name == POLICY and agent != "latest" else ""


def _header_text(value: str) -> str:
    """Decode a header value as UTF-8, or else as Latin-1, which some clients send."""
    raw = value.encode("utf-8", "surrogateescape")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
