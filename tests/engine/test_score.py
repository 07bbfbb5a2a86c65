"""Tests that a prompt's scores equal the log-probabilities of the forward function."""

import numpy as np
import pytest
from engine_bench import full_logprobs

from lightning_jax.engine.score import PromptScorer
from lightning_jax.models.formats.load import LoadedModel


@pytest.fixture(scope="module")
def scorer(model: LoadedModel) -> PromptScorer:
    return PromptScorer(model.config, (128, 64))


@pytest.mark.parametrize("length", [1, 2, 64, 90])
def test_scores_are_the_forward_functions(
    length: int, model: LoadedModel, scorer: PromptScorer
) -> None:
    ids = np.random.default_rng(length).integers(0, 259, length).tolist()
    scores = scorer(model.params, ids)
    table = full_logprobs(model, ids)
    np.testing.assert_allclose(scores.logprobs, table[np.arange(length - 1), ids[1:]], atol=1e-5)
    assert len(scores.top_logprobs) == length - 1
    for row, best in enumerate(scores.top_logprobs):
        assert len(best) == 20
        order = np.argsort(-table[row], kind="stable")[:20]
        assert [token for token, _ in best] == order.tolist()
        np.testing.assert_allclose([p for _, p in best], table[row][order], atol=1e-5)
