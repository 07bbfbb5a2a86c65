"""Advice about folders and files that are not a model, or not all of one."""

from collections.abc import Collection, Sequence
from pathlib import Path

from lightning_jax.models.model_files import ADAPTERS, MERGED, part_names, read_object

ADAPTER = "adapter_config.json"
# Weights in formats that are not read here, and other files with such endings.
_OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt")
HEAD, EMBEDDING, BASE = "lm_head.weight", "model.embed_tokens.weight", "model."


def on_no_config(directory: Path) -> str:
    """Return what to do about a directory without config.json."""
    if (directory / ADAPTER).is_file():
        return adapter_advice(directory)
    for pattern in ("policy/config.json", "snapshots/*/config.json", "*/config.json"):
        if inner := sorted(directory.glob(pattern)):
            return f"set model.name to {inner[-1].parent}"
    if ggufs := sorted(directory.glob("*.gguf")):
        return f"set model.name to the file {ggufs[0]}"
    if next(directory.glob("*.safetensors"), None):
        return "copy the config.json of the model there"
    return "pass the directory of a Hugging Face model"


def on_no_safetensors(directory: Path) -> str:
    """Return what to do about a model's directory without safetensors files."""
    if (directory / ADAPTER).is_file():
        return adapter_advice(directory)
    names = (path.name for pattern in _OTHERS for path in directory.glob(pattern))
    if others := sorted(name for name in names if name not in _NO_WEIGHTS):
        return (
            f"its weights are in {others[0]}, which is not read, so convert them to safetensors: "
            "load the model with transformers' AutoModelForCausalLM and call save_pretrained"
        )
    if ggufs := sorted(directory.glob("*.gguf")):
        return f"set model.name to the file {ggufs[0]}"
    return "copy or download its weights in the safetensors format"


def adapter_advice(directory: Path) -> str:
    """Return what to do about a directory with an adapter of PEFT instead of a model."""
    base = read_object(directory / ADAPTER).get("base_model_name_or_path")
    parts = (MERGED if part == ADAPTERS else part for part in directory.parts)
    merged = Path(*parts)
    instead = (
        "merge it with peft's merge_and_unload and save the result, or use the folder `policy` of "
        "the run that made it"
    )
    if merged != directory and (merged / "config.json").is_file():
        instead = f"use {merged}, which has it merged"
    return f"it is a PEFT adapter of {base!r}, not a model; {instead}"


def on_missing_weights(
    names: Collection[str], missing: Sequence[str], files: Collection[Path]
) -> str:
    """Return why weights are missing, and what to do.

    `names` are the weights in the files.
    """
    if absent := _absent_part(files):
        return f"{absent} is missing; copy or download it too"
    bare = EMBEDDING.removeprefix(BASE)
    if bare in names and EMBEDDING not in names:
        return (
            f"the model was saved without its head, as AutoModel does ({bare} has no {BASE!r} "
            "before it); save it with AutoModelForCausalLM"
        )
    prefixes = {n.removesuffix(EMBEDDING) for n in names if n.endswith(EMBEDDING)} - {""}
    if prefixes:
        return (
            f"every name begins with {min(prefixes)!r}, which a wrapper added when the model was "
            "saved; save the model inside the wrapper"
        )
    if list(missing) == [HEAD]:
        heads = sorted(n for n in names if n.startswith(("score.", "classifier.", "v_head.")))
        what = f" (it has {heads[0]} instead)" if heads else ""
        return (
            f"the model has no output weights{what}. Set tie_word_embeddings to true in "
            "config.json if they are the embedding; otherwise save an AutoModelForCausalLM"
        )
    return "config.json and the weights belong to different models, or a file is missing"


def _absent_part(files: Collection[Path]) -> str:
    """Return the name of a file that is not among those of a model in numbered parts, or ""."""
    names = {path.name for path in files}
    for name in sorted(names):
        if parts := part_names(name):
            return next((part for part in parts if part not in names), "")
    return ""
