# pyright: reportMissingImports=false, reportPrivateImportUsage=false
# pyright: reportCallIssue=false, reportArgumentType=false
"""Script that writes the arrays for test_golden.py: logits of the published implementations.

Run it in a separate environment, because the project does not use torch:

    pip install torch==2.13.0 transformers safetensors gguf accelerate numpy
    python tests/models/golden/make_golden.py qwen2 qwen3
    python tests/models/golden/make_golden.py PATH/TO/SmolLM2-135M-Instruct.Q4_1.gguf

For each named family it writes a config.json in transformers' format, and an .npz with a random
checkpoint under the published weight names, token ids and logits. From a GGUF file of SmolLM2,
transformers itself reads the weights. Of its logits, the script keeps every position's log-sum-exp,
a thin slice, and the best of the last position.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

HERE = Path(__file__).parent
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WIDE: dict[str, Any] = SIZES | {"hidden_size": 32}
DEEP: dict[str, Any] = SIZES | {"num_hidden_layers": 5}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that all three bands of frequencies occur
}
FACTORS: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "logits_scaling": 1.5,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    # One period of layers, with windows shorter than the prompt of 20 tokens.
    "gemma3_text": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 6, "intermediate_size": 16},
            head_dim=6,
            query_pre_attn_scalar=5,
            sliding_window=7,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
    ),
    "granite": (GraniteForCausalLM, GraniteConfig(**SIZES, **FACTORS)),
    "granitemoehybrid": (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **SIZES,
            **FACTORS,
            shared_intermediate_size=20,
            num_local_experts=0,
            num_experts_per_tok=0,
            layer_types=["attention"] * SIZES["num_hidden_layers"],
            position_embedding_type="rope",
            mamba_n_heads=1,
            tie_word_embeddings=True,
        ),
    ),
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    ),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**SIZES, head_dim=6, tie_word_embeddings=False),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES,
            head_dim=6,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
    ),
    "mistral": (
        MistralForCausalLM,
        MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False),
    ),
    "mistral_window": (
        MistralForCausalLM,
        MistralConfig(**SIZES, sliding_window=7, tie_word_embeddings=False),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SIZES, tie_word_embeddings=False)),
    "phi3": (  # longer than the 150 tokens, so that the short factors count
        Phi3ForCausalLM,
        Phi3Config(
            **WIDE,
            original_max_position_embeddings=256,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0, 1.5, 2.5],
                "long_factor": [2.0, 4.0, 9.0],
                "original_max_position_embeddings": 256,
                "partial_rotary_factor": 0.75,
            },
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
    ),
    "smollm3": (  # five layers, so that the pattern of four ends within its second turn
        SmolLM3ForCausalLM,
        SmolLM3Config(
            **DEEP,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
    ),
}
TEXT = (
    "<|im_start|>user\nHow many of the 12345 singers are from São Paulo?  Naïve 你好 it's"
    "\n\n\tx=3.14"
)


def make_family(name: str) -> None:
    """Write a random checkpoint with weights large enough to reveal a wrong detail."""
    torch.manual_seed(len(name))
    kind, config = FAMILIES[name]
    model = kind(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            center = 1.0 if "norm" in path and not name.startswith("gemma") else 0.0
            weight.copy_(center + 0.3 * torch.randn(weight.shape))
    config.architectures = [kind.__name__]
    (HERE / f"{name}.json").write_text(config.to_json_string())
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 150))
    routers = [module for path, module in model.named_modules() if path.endswith("mlp.gate")]
    with chosen_experts(routers) as chosen, torch.no_grad():
        logits = model(tokens).logits
    with torch.no_grad():
        greedy = greedy_tokens(model, tokens[:1, :20])
    np.savez_compressed(
        HERE / f"{name}.npz",
        **published_weights(model),
        **({"experts": np.stack(chosen).astype(np.int8)} if routers else {}),
        tokens=tokens.numpy().astype(np.int32),
        logits=logits[:, ::7].numpy().astype(np.float32),
        greedy=greedy.numpy().astype(np.int32),
    )


def published_weights(model: Any) -> dict[str, np.ndarray]:
    """Return the weights under the names of published files. The library's own may differ."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


@contextlib.contextmanager
def chosen_experts(routers: Sequence[Any]) -> Iterator[list[np.ndarray]]:
    """Collect the experts that each router chooses in the block, in the order of their ids."""
    chosen: list[np.ndarray] = []

    def collect(router: Any, inputs: Any, outputs: Any) -> None:
        logits, _, ids = outputs
        best = logits.topk(ids.shape[-1] + 1).values
        assert (best[..., -2] - best[..., -1]).min() > 1e-4, "a near tie; take another seed"
        chosen.append(ids.sort(dim=-1).values.numpy())

    handles = [router.register_forward_hook(collect) for router in routers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def greedy_tokens(model: Any, prompt: torch.Tensor, number: int = 24) -> torch.Tensor:
    """Return the most likely tokens after a prompt. No two of them are nearly as likely."""
    tokens = prompt
    for _ in range(number):
        best = model(tokens).logits[:, -1].topk(2)
        assert best.values[0, 0] - best.values[0, 1] > 1e-3, "a near tie; take another seed"
        tokens = torch.cat((tokens, best.indices[:, :1]), dim=1)
    return tokens[0, prompt.shape[1] :]


def make_smollm2_weights(gguf: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = model.to(torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokens = torch.tensor([tokenizer(TEXT, add_special_tokens=False).input_ids])
    with torch.no_grad():
        logits = model(tokens).logits[0].to(torch.float64)
    best = logits[-1].topk(16)
    np.savez_compressed(
        HERE / "smollm2_gguf.npz",
        text=np.array(TEXT),
        tokens=tokens.numpy().astype(np.int32),
        log_sums=torch.logsumexp(logits, -1).numpy(),
        slice=logits[:, ::4099].numpy().astype(np.float32),
        best_ids=best.indices.numpy(),
        best_logits=best.values.numpy(),
    )


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name in FAMILIES:
            make_family(name)
        else:
            make_smollm2_weights(Path(name))
