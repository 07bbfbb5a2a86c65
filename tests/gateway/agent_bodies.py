"""Requests of coding agents: their fields, headers and order as recorded, their texts our own.

Recorded on 28 November 2026 from Claude Code 2.1.197, Codex 0.171.0, Gemini CLI 0.61.0, OpenCode
1.18.33 and Qwen Code 0.15.10 with the settings of their templates.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_jax.cli.catalog import STARTER

Body = dict[str, Any]
BIG = 9007199254740991  # of a JavaScript integer
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
TASK = "Copy list4.txt to memo1.txt."
LISTED = "apple\n"  # what the agent's tool returns


@dataclass(frozen=True)
class ReturnedCall:
    """Text and call of an answer, as the agent read them from its stream."""

    text: str
    name: str
    arguments: dict[str, Any]
    call_id: str
    item_ids: tuple[str, ...] = ()  # of OpenAI's Responses


@dataclass(frozen=True)
class Recording:
    """Requests of one agent."""

    path: str
    first: Body
    follow: Callable[[Body, ReturnedCall], Body]  # the next request, with a tool's result
    name: str  # of the tool that the policy calls
    arguments: dict[str, Any]
    side_calls: Mapping[str, Body] = field(default_factory=dict)  # role -> request
    side_path: str = ""  # "": as `path`
    headers: Mapping[str, str] = field(default_factory=dict)


def prompt_of(template: str) -> str:
    return (STARTER / template / "agent/prompt.md").read_text()


def _object(required: list[str], **properties: Any) -> Body:
    return {"type": "object", "properties": properties, "required": required}


TEXT = {"type": "string", "description": "A text."}

# Claude Code: one user message of several blocks, and a marker of its cache on the newest result.
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.d67; cc_entrypoint=sdk-cli;"
CACHED = {"cache_control": {"type": "ephemeral"}}


def _claude(system: str, messages: list[Body], billing: str = BILLING, **changes: Any) -> Body:
    return {
        "model": "claude-opus-4-8",
        "messages": messages,
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are an agent of an SDK.", **CACHED},
            {"type": "text", "text": system, **CACHED},
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "run commands",
                "input_schema": DRAFT
                | _object(["command"], command=TEXT, run_in_background={"type": "boolean"})
                | {"additionalProperties": False},
            },
            {
                "name": "Read",
                "description": "read files",
                "input_schema": DRAFT
                | _object(
                    ["file_path"],
                    file_path=TEXT,
                    offset={"type": "integer", "minimum": 0, "maximum": BIG},
                    limit={"type": "integer", "exclusiveMinimum": 0, "maximum": BIG},
                )
                | {"additionalProperties": False},
            },
        ],
        "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": "s"})},
        "max_tokens": 64000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
        **changes,
    }


def _user(*texts: str) -> Body:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def _follow_claude(first: Body, call: ReturnedCall) -> Body:
    content = [{"type": "text", "text": call.text}]
    content += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments}
    ]
    result = {"tool_use_id": call.call_id, "type": "tool_result", "content": LISTED}
    messages = [
        *first["messages"],
        {"role": "assistant", "content": content},
        {"role": "user", "content": [{**result, "is_error": False, **CACHED}]},
    ]
    return first | {"messages": messages}


REMINDER = "<system-reminder>\nToday is a Saturday.\n</system-reminder>\n\n"
TITLE = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
TITLED = TITLE | {"additionalProperties": False}
SUMMARY = {"tool_use_id": "call_1", "type": "tool_result", "content": LISTED, "is_error": False}
CLAUDE_CODE = Recording(
    path="/v1/messages?beta=true",
    first=_claude(prompt_of("claude-code"), [_user(REMINDER, TASK)]),
    follow=_follow_claude,
    name="Read",
    arguments={"file_path": "list4.txt"},
    side_calls={
        "title": _claude(
            "Generate a concise, sentence-case title for the session.",
            [_user(f"<session>\n{TASK}\n</session>")],
            tools=[],
            thinking={"type": "disabled"},
            output_config={"effort": "high", "format": {"type": "json_schema", "schema": TITLED}},
        ),
        "subagent": _claude(
            "You search files.",
            [_user("List the files.")],
            f"{BILLING} cc_is_subagent=true;",
            model="claude-haiku-4-5-20251001",
        ),
        "compaction": _claude(
            prompt_of("claude-code"),
            [
                _user(TASK),
                {
                    "role": "user",
                    "content": [
                        SUMMARY,
                        {
                            "type": "text",
                            "text": "Write no calls.\n\nYour task is to create a detailed summary.",
                        },
                    ],
                },
            ],
        ),
    },
    headers={
        "User-Agent": "claude-cli/2.1.197 (external, sdk-cli)",
        "X-Stainless-Retry-Count": "0",
        "X-Stainless-Timeout": "600",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    },
)

# Codex: messages of developers, and items with ids of its own beside ours.


def _item(role: str, text: str, number: int) -> Body:
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{number}", "role": role, "content": content}


def _codex(items: list[Body], **changes: Any) -> Body:
    return {
        "model": "policy",
        "stream": True,
        "input": items,
        "tools": [
            {
                "type": "function",
                "name": "exec_command",
                "description": "Runs a command.",
                "strict": False,
                "parameters": _object(
                    ["cmd"],
                    cmd=TEXT,
                    max_output_tokens={"type": "number"},
                    prefix_rule={"type": "array", "items": {"type": "string"}},
                    sandbox_permissions={"type": "string", "enum": ["default", "escalated"]},
                )
                | {"additionalProperties": False},
            }
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a22096-bd4b",
        "client_metadata": {"session_id": "01a22096-bd4b", "turn_id": "01a22096-bd60"},
        **changes,
    }


def _follow_codex(first: Body, call: ReturnedCall) -> Body:
    message_id, call_item_id = call.item_ids
    text = {"type": "output_text", "text": call.text, "annotations": [], "logprobs": []}
    done = {"status": "completed"}
    items = [
        {**_item("assistant", "", 0), "id": message_id, "content": [text], **done},
        {
            "type": "function_call",
            "id": call_item_id,
            "call_id": call.call_id,
            "name": call.name,
            "arguments": json.dumps(call.arguments),
            **done,
        },
        {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": call.call_id,
            "output": f"Process exited with code 0\nOutput:\n{LISTED}",
        },
    ]
    return first | {"input": [*first["input"], *items]}


CODEX_ITEMS = [
    _item("developer", prompt_of("codex"), 1),
    _item("developer", "<skills_instructions>\nNone.\n</skills_instructions>", 2),
    _item("user", "<environment_context>\n  <cwd>/app</cwd>\n</environment_context>", 3),
    _item("user", TASK, 4),
]
CHECKPOINT = "You are performing a CONTEXT CHECKPOINT COMPACTION. Write a summary."
CODEX = Recording(
    path="/v1/responses",
    first=_codex(CODEX_ITEMS),
    follow=_follow_codex,
    name="exec_command",
    arguments={"cmd": "cat list4.txt"},
    side_calls={"compaction": _codex([*CODEX_ITEMS, _item("user", CHECKPOINT, 5)], tools=[])},
    headers={"originator": "codex_exec", "User-Agent": "codex_exec/0.171.0"},
)

# Gemini CLI: the policy's name is in the path, and the text and the call are parts of one content.


def _gemini(system: str, *contents: Body, **changes: Any) -> Body:
    functions = [
        {
            "name": "read_file",
            "description": "Reads a file.",
            "parametersJsonSchema": _object(
                ["file_path"], file_path=TEXT, start_line={"type": "integer", "minimum": 1}
            ),
        }
    ]
    config = {"temperature": 1, "topP": 0.95, "topK": 64, "thinkingConfig": THOUGHTS}
    return {
        "contents": list(contents),
        "systemInstruction": {"parts": [{"text": system}], "role": "user"},
        "tools": [{"functionDeclarations": functions}],
        "generationConfig": config,
        **changes,
    }


def _follow_gemini(first: Body, call: ReturnedCall) -> Body:
    function = {"id": call.call_id, "args": call.arguments, "name": call.name}
    result = {"name": call.name, "response": {"output": LISTED}, "id": call.call_id}
    called = {"functionCall": function, "thoughtSignature": "skip_thought_signature_validator"}
    contents = [
        *first["contents"],
        {"parts": [{"text": call.text}, called], "role": "model"},
        {"parts": [{"functionResponse": result}], "role": "user"},
    ]
    return first | {"contents": contents}


def _parts(*texts: str) -> Body:
    return {"parts": [{"text": text} for text in texts], "role": "user"}


THOUGHTS = {"includeThoughts": True}
SCORE = {  # the names of types are in capitals
    "type": "OBJECT",
    "properties": {"score": {"type": "INTEGER", "description": "From 1 to 100."}},
    "required": ["score"],
}
GEMINI_CLI = Recording(
    path="/v1beta/models/policy:streamGenerateContent?alt=sse",
    first=_gemini(
        prompt_of("gemini-cli"),
        _parts("<session_context>\nA Saturday.\n</session_context>", TASK),
    ),
    follow=_follow_gemini,
    name="read_file",
    arguments={"file_path": "list4.txt"},
    side_calls={
        "router": {
            name: value
            for name, value in _gemini(
                "\nYou are a specialized Task Routing AI. Give a score.",
                _parts(TASK),
                generationConfig={
                    "responseMimeType": "application/json",
                    "responseJsonSchema": SCORE,
                    "thinkingConfig": THOUGHTS,
                },
            ).items()
            if name != "tools"
        },
        "search": _gemini("You are a sub-agent.", _parts("List the files.")),
    },
    side_path="/v1beta/models/gemini-3-flash-preview:streamGenerateContent?alt=sse",
    headers={"User-Agent": "GeminiCLI-tui/0.61.0/policy (linux; x64; terminal)"},
)

# OpenCode and Qwen Code: OpenAI's chat completions.


def _chat(system: str, *messages: Body, **changes: Any) -> Body:
    parameters = DRAFT | _object(
        ["path"],
        path=TEXT,
        timeout={"minimum": -BIG, "exclusiveMinimum": 0, "type": "integer", "maximum": BIG},
    )
    function = {"name": "read", "description": "Reads a file.", "parameters": parameters}
    return {
        "model": "policy",
        "max_tokens": 32000,
        "messages": [{"role": "system", "content": system}, *messages],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        **changes,
    }


def _follow_chat(first: Body, call: ReturnedCall, result: Any = LISTED) -> Body:
    compact = json.dumps(call.arguments, separators=(",", ":"))
    function = {"name": call.name, "arguments": compact}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [
        *first["messages"],
        {"role": "assistant", "content": call.text, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": result},
    ]
    return first | {"messages": messages}


OPENCODE = Recording(
    path="/v1/chat/completions",
    first=_chat(
        f"{prompt_of('opencode')}<env>\n  Platform: linux\n</env>",
        {"role": "user", "content": f'"{TASK}"'},
    ),
    follow=_follow_chat,
    name="read",
    arguments={"path": "list4.txt"},
    side_calls={
        "title": {
            name: value
            for name, value in _chat(
                "You write titles.",
                {"role": "user", "content": "Write a title:\n"},
                {"role": "user", "content": TASK},
                model="policy:title",
            ).items()
            if name not in ("tools", "tool_choice")
        },
        "compaction": _chat(
            "You are a context summarization agent. Write a summary.",
            {"role": "user", "content": "<conversation>\n[Assistant]: Done.\n</conversation>"},
        ),
        "side": _chat("You search files.", {"role": "user", "content": "List the files"}),
    },
    headers={"User-Agent": "opencode/1.18.33 ai-sdk", "x-session-id": "ses_1"},
)
QWEN_CODE = Recording(
    path="/v1/chat/completions",
    first=_chat(
        prompt_of("qwen-code"),
        _user("We set up the context."),
        {"role": "assistant", "content": "Thanks for the context."},
        _user(TASK),
        max_tokens=8000,
    ),
    follow=lambda first, call: _follow_chat(first, call, [{"type": "text", "text": LISTED}]),
    name="read",
    arguments={"path": "/app/list4.txt"},
    side_calls={
        "compaction": _chat(
            "You are the component that summarizes internal chat history.",
            _user("Write the snapshot."),
        ),
        "memory": _chat(
            "You are now acting as the managed memory extraction subagent.", _user("Go on.")
        ),
        "side": _chat("You are a file search agent.", _user("List the files")),
    },
    headers={"User-Agent": "QwenCode/0.15.10 (linux; x64)", "X-Stainless-Retry-Count": "0"},
)
RECORDINGS = {
    "claude-code": CLAUDE_CODE,
    "codex": CODEX,
    "gemini-cli": GEMINI_CLI,
    "opencode": OPENCODE,
    "qwen-code": QWEN_CODE,
}
