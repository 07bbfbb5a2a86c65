"""All dialects that the gateway serves."""

from lightning_jax.gateway.dialects.chat import CHAT

DIALECTS = (CHAT,)
