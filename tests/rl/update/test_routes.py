"""Tests of what is measured of the routing of a model with experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Experts
from lightning_jax.models.transformer import init_params
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.update.routes import (
    ENTROPY,
    FLIPS,
    LOAD,
    balance,
    deepest_path,
    flips,
    make_probe,
    num_experts,
)
from lightning_jax.rl.update.updater import make_updater
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model

STRICT_PROMOTION = False  # AdamW mixes dtypes
BLOCK = Block(Attention(4, 2, 8, qk_norm="head"), Experts(4, 2, 24))
CONFIG = DecoderConfig(DecoderShape(48, 32, (BLOCK, BLOCK)))
BATCH = BatchConfig(rows=1, row_len=64, max_targets=48, head_chunk=16)
SEQUENCES = [
    sequence([1, k, 5], [k + 3, 4, k, 2, 7, 9][: 3 + k], advantage=(-1.0) ** k, weight=0.1)
    for k in range(4)
]


def test_flips_are_layers_in_which_other_experts_are_chosen():
    """One layer of two differs for the first token of two. The order is no flip."""
    ids = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    others = np.array([[[1, 0], [2, 3]], [[0, 2], [3, 2]]])
    assert flips(ids, others) == 0.5 and flips(ids, ids) == 0.0


def test_balance_is_of_used_tokens():
    ids = np.array([[[[0, 1], [0, 2], [3, 3]]]])
    used = np.array([[True, True, False]])
    found = balance(ids, np.array([[[1.0, 2.0, 9.0]]]), used, 4)
    assert found == {LOAD: 2.0, ENTROPY: 1.5}


def test_a_path_leads_to_the_deepest_node():
    (batch,), _ = make_batches(SEQUENCES, BATCH)
    path = deepest_path(batch)
    longest = max(
        SEQUENCES, key=lambda item: len(item.prompt_token_ids) + len(item.response_token_ids)
    )
    whole = [*longest.prompt_token_ids, *longest.response_token_ids]
    assert np.asarray(batch.tokens)[0][path].tolist() == whole[: len(path)]
    assert np.asarray(batch.positions)[0][path].tolist() == list(range(len(path)))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_replay_of_the_path_makes_the_choices_of_the_forest(platform: str):
    """The layout of the cache on a GPU is another. A replay of other tokens makes others."""
    (batch,), _ = make_batches(SEQUENCES, BATCH)
    params = jax.tree.map(lambda leaf: 5 * leaf, init_params(CONFIG, jax.random.key(0)))
    probe = make_probe(CONFIG, platform, compute_dtype=jnp.float32, num_decoded=4)
    found = probe.measure(params, jax.tree.map(jnp.asarray, batch), batch)
    assert found[FLIPS] == 0.0 and 1.0 <= found[LOAD] <= 2.0 and 0 < found[ENTROPY] <= np.log(4)
    routes = probe.read(params, batch).ids[:, 0, deepest_path(batch)]
    tokens = np.zeros(64, np.int32)
    other = probe.replay(params, tokens, np.int32(routes.shape[1]), None).ids
    assert flips(np.asarray(routes), np.asarray(other[:, : routes.shape[1]])) > 0.5


def test_an_update_measures_routes_and_leaves_routers():
    rate = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    updater = make_updater(CONFIG, AlgorithmConfig(), rate, BATCH, mesh=mesh, dtype="float32")
    state = updater.init(init_params(CONFIG, jax.random.key(0)))
    before = jax.device_get(state.params["layers_1"])
    state, metrics = updater.update(state, SEQUENCES, None)
    after = state.params["layers_1"]
    np.testing.assert_array_equal(after["router"]["kernel"], before["router"]["kernel"])
    change = after["experts_up"]["kernel"] - before["experts_up"]["kernel"]
    assert np.abs(change).max() > 1e-3
    assert metrics[FLIPS] == 0.0 and {LOAD, ENTROPY} < metrics.keys()


def test_a_dense_model_has_no_routes():
    assert num_experts(CONFIG) == 4 and num_experts(tiny_model().config) == 0
