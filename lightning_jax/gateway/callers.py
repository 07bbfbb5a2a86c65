"""Who sends a request: whether it may, for which rollout, and what a dialect is told of it."""

import hmac
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from lightning_jax.gateway.conversations import SavedConversations
from lightning_jax.gateway.dialects.base import Dialect, Sender
from lightning_jax.gateway.errors import ApiError
from lightning_jax.gateway.http import key_of
from lightning_jax.gateway.owners import Owner
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

    def admit(self, request: web.Request, dialect: Dialect) -> OpenRollout | None:
        """Return the open rollout that the request belongs to, None outside of rollouts.

        A rollout's URL takes the rollout's own key or the gateway's, and no key from the clients of
        some dialects. The gateway's other URLs take the gateway's key alone. Raises ApiError.
        """
        rollout = self.rollout_of(request)
        key = key_of(request)
        if rollout and key is None and dialect.open_in_rollouts:
            return rollout
        if not self._is_gateways(key) and not (rollout and rollout.owner.has_key(key or "")):
            raise _wrong_key("the rollout's" if rollout else "the gateway's")
        return rollout

    def span_owner(self, request: web.Request) -> Owner | None:
        """Return whose spans a request to the gateway's own URL brings, by the rollout's key.

        None for the gateway's key: then the spans' traces tell. The key of a rollout that has ended
        is known for a while, because exporters send in batches. Raises ApiError.
        """
        key = key_of(request)
        if self._is_gateways(key):
            return None
        owner = self.rollouts.owners.of_key(key or "")
        if owner is None:
            raise _wrong_key("a rollout's or the gateway's")
        return owner

    def _is_gateways(self, key: str | None) -> bool:
        # In constant time, so that answers do not tell how much of a key is right.
        return hmac.compare_digest((key or "").encode(errors="replace"), self.api_key.encode())

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


def _wrong_key(expected: str) -> ApiError:
    return ApiError(
        401,
        "invalid_api_key",
        f"the API key is missing or wrong; expected {expected}, as Bearer in the Authorization "
        "header or as your client sends it. A rollout's key works under its own URL.",
    )
