"""Tests that a trainer recomputes the log-probs that an engine samples from a windowed model."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lightning_jax.engine.config import ServeConfig
from lightning_jax.engine.device.slots import SlotPrograms
from lightning_jax.engine.loop import EngineLoop
from lightning_jax.engine.types import SamplingParams
from lightning_jax.models.config import MeshConfig
from lightning_jax.models.mesh import make_mesh
from lightning_jax.rl.config import AlgorithmConfig, BatchConfig, OptimizerConfig
from lightning_jax.rl.sequence import TrainingSequence
from lightning_jax.rl.update.updater import make_updater
from lightning_jax.testing.tiny import tiny_model, windowed

STRICT_PROMOTION = False  # optax mixes dtypes
WHOLE = tiny_model(num_layers=3)
MODEL = windowed(WHOLE, 10, 2)


async def sampled() -> list[TrainingSequence]:
    """Return samples of two prompts. Trunks and branches are longer than the window."""
    serve = ServeConfig(slots=4, max_len=96, prefill_buckets=(16,))
    loop = EngineLoop(SlotPrograms(MODEL.config, serve), MODEL.params, 0, MODEL.tokenizer, serve)
    loop.start()
    sequences = []
    try:
        for size in (25, 40):
            prompt = np.random.default_rng(size).integers(0, 256, size).tolist()
            sampling = SamplingParams(max_tokens=14, ignore_eos=True)
            results = await asyncio.gather(
                *(loop.submit(prompt, sampling).result() for _ in range(3))
            )
            sequences += [
                TrainingSequence(
                    prompt_token_ids=tuple(prompt),
                    response_token_ids=result.token_ids,
                    behavior_logprobs=result.behavior_logprobs,
                    advantage=(-1.0) ** number,
                    weight=0.1,
                )
                for number, result in enumerate(results)
            ]
    finally:
        loop.close()
    return sequences


@pytest.mark.parametrize("devices", [1, 8])
def test_forest_has_the_logprobs_that_were_sampled(devices: int) -> None:
    sequences, metrics = asyncio.run(sampled()), {}
    sizes = MeshConfig(fsdp=1) if devices == 1 else MeshConfig(2, 2, 2)
    mesh = make_mesh(sizes, jax.devices()[:devices])
    rows = BatchConfig(rows=2 if devices == 1 else 4, row_len=192, max_targets=96, head_chunk=16)
    for name, model in (("windows", MODEL), ("none", WHOLE)):
        updater = make_updater(
            *(model.config, AlgorithmConfig(), OptimizerConfig(), rows), mesh=mesh, dtype="float32"
        )
        state = updater.init(jax.tree.map(jnp.copy, model.params))
        metrics[name] = updater.update(state, sequences, None)[1]
    assert metrics["windows"]["train/mismatch_kl"] < 1e-9
    assert metrics["windows"]["train/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["none"]["train/mismatch_kl"] > 1e-6
    tokens = sum(len(item.prompt_token_ids) for item in sequences)
    assert metrics["windows"]["train/tokens_forest"] < tokens  # prompts are shared
