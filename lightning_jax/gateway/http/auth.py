"""Callers of the gateway: their keys, their rollouts, and the context that a dialect gets."""

from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from lightning_jax.gateway.calls.responder import Responder
from lightning_jax.gateway.calls.routing import Routing
from lightning_jax.gateway.dialects.base import Dialect, Sender
from lightning_jax.gateway.dialects.saved_responses import SavedConversations
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.http.server import is_key, key_of
from lightning_jax.gateway.sessions.open_rollouts import OpenRollout, OpenRollouts
from lightning_jax.gateway.sessions.owners import Owner


@dataclass(frozen=True)
class Callers:
    """Callers of one gateway. A request with a `rollout_url` in its path is for that rollout."""

    api_key: str
    rollouts: OpenRollouts
    responder: Responder
    routing: Routing
    any_model: bool = False  # the policy answers for unknown names outside of rollouts, too
    # Of calls outside of rollouts.
    conversations: SavedConversations = field(default_factory=SavedConversations)

    def admit(self, request: web.Request, dialect: Dialect) -> OpenRollout | None:
        """Return the open rollout of a request, or None if it is outside of rollouts.

        A rollout's URL accepts the rollout's key or the gateway's. Some dialects' clients need no
        key there. All other URLs accept only the gateway's key. Raise ApiError if a key is missing
        or wrong.
        """
        rollout = self.rollout_of(request)
        key = key_of(request)
        if rollout and key is None and dialect.open_in_rollouts:
            return rollout
        if not self._is_gateways(key) and not (rollout and rollout.owner.has_key(key or "")):
            raise _wrong_key("the rollout's" if rollout else "the gateway's")
        return rollout

    def span_owner(self, request: web.Request) -> Owner | None:
        """Return the owner of spans sent to the gateway's own URL, by the rollout's key.

        Return None for the gateway's key, so that the spans' traces select the owner. The key of an
        ended rollout stays valid for a while, because exporters send in batches. Raise ApiError for
        other keys.
        """
        key = key_of(request)
        if self._is_gateways(key):
            return None
        owner = self.rollouts.owners.of_key(key or "")
        if owner is None:
            raise _wrong_key("a rollout's or the gateway's")
        return owner

    def may_report(self, request: web.Request) -> bool:
        """Return whether the rewards and spans of an admitted request count.

        A rollout has a second URL and key for programs that the policy steers. What these post does
        not count.
        """
        segment = request.match_info.get("rollout_url")
        if segment is not None:
            return self.rollouts.find(segment).owner.may_report(segment.rpartition("~")[2])
        owner = self.rollouts.owners.of_key(key_of(request) or "")
        return owner is None or owner.may_report(key_of(request) or "")

    def check_owner(self, request: web.Request) -> None:
        """Raise ApiError unless the request has the gateway's own key."""
        if not self._is_gateways(key_of(request)):
            raise _wrong_key("the gateway's")

    def _is_gateways(self, key: str | None) -> bool:
        return is_key(key, self.api_key)

    def rollout_of(self, request: web.Request) -> OpenRollout | None:
        """Return the open rollout in the request's path, or None if the path has none.

        Raise ApiError if that rollout is not open.
        """
        segment = request.match_info.get("rollout_url")
        return None if segment is None else self.rollouts.find(segment)

    def sender(self, request: web.Request, rollout: OpenRollout | None) -> Sender:
        """Return the context of a request that its dialect needs in addition to the body."""
        return Sender(
            headers=request.headers,
            path=request.match_info,
            query=request.query,
            model_name=self.responder.served_model,
            conversations=rollout.conversations if rollout else self.conversations,
            max_len=self.responder.serve.max_len,
            count_tokens=partial(self.responder.count_tokens, rollout=rollout),
            other_models=tuple(r.model for r in self.routing.roles.values() if r.model),
            policies=tuple(self.routing.policies.named),
            # Agents have model names of their own in them. With several policies, the name selects.
            accepts_any_model=(rollout is not None or self.any_model)
            and not self.responder.serve.strict_models
            and not self.routing.policies.named,
        )


def _wrong_key(expected: str) -> ApiError:
    return ApiError(
        401,
        "invalid_api_key",
        f"the API key is missing or wrong; send {expected} key as a Bearer token or in your "
        "client's key header. A rollout's key works only under that rollout's URL.",
    )
