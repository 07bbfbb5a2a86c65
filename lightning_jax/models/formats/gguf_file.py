"""GGUF files, opened to read metadata or tensors."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType

from lightning_jax.models.formats.names import ModelError

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


def open_file(path: Path) -> gguf.GGUFReader:
    """Open the file, mapped to memory. Raises ModelError if it is missing or unreadable."""
    if not path.is_file():
        raise ModelError(
            f"GGUF file {path} does not exist; check the path",
            reason="not_found",
            key=str(path),
        )
    try:
        return _Reader(path)
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(
            f"{path} is not a readable GGUF file: {error}", reason="malformed", key=str(path)
        ) from error
