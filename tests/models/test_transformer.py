"""Prefill and decode against one full pass, masks, and what padding may change."""

import jax
import jax.numpy as jnp
import numpy as np

from lightning_jax.models.transformer import forward, init_cache, unembed
from lightning_jax.testing.tiny import tiny_model


def test_prefill_then_decode_equals_one_full_pass():
    model = tiny_model()
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 259)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    full, none = forward(model.params, model.config, tokens, positions)
    assert none is None
    cache = init_cache(model.config, 2, 16)
    first, cache = forward(model.params, model.config, tokens[:, :7], positions[:, :7], cache=cache)
    parts = [first]
    for t in range(7, 12):
        step, cache = forward(
            model.params, model.config, tokens[:, t : t + 1], positions[:, t : t + 1], cache=cache
        )
        parts.append(step)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, atol=2e-5)
    logits = unembed(model.params, model.config, full)
    assert logits.dtype == jnp.float32
