"""Parts of a request that the policy has no use for, and that a conversation can do without.

These are tools that a provider's server runs itself, and pictures in the results of tools: a coding
agent that reads a picture would end with a refusal. The answer says what was left out.
"""

import re
from collections.abc import Sequence
from typing import Any

# Types in OpenAI's and Anthropic's APIs, some with a date or a version behind them. Tools that the
# client runs under a fixed name (a shell, an editor, a computer) are none of these.
_HOSTED = re.compile(
    "(?:web_search|web_fetch|file_search|image_generation|code_interpreter|code_execution"
    "|tool_search|tool_search_tool|mcp|mcp_toolset)(?:_[a-z0-9_]{1,40})?"
)
# Fields of a tool in Gemini's API, in snake case.
GEMINI_HOSTED = frozenset(
    (
        *("google_search", "google_search_retrieval", "enterprise_web_search", "google_maps"),
        *("url_context", "code_execution", "file_search", "retrieval", "mcp_servers"),
    )
)
# Kinds of media, by the type of a part in OpenAI's and Anthropic's APIs.
MEDIA = {
    "image": "image",
    "input_image": "image",
    "image_url": "image",
    "input_audio": "audio",
    "video_url": "video",
    "document": "document",
    "input_file": "document",
    "file": "document",
}


def is_hosted(kind: Any) -> bool:
    """Return whether a tool of this type runs on the provider's server."""
    return isinstance(kind, str) and _HOSTED.fullmatch(kind) is not None


def without_media(messages: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """Return messages in OpenAI's chat format with a sentence for each part of a tool's result that
    is no text, and the kinds of these parts.
    """
    texts, kinds = [], []
    for message in messages:
        match message:
            case {"role": "tool", "content": [*parts]}:
                named = [_media_kind(part) for part in parts]
                kinds += filter(None, named)
                content = [
                    {"type": "text", "text": sentence(kind)} if kind else part
                    for part, kind in zip(parts, named, strict=True)
                ]
                texts.append(message | {"content": content})
            case _:
                texts.append(message)
    return texts, kinds


def _media_kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return MEDIA.get(kind, "") if isinstance(kind, str) else ""


def kind_of_file(mime_type: str) -> str:
    """Return the kind of media of a MIME type."""
    kind = mime_type.partition("/")[0]
    return kind if kind in ("image", "audio", "video") else "document"


def sentence(kind: str) -> str:
    """Return the text in place of a part that the policy cannot read."""
    return f"[{kind}, not shown to this model]"
