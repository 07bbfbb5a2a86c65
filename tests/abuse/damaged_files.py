"""Files of models and runs, and seeded ways to damage them."""

import contextlib
import functools
import json
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFValueType
from gguf_models import ARRAY, FLAG, NUMBER, TEXT, write_gguf

from lightning_jax.models.formats.load import save_hf
from lightning_jax.rl.config import OptimizerConfig
from lightning_jax.rl.update.train_state import TrainState, init_state, make_optimizer
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import CheckpointConfig
from lightning_jax.train.state.checkpoint import Checkpointer
from lightning_jax.train.state.checkpoint_files import CHECKSUMS

HF, GGUF, CHECKPOINT = "hf", "model.gguf", "checkpoint"
OLDER = "older checkpoint"  # without checksums
JSON_FILES = (
    *("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
STEPS, KEPT = (1, 2), CheckpointConfig(keep=2)  # checkpoints
WEIGHTS = "model.safetensors"
KINDS = (*JSON_FILES, WEIGHTS, GGUF, CHECKPOINT, OLDER)
# Values that a field of JSON may have instead of its own.
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 2**80, 10**400, 0.5, float("nan"), float("inf"), 1e308),
    *("", "x", "\x1b[2J\nstep 3: done", "\ud800", [], {}, [[]], {"a": {}}, [1, "x", None]),
    *("[" * 2000, "9" * 5000, [[[[0]]]], {"content": 3}, {"type": "nothing"}),
)


def write_files(folder: Path) -> None:
    """Write the sound files of a model of each format."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model()
    directory = folder / HF
    save_hf(directory, model)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    token = {"content": "<|im_end|>", "special": True}
    settings["additional_special_tokens"] = ["<|im_start|>", "<|im_end|>"]
    settings["chat_template"] = [{"name": "default", "template": settings["chat_template"]}]
    for name, fields in (
        ("tokenizer_config.json", settings),
        ("special_tokens_map.json", {"eos_token": token}),
        ("added_tokens.json", {"<|im_end|>": 258}),
    ):
        (directory / name).write_text(json.dumps(fields))
    _write_gguf(folder / GGUF)
    write_checkpoints(folder)


def _write_gguf(path: Path, odd: Mapping[str, tuple[Any, ...]] = {}) -> None:
    """Write the model as a GGUF file. `odd` has other values for fields."""
    model = tiny_model()
    tokens = sorted(model.tokenizer.vocabulary, key=model.tokenizer.vocabulary.__getitem__)
    tokens[255] = "ab"  # of the merge
    fields = {
        "tokenizer.ggml.tokens": (tokens, ARRAY, TEXT),
        "tokenizer.ggml.merges": (["a b"], ARRAY, TEXT),
        "tokenizer.ggml.bos_token_id": (257, NUMBER),
        "tokenizer.ggml.add_bos_token": (True, FLAG),
    }
    write_gguf(path, model, fields | dict(odd), is_quantized=True)


def path_of(kind: str, folder: Path, rng: random.Random) -> Path:
    """Return the file of this kind. Of a checkpoint, it is one of the newest step's files."""
    if kind == OLDER:
        (newest(folder) / CHECKSUMS).unlink()
    if kind in (CHECKPOINT, OLDER):
        return rng.choice(sorted(path for path in newest(folder).rglob("*") if path.is_file()))
    return folder / GGUF if kind == GGUF else folder / HF / kind


def newest(folder: Path) -> Path:
    """Return the directory of the newest checkpoint."""
    return folder / CHECKPOINT / str(STEPS[-1])


@functools.cache
def state_of(step: int) -> TrainState:
    """Return the state that the checkpoint of a step has."""
    return init_state(tiny_model(step).params, make_optimizer(OptimizerConfig()))


def write_checkpoints(folder: Path) -> None:
    """Write two sound checkpoints, or copy them if that was done before."""
    sound, target = folder / "sound", folder / CHECKPOINT
    if not sound.is_dir():
        with contextlib.closing(Checkpointer(sound, KEPT)) as checkpointer:
            for step in STEPS:
                checkpointer.save(step, state_of(step), {"tasks": {"next_index": step}})
    for path in (target, folder / f"{CHECKPOINT}_damaged"):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sound, target)


def damage(kind: str, content: bytes, rng: random.Random) -> bytes:
    """Return the content of a file with a few faults."""
    ways: list[Callable[[bytes, random.Random], bytes]] = [bytes_damaged]
    if kind in JSON_FILES:
        ways += [json_damaged] * 3
    if kind in (CHECKPOINT, OLDER) and content.startswith(b"{"):
        ways += [json_damaged] * 3
    if kind == WEIGHTS:
        ways += [_header_damaged] * 3
    if kind == GGUF:
        ways += [_metadata_damaged, _field_replaced, _field_replaced, _field_replaced]
    return rng.choice(ways)(content, rng)


