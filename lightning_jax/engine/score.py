"""Log-probabilities and likeliest tokens of a prompt's own tokens."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from lightning_jax.engine.sampling import Likeliest, likeliest
from lightning_jax.engine.types import PromptScores
from lightning_jax.models.shape import DecoderConfig, chunk_for
from lightning_jax.models.transformer import forward, unembed

ROWS = 64  # positions whose logits are in memory at once


class PromptScorer:
    """Scorer of whole prompts.

    It compiles at the first prompt of each length, not at warm-up, because training never uses it.
    """

    def __init__(self, config: DecoderConfig, lengths: Sequence[int]) -> None:
        self._lengths = sorted(lengths)
        self._score = jax.jit(partial(_score, config=config))

    def __call__(self, params: Any, ids: Sequence[int], adapter: int | None = None) -> PromptScores:
        """Return the scores of each token of `ids` after the first, at temperature 1.

        Waits for the device. `adapter` is an index, for a model with several adapters.
        """
        length = next(n for n in self._lengths if n >= len(ids))
        tokens = np.zeros(length, np.int32)
        tokens[: len(ids)] = ids
        chosen = None if adapter is None else np.full(1, adapter, np.int32)
        logprobs, best = jax.device_get(self._score(params, tokens, chosen))
        pairs = zip(best.ids.tolist(), best.logprobs.tolist(), strict=True)
        top = [tuple(zip(row_ids, row, strict=True)) for row_ids, row in pairs]
        return PromptScores(tuple(logprobs.tolist()[: len(ids) - 1]), tuple(top[: len(ids) - 1]))


def _score(
    params: Any,
    tokens: Int32[Array, " T"],
    adapters: Int32[Array, " B"] | None = None,
    *,
    config: DecoderConfig,
) -> tuple[Float[Array, " T"], Likeliest]:
    """Return scores, one row per position.

    Row i scores token i + 1; the last row is meaningless.
    """
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    hidden, _ = forward(params, config, tokens[None], positions[None], adapters=adapters)

    def row(hidden_and_next: Any) -> Any:
        state, following = hidden_and_next
        logits = unembed(params, config, state[None])
        logprob = logits[0, following] - jax.nn.logsumexp(logits[0])
        return logprob, jax.tree.map(lambda leaf: leaf[0], likeliest(logits))

    rows = chunk_for(config.shape.vocab_size, ROWS)
    return jax.lax.map(row, (hidden[0], jnp.roll(tokens, -1)), batch_size=rows)
