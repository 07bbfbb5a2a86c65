"""Conversion of a Llama model from a Hugging Face directory to bfloat16 GGUF without vocabulary.

Only token ids go in and out, so no tokenizer is needed. Norms stay in float32.
"""

# pyright: reportMissingImports=false
# It runs in a separate environment.

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def gguf_of(directory: Path) -> Path:
    """Return the file in the directory. Write it if it is missing or older than the weights."""
    target, weights = directory / "model-bf16.gguf", directory / "model.safetensors"
    if not target.exists() or target.stat().st_mtime < weights.stat().st_mtime:
        draft = target.with_suffix(".draft")
        write(draft, json.loads((directory / "config.json").read_text()), weights)
        draft.rename(target)
    return target


def write(target: Path, config: dict[str, Any], weights: Path) -> None:
    if config["model_type"] != "llama":
        raise ValueError(f"model_type is {config['model_type']!r}; expected 'llama'.")
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, array in tensors(weights):
        if ".q_proj" in name or ".k_proj" in name:
            array = halves_interleaved(array, heads if ".q_proj" in name else key_heads)
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return the GGUF name: `model.layers.3.mlp.up_proj.weight` becomes `blk.3.ffn_up.weight`."""
    parts = name.removeprefix("model.").removesuffix(".weight").split(".")
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{NAMES['.'.join(parts[2:])]}.weight"
    return f"{NAMES['.'.join(parts)]}.weight"


def halves_interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder each head's rows 0 1 2 3 to 0 2 1 3.

    llama.cpp rotates neighbors, Hugging Face rotates halves.
    """
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def tensors(weights: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a safetensors file in float32."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    content = np.memmap(weights, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"{name} is {entry['dtype']}; expected F32.")
        start, end = entry["data_offsets"]
        yield name, content[start:end].view(np.float32).reshape(entry["shape"])
