"""Retrieval and deletion of saved responses in OpenAI's responses API."""

from collections.abc import Mapping
from typing import Any, Final

from lightning_jax.gateway.dialects.base import Listing, Sender
from lightning_jax.gateway.dialects.saved_responses import SavedResponse
from lightning_jax.gateway.errors import ApiError, invalid
from lightning_jax.gateway.fields import Body, brief
from lightning_jax.types import Message

LOGPROBS: Final = "message.output_text.logprobs"


def saved_response(response: Mapping[str, Any], messages: tuple[Message, ...]) -> SavedResponse:
    """Return a response without its log-probabilities and token ids, which take the most memory."""
    body = {key: value for key, value in response.items() if not key.endswith("token_ids")}
    body["output"] = [_without_logprobs(item) for item in response["output"]]
    return SavedResponse(body, messages)


def _without_logprobs(item: Mapping[str, Any]) -> dict[str, Any]:
    if "content" not in item:  # a call
        return dict(item)
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _retrieve(body: Body, sender: Sender) -> Any:
    response = _find(sender)
    if sender.query.get("stream", "false") != "false":
        raise invalid(
            "stream is not supported for a saved response; leave it out.",
            "stream",
            reason="unsupported",
        )
    includes = [value for name, value in sender.query.items() if name in ("include", "include[]")]
    if LOGPROBS in includes:
        raise invalid(
            f"include has {LOGPROBS}, which are not saved; read them from the original response.",
            "include",
            reason="unsupported",
        )
    return response.body


def _delete(body: Body, sender: Sender) -> Any:
    _find(sender)
    sender.conversations.forget(sender.path["response_id"])
    return {"id": sender.path["response_id"], "object": "response", "deleted": True}


def _find(sender: Sender) -> SavedResponse:
    response_id = sender.path["response_id"]
    response = sender.conversations.get(response_id)
    if response is None:
        raise ApiError(
            404,
            "response_not_found",
            f"response_id is {brief(response_id)}, which is not stored; pass the id of a response "
            "from this rollout made with store on.",
            param="response_id",
        )
    return response


PATH = "/v1/responses/{response_id}"
LISTINGS = (Listing("GET", PATH, _retrieve), Listing("DELETE", PATH, _delete))
