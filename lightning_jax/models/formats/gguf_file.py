"""GGUF files, opened to read metadata or tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from lightning_jax.models.formats.names import ModelError


class _Reader(gguf.GGUFReader):
    def _build_fields(self, offs: Any, count: Any) -> Any:
        # The vocabulary is 150,000 slices, and slicing np.memmap takes four times as long.
        self.data = self.data.view(np.ndarray)
        return super()._build_fields(offs, count)


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
