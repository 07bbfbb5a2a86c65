"""A prompt's tokens have the log-probabilities that the forward function gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.transformer import forward, unembed
from lightning_jax.serve.score import Scorer
from lightning_jax.testing.tiny import tiny_model


@pytest.mark.parametrize("length", [1, 2, 64, 90])
def test_scores_are_the_forward_functions(length: int) -> None:
    model = tiny_model(1)
    ids = np.random.default_rng(length).integers(0, 259, length)
    scores = Scorer(model.config, (128, 64))(model.params, ids.tolist())
    positions = jnp.arange(length)[None]
    hidden, _ = forward(model.params, model.config, jnp.asarray(ids)[None], positions)
    table = jax.nn.log_softmax(unembed(model.params, model.config, hidden)[0])
    expected = np.asarray(table)[np.arange(length - 1), ids[1:]]
    np.testing.assert_allclose(scores.logprobs, expected, atol=1e-5)
    assert len(scores.top_logprobs) == length - 1
    for row, best in enumerate(scores.top_logprobs):
        assert len(best) == 20
        order = np.argsort(-np.asarray(table[row]), kind="stable")[:20]
        assert [token for token, _ in best] == order.tolist()
        np.testing.assert_allclose([p for _, p in best], table[row][order], atol=1e-5)
