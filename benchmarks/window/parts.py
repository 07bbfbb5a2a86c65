"""Files that travel to a machine without network, in parts of limited size."""

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODEL, DATA, WHEELS = "model.gguf", "data", "wheels"
MANIFEST = "parts.json"
ALIGNMENT = 32  # of GGUF's tensors, unless the file says otherwise


@dataclass(frozen=True)
class Missing:
    """Part that has not arrived, or arrived with other bytes."""

    name: str
    reason: str


def write_parts(model: Path, target: Path, *, first: int, size: int) -> list[Path]:
    """Cut the model into parts below `target`: one of `first` bytes, others of `size`.

    A file beside them has their digests and that of the whole.
    """
    target.mkdir(parents=True, exist_ok=True)
    whole, parts, digests = hashlib.sha256(), [], {}
    with model.open("rb") as file:
        while data := file.read(first if not parts else size):
            whole.update(data)
            part = target / f"part{len(parts):02d}"
            part.write_bytes(data)
            parts.append(part)
            digests[part.name] = hashlib.sha256(data).hexdigest()
    manifest = {"model": whole.hexdigest(), "parts": digests}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return parts


def join_parts(folder: Path) -> list[Missing]:
    """Join the parts of the model in `folder` unless it is there, and return what is missing."""
    manifest_path = folder / MANIFEST
    if not manifest_path.exists():
        return [Missing(MANIFEST, "has not arrived")]
    manifest = json.loads(manifest_path.read_text())
    model, done = folder / MODEL, folder / "model.sha256"
    if model.exists() and done.exists() and done.read_text() == manifest["model"]:
        return []
    missing = []
    for name, digest in manifest["parts"].items():
        part = folder / name
        if not part.exists():
            missing.append(Missing(name, "has not arrived"))
        elif hashlib.sha256(part.read_bytes()).hexdigest() != digest:
            missing.append(Missing(name, "has another digest than expected"))
    if missing:
        return missing
    whole = hashlib.sha256()
    with (draft := folder / "model.draft").open("wb") as file:
        for name in manifest["parts"]:
            data = (folder / name).read_bytes()
            whole.update(data)
            file.write(data)
    if whole.hexdigest() != manifest["model"]:
        return [Missing(MODEL, "has another digest than expected")]
    draft.rename(model)
    done.write_text(manifest["model"])
    return []


def drop_repeated_embedding(source: Path, target: Path) -> None:
    """Copy a GGUF file without the copy of the embedding that is not used, if it has one.

    The copy that is kept gets the embedding's name, so that the file reads as it did.
    """
    from lightning_jax.models.formats.gguf import repeated_embedding
    from lightning_jax.models.formats.gguf_file import open_file

    reader = open_file(source)
    copies = repeated_embedding({tensor.name: tensor for tensor in reader.tensors})
    if copies is None:
        shutil.copyfile(source, target)
        return
    kept = [tensor for tensor in reader.tensors if tensor.name != copies[1]]
    renamed = {copies[0]: "token_embd.weight"}
    data = source.read_bytes()
    infos, blobs, offset = b"", [], 0
    for tensor in kept:
        name = renamed.get(tensor.name, tensor.name).encode()
        dims = [int(size) for size in tensor.shape]
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        infos += struct.pack(f"<{len(dims)}Q", *dims)
        infos += struct.pack("<IQ", int(tensor.tensor_type), offset)
        start = int(tensor.data_offset)
        blob = data[start : start + int(tensor.n_bytes)]
        blobs.append(blob + bytes(-len(blob) % ALIGNMENT))
        offset += len(blobs[-1])
    # Magic and version, number of tensors, number of fields, fields.
    first_info = min(int(tensor.field.offset) for tensor in reader.tensors)
    header = data[:8] + struct.pack("<Q", len(kept)) + data[16:first_info] + infos
    target.write_bytes(header + bytes(-len(header) % ALIGNMENT) + b"".join(blobs))


def commands(
    parts: list[Path], carried: list[str], folder: str, follow: list[str]
) -> Iterator[str]:
    """Yield the lines that say what to carry with each command, and the command."""
    loads = [[f"{folder}/{part.name}"] for part in parts] or [[]]
    loads[0] += carried
    for number, names in enumerate(loads, 1):
        command = f"ls -l {folder}" if number < len(loads) else follow[0]
        yield f"{number}. carry {' '.join(names)}"
        yield f"   run   {command}"
    for number, command in enumerate(follow[1:], len(loads) + 1):
        yield f"{number}. run   {command}"