def bytes_damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the content cut, longer, replaced, or with wrong bytes."""
    data = bytearray(content or b"\0")
    match rng.randrange(6):
        case 0:
            return bytes(data[: rng.randrange(len(data))])  # may be empty
        case 1:
            return bytes(rng.randbytes(rng.randrange(200)))
        case 2:
            at = rng.randrange(len(data))
            return bytes(data[:at] + data[rng.randrange(at, len(data)) :])
        case 3:
            at = rng.randrange(len(data))
            data[at:at] = rng.randbytes(rng.randrange(1, 50))
        case _:
            for _ in range(rng.choice([1, 1, 4, 30])):
                data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def json_damaged(content: bytes, rng: random.Random) -> bytes:
    """Return JSON with other values, of any type, in some places."""
    tree = json.loads(content)
    for _ in range(rng.choice([1, 1, 1, 3])):
        tree = _with_odd(tree, rng)
    return json.dumps(tree).encode()


def _with_odd(tree: Any, rng: random.Random) -> Any:
    """Return JSON with one value replaced or removed, at any depth."""
    # Vocabularies are long. Most faults are to be in the other parts.
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.1:
        return rng.choice(ODD)
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    key = rng.choice(keys)
    if rng.random() < 0.15:
        if isinstance(tree, dict):
            return {name: value for name, value in tree.items() if name != key}
        return tree[:key] + tree[key + 1 :]
    if rng.random() < 0.1 and isinstance(tree, dict):
        return {**tree, str(rng.choice(ODD))[:40]: tree[key]}
    value = _with_odd(tree[key], rng) if rng.random() < 0.8 else rng.choice(ODD)
    if isinstance(tree, dict):
        return {**tree, key: value}
    return [*tree[:key], value, *tree[key + 1 :]]


def _header_damaged(content: bytes, rng: random.Random) -> bytes:
    """Damage the JSON that begins a safetensors file."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json_damaged(content[8 : 8 + size], rng)
    length = rng.choice([len(header)] * 6 + [0, 2**30, 2**62, len(header) + 8])
    return struct.pack("<Q", length) + header + content[8 + size :]


def _metadata_damaged(content: bytes, rng: random.Random) -> bytes:
    """Damage the numbers of a GGUF file's metadata: lengths, types, counts and offsets."""
    data, end = bytearray(content), content.rfind(b"ffn_norm.weight") + 80
    for _ in range(rng.choice([1, 1, 2, 5])):
        size, form = rng.choice([(4, "<I"), (8, "<Q")])
        # Most integers follow a name or begin at one of the first bytes.
        at = rng.choice([rng.randrange(4, 24), _after_a_name(data, rng), rng.randrange(end)])
        values = (0, 1, 3, 8, 9, 12, 13, 255, 2**20, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)
        value = rng.choice(values) % 2 ** (8 * size)
        data[at : at + size] = struct.pack(form, value)
    return bytes(data)


def _after_a_name(data: bytearray, rng: random.Random) -> int:
    names = [b"tokens", b"merges", b"token_type", b"_count", b"_length", b"architecture", b"weight"]
    places = []
    name = rng.choice(names)
    at = data.find(name)
    while at >= 0:
        places.append(at + len(name))
        at = data.find(name, at + 1)
    return (rng.choice(places) if places else 24) + rng.choice([0, 4, 8, 12, 16, 20, 24])


_FIELDS = (
    *("llama.embedding_length", "llama.feed_forward_length", "llama.block_count", "general.type"),
    *("llama.attention.head_count", "llama.attention.head_count_kv", "llama.context_length"),
    *("llama.attention.key_length", "llama.attention.layer_norm_rms_epsilon"),
    *("llama.rope.freq_base", "llama.rope.scaling.type", "llama.rope.scale_linear"),
    *("llama.expert_count", "split.count", "split.no", "general.architecture"),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "padding")),
    *("tokenizer.ggml.add_bos_token", "tokenizer.chat_template", "general.alignment"),
)
_VALUES: tuple[tuple[Any, ...], ...] = (
    *((value, GGUFValueType.UINT32) for value in (0, 1, 3, 7, 2**20, 2**32 - 1)),
    *((value, GGUFValueType.INT64) for value in (-1, 2**62)),
    *((value, GGUFValueType.FLOAT64) for value in (0.0, -1.0, 1e300, float("nan"), float("inf"))),
    *((value, GGUFValueType.STRING) for value in ("", "x", "\x1b[2J\nstep 3: done", "{{" * 500)),
    (True, GGUFValueType.BOOL),
    *(([value], GGUFValueType.ARRAY, GGUFValueType.INT32) for value in (0, 5)),
    (["a b", "a", "c d e"], GGUFValueType.ARRAY, GGUFValueType.STRING),
)


def _field_replaced(content: bytes, rng: random.Random) -> bytes:
    """Return the GGUF file with other values, of any type, in some fields."""
    odd = {rng.choice(_FIELDS): rng.choice(_VALUES) for _ in range(rng.choice([1, 1, 2]))}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / GGUF
        _write_gguf(path, odd)
        return path.read_bytes()


def array_of(item: int, number: int, size: int = 4096) -> bytes:
    """Return a GGUF file of `size` bytes with an array of so many items of a type."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    return (head + struct.pack("<IIQ", GGUFValueType.ARRAY, item, number)).ljust(size, b"\0")
