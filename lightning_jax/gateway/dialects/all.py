"""All dialects that the gateway serves."""

from lightning_jax.gateway.dialects.anthropic import ANTHROPIC
from lightning_jax.gateway.dialects.chat import CHAT
from lightning_jax.gateway.dialects.completions import COMPLETIONS
from lightning_jax.gateway.dialects.gemini import GEMINI
from lightning_jax.gateway.dialects.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from lightning_jax.gateway.dialects.responses import RESPONSES

DIALECTS = (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ANTHROPIC,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    GEMINI,
)
