"""GGUF files, opened to read metadata or tensors."""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType

from lightning_jax.models.formats.names import ModelError
from lightning_jax.models.plain_files import malformed

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)")
_INDEX, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_LENGTH = struct.Struct("=Q")


class _Reader(gguf.GGUFReader):
    def _build_fields(self, offs: Any, count: Any) -> Any:
        # The vocabulary is 150,000 slices, and slicing np.memmap takes four times as long.
        self.data = self.data.view(np.ndarray)
        return super()._build_fields(offs, count)

    def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
        """Read a field, arrays faster than the library, which takes seconds for a vocabulary."""
        head, kind = int(orig_offs), GGUFValueType(raw_type)
        if kind != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(head, np.uint32)[0]))
        number, first = int(self._get(head + 4, np.uint64)[0]), head + 12
        parts = [self._get(head, np.uint32), self._get(head + 4, np.uint64)]
        if item == GGUFValueType.STRING:
            strings, end = self._strings(first, number)
            parts += strings
            return end - head, parts, list(range(2, len(parts))), [kind, item]
        scalar = self.gguf_scalar_to_np.get(item)
        if scalar is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(first, scalar, number)
        if len(values) < number:
            raise IndexError("an array in the metadata goes beyond the end of the file")
        return first + values.nbytes - head, [*parts, values], [2], [kind, item]

    def _strings(self, start: int, number: int) -> tuple[list[Any], int]:
        """Return (the bytes of `number` strings in a row, offset after them)."""
        data, size, at, found = self.data, len(self.data), start, []
        for _ in range(number):
            if at + 8 > size:
                raise IndexError("a string in the metadata goes beyond the end of the file")
            begin = at + 8
            at = begin + _LENGTH.unpack_from(data.data, at)[0]
            if at > size:
                raise IndexError("a string in the metadata goes beyond the end of the file")
            found.append(data[begin:at])
        return found, at


@dataclass(frozen=True)
class Contents:
    """Metadata and tensors of a model, mapped to memory, from one file or from all its parts."""

    fields: Mapping[str, gguf.ReaderField]
    tensors: Sequence[gguf.ReaderTensor]

    def value(self, name: str, default: Any = None) -> Any:
        """Return a field of the metadata."""
        entry = self.fields.get(name)
        return default if entry is None else entry.contents()


def open_file(path: Path) -> Contents:
    """Open a model of which this is the file, or any of its parts.

    Raises ModelError if a file is missing or unreadable.
    """
    whole = _open(path)
    if (number := int(whole.value(_COUNT, 1))) < 2:
        return whole
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) != number:
        raise ModelError(
            f"{path} is a part of a split GGUF model of {number} files, which are found by their "
            f"names; name them NAME-00001-of-{number:05}.gguf and so on, as they were published",
            reason="split",
            key=_COUNT,
        )
    paths = [
        path.with_name(f"{match[1]}-{part:05}-of-{number:05}{match[4]}")
        for part in range(1, number + 1)
    ]
    if absent := [part.name for part in paths if not part.is_file()]:
        raise ModelError(
            f"{path} is a part of a split GGUF model of {number} files, of which "
            f"{', '.join(absent[:3])} {'is' if len(absent) == 1 else 'are'} missing in its folder; "
            "copy or download all of them",
            reason="split",
            key=absent[0],
        )
    return _joined(paths)


def _joined(paths: Sequence[Path]) -> Contents:
    """Return the contents of all parts. The first has the metadata of the model."""
    parts = [_open(path) for path in paths]
    for index, (path, part) in enumerate(zip(paths, parts, strict=True)):
        if (part.value(_INDEX), part.value(_COUNT)) != (index, len(paths)):
            raise ModelError(
                f"{path} says that it is part {part.value(_INDEX, 0) + 1} of a split GGUF model of "
                f"{part.value(_COUNT, 1)} files; copy or download the parts of one model",
                reason="split",
                key=_INDEX,
            )
    tensors = [tensor for part in parts for tensor in part.tensors]
    expected = parts[0].value(_TENSORS, len(tensors))
    if not expected == len(tensors) == len({tensor.name for tensor in tensors}):
        raise ModelError(
            f"the {len(paths)} files of the split GGUF model {paths[0]} have {len(tensors)} "
            f"tensors instead of {expected} different ones; copy or download the parts of one "
            "model",
            reason="split",
            key=_TENSORS,
        )
    return Contents(parts[0].fields, tensors)


def _open(path: Path) -> Contents:
    if not path.is_file():
        raise ModelError(
            f"GGUF file {path} does not exist; check the path",
            reason="not_found",
            key=str(path),
        )
    try:
        reader = _Reader(path)
    except (ValueError, IndexError, OSError) as error:
        raise malformed(path, "a readable GGUF file", error, ModelError) from error
    return Contents(reader.fields, reader.tensors)
