"""Tests of an update's floating-point operations, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from window.shapes import shape_of
from window.update import sequences_of

from lightning_jax.models.config import LoraConfig, MeshConfig
from lightning_jax.models.lora import adapted_shape
from lightning_jax.models.mesh import make_mesh
from lightning_jax.models.shape import Attention, Block, DecoderConfig, DecoderShape, Dense
from lightning_jax.rl.batches.batching import make_batches
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.update.flops import Work, gradient_flops, mfu_metrics, work_of
from lightning_jax.rl.update.updater import make_updater
from lightning_jax.system.accelerators import ACCELERATORS, Accelerator
from lightning_jax.testing.records import sequence
from lightning_jax.testing.tiny import tiny_model

STRICT_PROMOTION = False  # optax mixes dtypes
SMALL = DecoderConfig(
    DecoderShape(
        vocab_size=10,
        embed_dim=4,
        blocks=2 * (Block(Attention(2, 1, 2), Dense(8)),),
    )
)
ROWS = BatchConfig(rows=1, row_len=16, max_targets=8, head_chunk=4)


def test_operations_of_a_small_model_by_hand() -> None:
    # A layer has 16 + 8 + 8 + 16 + 3 * 32 = 144 weights.
    layer = 6 * 144 * 3 + 12 * 6 * 4
    work = Work(tokens=3, pairs=6, targets=2)
    assert gradient_flops(SMALL, work) == 2 * layer + 6 * 2 * 10 * 4 == 6240


def test_frozen_weights_cost_two_thirds_beside_adapters() -> None:
    adapted = adapted_shape(SMALL, LoraConfig(rank=1))
    # Adapters of a layer have (4 + 4) + 2 * (4 + 2) + (4 + 4) + 3 * (4 + 8) = 64 weights.
    layer = (4 * 144 + 6 * 64) * 3 + 12 * 6 * 4
    assert gradient_flops(adapted, Work(3, 6, 2)) == 2 * layer + 4 * 2 * 10 * 4 == 6656


def test_layers_with_windows_count_their_pairs_by_hand() -> None:
    local, whole = (Block(Attention(2, 1, 2, window=size), Dense(8)) for size in (2, None))
    model = SMALL.with_shape(blocks=(local, whole, local))
    batches, _ = make_batches([sequence([1, 2], [3, 4]), sequence([1, 2], [5, 7, 9])], ROWS)
    # Nodes 1 2 3 and 5 7 at positions 0 1 2 and 2 3. Targets are 3 4 and 5 7 9.
    work = work_of(batches, (2, 3, 9))
    assert (work.tokens, work.pairs, work.targets) == (5, 1 + 2 + 3 + 3 + 4, 5)
    assert work.windows == {2: 1 + 2 + 2 + 2 + 2, 3: 1 + 2 + 3 + 3 + 3, 9: 13}
    weights, pair = 6 * 144 * 5, 12 * 4
    layers = 3 * weights + pair * (9 + 13 + 9)
    assert gradient_flops(model, work) == layers + 6 * 5 * 10 * 4


def test_full_rows_of_1_5b_give_the_predicted_mfu() -> None:
    work = Work(4 * 4096, 4 * 4096 * 4097 // 2, 4 * 2048)
    share = gradient_flops(shape_of("1.5b"), work) / 0.621 / ACCELERATORS["h100"].flops
    assert share == pytest.approx(0.26, abs=0.01)


@pytest.mark.parametrize(("branches", "pairs"), [(1, 64 * 65 // 2), (8, 820 + 8 * (3 * 40 + 6))])
@pytest.mark.parametrize("row_len", [64, 80])
def test_work_counts_visible_pairs_without_padding(branches: int, pairs: int, row_len: int) -> None:
    sequences = sequences_of(2, 64, 32, branches, vocab_size=259)
    sizes = BatchConfig(rows=2, row_len=row_len, max_targets=32, head_chunk=16)
    batches, stats = make_batches(sequences, sizes)
    found = work_of(batches)
    assert found.tokens == stats["train/tokens_forest"] == 128
    assert found.targets == stats["train/num_distinct_targets"] == 64
    # A packed row of 80 nodes holds one tree of 64, because a second one does not fit.
    assert found.pairs == 2 * pairs


def test_mfu_is_the_share_of_all_devices_in_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The model reads 1 2 3, and 3 4 are targets: 3 tokens with 1 + 2 + 3 pairs.
    batches, _ = make_batches([sequence([1, 2], [3, 4])], ROWS)
    assert mfu_metrics(SMALL, batches, 2.0, jax.devices()[:2]) == {}  # CPUs
    monkeypatch.setitem(ACCELERATORS, "cpu", Accelerator("^cpu$", 15600.0, 1))
    found = mfu_metrics(SMALL, batches, 2.0, jax.devices()[:2])
    assert found == {"train/mfu": pytest.approx(6240 / 2.0 / (2 * 15600.0))}


def test_every_update_on_a_known_accelerator_reports_its_mfu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(num_layers=1)
    updater = make_updater(
        *(model.config, AlgorithmConfig(num_epochs=2), OptimizerConfig(), ROWS),
        mesh=make_mesh(MeshConfig(fsdp=1), jax.devices()[:1]),
        dtype="float32",
    )
    calls = [dataclasses.replace(sequence([1, 2], [3, 4]), advantage=1.0)]

    def run() -> dict[str, float]:
        state = updater.init(jax.tree.map(jnp.copy, model.params))
        return updater.update(state, calls, None)[1]

    assert "train/mfu" not in run()
    monkeypatch.setitem(ACCELERATORS, "cpu", Accelerator("^cpu$", 1e9, 1))
    metrics = run()
    batches, _ = make_batches(calls, ROWS)
    seconds = metrics["train/tokens_forest"] / metrics["train/forest_tokens_per_s"]
    flops = gradient_flops(model.config, work_of(batches))
    assert metrics["train/mfu"] == pytest.approx(flops / seconds / 1e9, rel=1e-6)
