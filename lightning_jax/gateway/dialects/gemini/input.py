"""Parser for Gemini's contents, tools and configuration. All objects have camel case names."""

import json
from typing import Any

from lightning_jax.gateway import fields
from lightning_jax.gateway.dialects.gemini.schema import camel, json_schema
from lightning_jax.gateway.dialects.messages import add_assistant, tool_call
from lightning_jax.gateway.errors import invalid
from lightning_jax.gateway.request import Function, JsonSchema, ToolChoice
from lightning_jax.types import Message

_PART_EXTRAS = ("thought", "thoughtSignature", "partMetadata", "mediaResolution", "videoMetadata")


def messages_of(body: fields.Body) -> tuple[Message, ...]:
    messages: list[Message] = []
    if instruction := fields.field(body, "systemInstruction", dict, {}, "an object of parts"):
        text = _texts(camel(instruction), "systemInstruction")
        messages.append({"role": "system", "content": text})
    for index, content in enumerate(fields.objects(body, "contents")):
        content, where = camel(content), f"contents[{index}]"
        match content.get("role"):
            case "model":
                _add_model(messages, content, where)
            case None | "" | "user" | "function" | "tool":
                _add_input(messages, content, where)
            case role:
                raise invalid(
                    f"{where}.role is {fields.brief(role)}; expected user or model.",
                    "contents",
                    reason="unknown",
                    key=f"{where}.role",
                )
    return tuple(messages)


def _parts(content: fields.Body, where: str) -> list[tuple[str, str, Any]]:
    """Return (location, kind, value) of each part. Thoughts are left out."""
    found = []
    for index, part in enumerate(fields.objects(content, "parts")):
        part, at = camel(part), f"{where}.parts[{index}]"
        if part.get("thought") is True:
            continue  # from another model: the policy returns none
        kinds = [n for n, value in part.items() if value is not None and n not in _PART_EXTRAS]
        if len(kinds) != 1 or kinds[0] not in ("text", "functionCall", "functionResponse"):
            raise invalid(
                f"{at} is {fields.brief(kinds)}, and the policy reads only text; expected text, "
                "functionCall or functionResponse.",
                "contents",
                reason="not_text",
                key=at,
            )
        kind, value = kinds[0], part[kinds[0]]
        if not isinstance(value, str if kind == "text" else dict):
            raise invalid(
                f"{at}.{kind} is {fields.brief(value)}; expected {kind}.",
                "contents",
                reason="wrong_type",
                key=f"{at}.{kind}",
            )
        found.append((at, kind, value))
    return found


def _texts(content: fields.Body, where: str) -> str:
    parts = _parts(content, where)
    for at, kind, _ in parts:
        if kind != "text":
            raise invalid(f"{at} is a {kind}; expected text.", where, reason="not_text", key=at)
    return "\n".join(text for _, _, text in parts)


def _add_model(messages: list[Message], content: fields.Body, where: str) -> None:
    text, calls = "", []
    for at, kind, value in _parts(content, where):
        if kind == "text":
            text += value
        elif kind == "functionCall":
            call_id = value.get("id") if isinstance(value.get("id"), str) else None
            arguments = value.get("args") or {}
            calls.append(tool_call(value.get("name"), arguments, call_id, at, "contents"))
        else:
            raise invalid(
                f"{at} is a {kind} in a model message; move it to a user message.",
                "contents",
                reason="wrong_role",
                key=at,
            )
    add_assistant(messages, text, calls)


def _add_input(messages: list[Message], content: fields.Body, where: str) -> None:
    """Append function responses as separate messages, and adjacent texts as one message."""
    texts: list[str] = []
    for at, kind, value in _parts(content, where):
        if kind == "text":
            texts.append(value)
            continue
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts = []
        if kind != "functionResponse":
            raise invalid(
                f"{at} is a {kind} in a user message; move it to a model message.",
                "contents",
                reason="wrong_role",
                key=at,
            )
        ids = {"name": value.get("name"), "tool_call_id": value.get("id")}
        ids = {name: text for name, text in ids.items() if isinstance(text, str)}
        messages.append({"role": "tool", "content": _result(value.get("response")), **ids})
    if texts:
        messages.append({"role": "user", "content": "\n".join(texts)})


def _result(response: Any) -> str:
    """Return a function's response as text, unwrapped if it has only a result or an output."""
    match response:
        case {"result": value, **rest} | {"output": value, **rest} if not rest:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(response, ensure_ascii=False)


def functions_of(body: fields.Body) -> tuple[Function, ...]:
    found = []
    for index, tool in enumerate(fields.objects(body, "tools")):
        tool = camel(tool)
        hosted = [name for name, value in tool.items() if value is not None]
        if hosted not in ([], ["functionDeclarations"]):
            raise invalid(
                f"tools[{index}] has {fields.brief(hosted)}, a hosted tool that this server does "
                "not provide; pass functionDeclarations.",
                "tools",
                reason="unsupported",
                key=f"tools[{index}]",
            )
        found += [_function(camel(f)) for f in fields.objects(tool, "functionDeclarations")]
    return tuple(found)


def _function(declared: fields.Body) -> Function:
    name, schema = declared.get("name"), declared.get("parametersJsonSchema")
    if not isinstance(name, str) or not name:
        raise invalid(
            f"function name is {fields.brief(name)}; expected a non-empty string.",
            "tools",
            reason="wrong_type",
            key="tools.functionDeclarations.name",
        )
    if schema is None and declared.get("parameters") is not None:
        schema = json_schema(declared["parameters"], f"{name[:50]}.parameters", "tools")
    if schema is not None and not isinstance(schema, dict):
        raise invalid(
            f"{name[:50]}.parametersJsonSchema is not an object; expected a JSON schema.",
            "tools",
            reason="wrong_type",
            key=f"{name[:50]}.parametersJsonSchema",
        )
    return Function(name, fields.text(declared, "description"), schema)


def tool_choice_of(body: fields.Body) -> ToolChoice:
    outer = camel(fields.field(body, "toolConfig", dict, {}, "an object"))
    config = camel(fields.field(outer, "functionCallingConfig", dict, {}, "an object"))
    names = fields.strings(config, "allowedFunctionNames")
    match config.get("mode"):
        case None | "MODE_UNSPECIFIED" | "AUTO" | "VALIDATED":
            return ToolChoice("auto", names)
        case "ANY":
            return ToolChoice("required", names)
        case "NONE":
            return ToolChoice("none")
        case mode:
            raise invalid(
                f"toolConfig.functionCallingConfig.mode is {fields.brief(mode)}; expected AUTO, "
                "ANY or NONE.",
                "toolConfig",
                reason="unknown",
                key="toolConfig.functionCallingConfig.mode",
            )


def output_schema_of(config: fields.Body) -> JsonSchema | None:
    kind = config.get("responseMimeType")
    if kind not in (None, "", "text/plain", "application/json"):
        raise invalid(
            f"responseMimeType is {fields.brief(kind)}; expected text/plain or application/json.",
            "responseMimeType",
            reason="unknown",
        )
    if (schema := config.get("responseJsonSchema")) is not None:
        if not isinstance(schema, dict):
            raise invalid(
                "responseJsonSchema is not an object; expected a JSON schema.",
                "responseJsonSchema",
                reason="wrong_type",
            )
        return schema
    if (schema := config.get("responseSchema")) is not None:
        return json_schema(schema, "responseSchema", "responseSchema")
    return {} if kind == "application/json" else None
