"""All dialects that the gateway serves."""

from lightning_jax.gateway.dialects.anthropic import ANTHROPIC
from lightning_jax.gateway.dialects.gemini.dialect import GEMINI
from lightning_jax.gateway.dialects.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from lightning_jax.gateway.dialects.openai_chat import CHAT
from lightning_jax.gateway.dialects.openai_completions import COMPLETIONS
from lightning_jax.gateway.dialects.openai_responses.dialect import RESPONSES

DIALECTS = (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    ANTHROPIC,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    GEMINI,
)
