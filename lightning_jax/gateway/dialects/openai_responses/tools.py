"""Tools of OpenAI's responses API, and the functions that the policy is offered for them.

A function of a namespace is offered as `NAMESPACE__NAME`, and a custom tool, whose input is text,
as a function with one string. Calls of both come back in this API's own form.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lightning_jax.gateway import fields
from lightning_jax.gateway.dialects.left_out import is_hosted
from lightning_jax.gateway.dialects.openai_fields import FunctionFields, offered_name
from lightning_jax.gateway.prompt.call_syntax import read_arguments
from lightning_jax.gateway.request import MAX_TOOLS, Function, JsonSchema

INPUT = "input"  # the only argument of a custom tool
_INPUT_SCHEMA: JsonSchema = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Offer:
    """Function that the policy is offered, and the tool that a call of it is for."""

    function: Function
    name: str
    namespace: str | None = None
    is_custom: bool = False

    def within(self, namespace: str) -> "Offer":
        """Return the offer of the tool in a namespace."""
        function = replace(self.function, name=offered_name(self.name, namespace))
        return replace(self, function=function, namespace=namespace)


class FunctionTool(FunctionFields):
    type: Annotated[Any, fields.harmless("function")]
    strict: bool | None = None

    def offers(self) -> tuple[Offer, ...]:
        return (Offer(self.function(), self.name),)

    def shown(self) -> dict[str, Any] | None:
        """Return the tool as the response repeats it."""
        plain = self.model_dump(include={"type", "name", "description", "parameters"})
        return plain | {"strict": bool(self.strict)}


class CustomFormat(fields.Fields):
    type: Any = None
    syntax: str | None = None
    definition: str | None = None


class CustomTool(fields.Fields):
    """Tool whose input is text. The policy reads the grammar of that text, which binds nothing."""

    type: Literal["custom"]
    name: fields.Name
    description: str | None = None
    format: CustomFormat | None = None

    def offers(self) -> tuple[Offer, ...]:
        lines = [self.description or ""]
        if self.format and self.format.definition:
            lines.append(f"Format of {INPUT} ({self.format.syntax}):\n{self.format.definition}")
        text = "\n".join(filter(None, lines))
        return (Offer(Function(self.name, text, _INPUT_SCHEMA), self.name, is_custom=True),)

    def shown(self) -> dict[str, Any] | None:
        return self.model_dump(exclude_none=True)


class HostedTool(fields.Fields):
    type: str

    def offers(self) -> tuple[Offer, ...]:
        return ()

    def shown(self) -> dict[str, Any] | None:
        return None


class NamespaceTool(fields.Fields):
    """Tools in a group. Its description stands before that of its first tool."""

    type: Literal["namespace"]
    name: fields.Name
    description: str | None = None
    tools: Annotated["fields.Listed[Member]", Field(max_length=MAX_TOOLS)]

    def offers(self) -> tuple[Offer, ...]:
        offers = [offer.within(self.name) for tool in self.tools for offer in tool.offers()]
        if offers and self.description:
            first = offers[0].function
            text = f"{self.description}\n{first.description}".strip()
            offers[0] = replace(offers[0], function=replace(first, description=text))
        return tuple(offers)

    def shown(self) -> dict[str, Any] | None:
        tools = [copy for tool in self.tools if (copy := tool.shown()) is not None]
        return {
            "type": self.type,
            "name": self.name,
            "description": self.description or "",
            "tools": tools,
        }


def _kind(tool: Any) -> str:
    """Return the tag of a tool. No tag is a field of a tool, so that paths of errors are right."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind in ("custom", "namespace"):
        return f"{kind} tool"
    return "hosted tool" if is_hosted(kind) else "function tool"


_Function = Annotated[FunctionTool, Tag("function tool")]
_Custom = Annotated[CustomTool, Tag("custom tool")]
_Hosted = Annotated[HostedTool, Tag("hosted tool")]
_Namespace = Annotated[NamespaceTool, Tag("namespace tool")]
Member = Annotated[_Function | _Custom | _Hosted, Discriminator(_kind)]
Tool = Annotated[_Function | _Custom | _Hosted | _Namespace, Discriminator(_kind)]
Tools = Annotated[fields.Listed[Tool], Field(max_length=MAX_TOOLS)]


def offers_of(tools: Sequence[Any], added: Sequence[Any]) -> tuple[Offer, ...]:
    """Return the offers of `tools`, and of tools that input items add or declare anew."""
    offers = [offer for tool in tools for offer in tool.offers()]
    later = {offer.function.name: offer for tool in added for offer in tool.offers()}
    return (*(offer for offer in offers if offer.function.name not in later), *later.values())


def hosted_types(tools: Sequence[Any]) -> Iterator[str]:
    """Yield the types of hosted tools."""
    for tool in tools:
        if isinstance(tool, HostedTool):
            yield tool.type
        elif isinstance(tool, NamespaceTool):
            yield from hosted_types(tool.tools)


def custom_input(arguments: str) -> str:
    """Return the text for a custom tool in a call's arguments, or all of them if it has none."""
    match read_arguments(arguments):
        case {"input": str(text)}:
            return text
    return arguments


def custom_arguments(text: str) -> str:
    """Return the arguments of a call with this text for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
