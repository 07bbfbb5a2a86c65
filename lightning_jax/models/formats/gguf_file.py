"""GGUF files, opened to read metadata or tensors."""

import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
from gguf import GGUFValueType

from lightning_jax.models.model_files import ModelError, malformed, part_names, unusable
from lightning_jax.system.text import in_one_line

_INDEX, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_SWAPPED = ">Q" if sys.byteorder == "little" else "<Q"
WHERE, FIX = "the GGUF file", "convert the whole model again, or use another file of it"
_KINDS = {str: "a text", int: "an integer", float: "a number", bool: "a boolean", list: "a list"}
K = TypeVar("K")
# Published models have about 60 fields, up to some thousand tensors and a million texts. Each is an
# object here, which takes many times its bytes in the file.
MAX_ENTRIES, MAX_TEXTS = 2**16, 2**21


class _Reader(gguf.GGUFReader):
    """Reader that takes nothing from beyond the file's end, and arrays faster than the library.

    The library reads short or empty values there, and would read a list of 2**60 of them.
    """

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        first, end = int(offset), int(offset) + np.dtype(dtype).itemsize * int(count)
        if not 0 <= first <= end <= len(self.data):
            raise ValueError("a value goes beyond the end of the file")
        return super()._get(first, dtype, int(count), override_order)

    def _build_fields(self, offs: Any, count: Any) -> Any:
        if int(count) > MAX_ENTRIES:
            raise ValueError(f"the metadata has {count} fields; expected at most {MAX_ENTRIES}")
        self._num_texts = 0
        # The vocabulary is 150,000 slices, and slicing np.memmap takes four times as long.
        self.data = self.data.view(np.ndarray)
        return super()._build_fields(offs, count)

    def _get_field_parts(self, orig_offs: Any, raw_type: Any) -> Any:
        head, kind = int(orig_offs), GGUFValueType(raw_type)
        if kind != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(head, np.uint32)[0]))
        number, first = int(self._get(head + 4, np.uint64)[0]), head + 12
        parts = [self._get(head, np.uint32), self._get(head + 4, np.uint64)]
        if item == GGUFValueType.STRING:
            strings, end = self._strings(first, number)
            parts += strings
            return end - head, parts, list(range(2, len(parts))), [kind, item]
        if item not in self.gguf_scalar_to_np:
            raise ValueError("the metadata has an array of arrays, which no model needs")
        values = self._get(first, self.gguf_scalar_to_np[item], number)
        return first + values.nbytes - head, [*parts, values], [2], [kind, item]

    def _build_tensor_info(self, offs: Any, count: Any) -> Any:
        if int(count) > MAX_ENTRIES:
            raise ValueError(f"the file has {count} tensors; expected at most {MAX_ENTRIES}")
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: Any, fields: Any) -> None:
        with np.errstate(over="raise"):
            super()._build_tensors(start_offs, fields)
        if sum(tensor.n_bytes for tensor in self.tensors) > len(self.data):
            raise ValueError("tensors overlap")

    def _strings(self, start: int, number: int) -> tuple[list[Any], int]:
        """Return (the bytes of `number` strings in a row, offset after them)."""
        data, size, offset, texts = self.data, len(self.data), start, []
        length = struct.Struct("=Q" if self.byte_order == "I" else _SWAPPED)
        if number > (size - start) // length.size:  # before anything is kept
            raise ValueError("an array goes beyond the end of the file")
        self._num_texts += number
        if self._num_texts > MAX_TEXTS:
            raise ValueError(f"the metadata has more than {MAX_TEXTS} texts")
        for _ in range(number):
            begin = offset + length.size
            offset = begin + length.unpack_from(data.data, offset)[0]
            if offset > size:
                raise ValueError("a text goes beyond the end of the file")
            texts.append(data[begin:offset])
        return texts, offset


@dataclass(frozen=True)
class Contents:
    """Metadata and tensors of a model, mapped to memory, from one file or from all its parts."""

    fields: Mapping[str, gguf.ReaderField]
    tensors: Sequence[gguf.ReaderTensor]

    def value(self, name: str, kind: type[K], default: K | None = None) -> K | None:
        """Return a field of the metadata, or the default. Raise ModelError if it is not `kind`."""
        entry = self.fields.get(name)
        if entry is None:
            return default
        try:
            value = entry.contents()
        except UnicodeDecodeError as error:
            raise unusable(WHERE, name, str(error), "text in UTF-8", FIX) from error
        is_number = kind is float and type(value) is int
        if type(value) is not kind and not is_number:
            raise unusable(WHERE, name, value, _KINDS[kind], FIX)
        return kind(value) if is_number else value  # type: ignore[call-arg]

    def needed(self, name: str, kind: type[K], default: K | None = None) -> K:
        """Return a field or the default. Raise ModelError if there is neither."""
        value = self.value(name, kind, default)
        if value is None:
            raise lacks(name)
        return value


def lacks(part: str) -> ModelError:
    """Return the error for a file without a part that a model needs."""
    return ModelError.missing(
        part, f"{WHERE} lacks {in_one_line(part)}, which a model needs; {FIX}"
    )


def open_file(path: Path) -> Contents:
    """Open a model of which this is the file, or any of its parts.

    Raises ModelError if a file is missing or unreadable.
    """
    whole = _open(path)
    if (number := whole.needed(_COUNT, int, 1)) < 2:
        return whole
    paths = [path.with_name(name) for name in part_names(path.name)]
    if len(paths) != number:
        raise ModelError(
            f"{path} is a part of a split GGUF model of {number} files, which are found by their "
            f"names; name them NAME-00001-of-{number:05}.gguf and so on, as they were published",
            reason="split",
            key=_COUNT,
        )
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
        part_index, number = part.value(_INDEX, int), part.value(_COUNT, int)
        if (part_index, number) != (index, len(paths)):
            raise ModelError(
                f"{path} says that it is part {(part_index or 0) + 1} of a split GGUF model of "
                f"{number or 1} files; copy or download the parts of one model",
                reason="split",
                key=_INDEX,
            )
    tensors = [tensor for part in parts for tensor in part.tensors]
    expected = parts[0].value(_TENSORS, int, len(tensors))
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
        raise ModelError.not_found(str(path), f"GGUF file {path} does not exist; check the path")
    try:
        reader = _Reader(path)
    except Exception as error:  # of any kind, as the library checks little
        raise malformed(path, "a readable GGUF file", error) from error
    return Contents(reader.fields, reader.tensors)
