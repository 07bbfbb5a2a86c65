"""Who sends a request: whether it may, for which rollout, and what a dialect is told of it."""

import hmac
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from lightning_jax.gateway.conversations import SavedConversations
from lightning_jax.gateway.dialects.base import Dialect, Sender
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.http import key_of
from lightning_jax.gateway.policy import Policy
from lightning_jax.gateway.rollouts import OpenRollout, OpenRollouts
from lightning_jax.gateway.routing import Routing


@dataclass(frozen=True)
class Callers:
    """Those of one gateway. A request whose path has a `rollout_url` belongs to that rollout."""

    api_key: str
    rollouts: OpenRollouts
    policy: Policy
    routing: Routing
    # Of the calls that belong to no rollout.
    conversations: SavedConversations = field(default_factory=SavedConversations)

    def authorize(self, request: web.Request, dialect: Dialect) -> None:
        """Raises ApiError for a request without the key, unless its rollout's URL is enough."""
        key = key_of(request)
        if key is None and dialect.open_in_rollouts and "rollout_url" in request.match_info:
            return
        # In constant time, so that answers do not tell how much of a key is right.
        right = hmac.compare_digest((key or "").encode(errors="replace"), self.api_key.encode())
        if not right:
            raise ApiError(
                401,
                "invalid_api_key",
                "the API key is missing or wrong; expected the gateway's, as Bearer in the "
                "Authorization header or as your client sends it.",
            )

    def rollout_of(self, request: web.Request) -> OpenRollout | None:
        """The open rollout that the request belongs to, None outside of rollouts. Raises ApiError
        if its path names none that is open.
        """
        place = request.match_info.get("rollout_url")
        return None if place is None else self.rollouts.find(place)

    def sender(self, request: web.Request, rollout: OpenRollout | None) -> Sender:
        """What the request says besides its body."""
        return Sender(
            headers=request.headers,
            path=request.match_info,
            query=request.query,
            model_name=self.policy.served_model,
            conversations=rollout.conversations if rollout else self.conversations,
            max_len=self.policy.serve.max_len,
            count_tokens=partial(self.policy.count_tokens, rollout=rollout),
            other_models=tuple(r.model for r in self.routing.roles.values() if r.model),
            policies=tuple(self.routing.policies),
        )
