"""Files of one checkpoint: their checksums, and a place for damaged ones.

The format itself has none for the arrays, so that a few wrong bytes would become wrong weights.
"""

import itertools
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lightning_jax.system.files import make_private, write_whole
from lightning_jax.system.text import in_one_line

CHECKSUMS = "checksums.json"  # in the directory of a checkpoint; older ones lack it
_METADATA = "_CHECKPOINT_METADATA"  # without which Orbax lists no checkpoint of the run
_CHUNK = 2**24  # bytes
_THREADS = 4


def write_checksums(directory: Path) -> None:
    """Write the size and the CRC-32 of each file of a complete checkpoint."""
    write_whole(directory / CHECKSUMS, json.dumps(_checksums(directory)) + "\n")


def find_damage(directory: Path) -> str | None:
    """Return what is wrong with the files, or None. Files without checksums are not checked."""
    path = directory / CHECKSUMS
    if not path.exists():
        return None
    try:
        written = json.loads(path.read_text())
    except ValueError as error:
        return f"{path.name} cannot be read: {in_one_line(str(error))}"
    if not isinstance(written, dict):
        return f"{path.name} is no object"
    now = _checksums(directory)
    wrong = sorted(name for name in {**now, **written} if now.get(name) != written.get(name))
    if not wrong:
        return None
    return f"{in_one_line(wrong[0])} is not the file that was written"


def is_listed(directory: Path) -> bool:
    """Return whether Orbax can list a checkpoint. One that it cannot hides all others from it."""
    try:
        metadata = json.loads((directory / _METADATA).read_text())
    except (OSError, ValueError):
        return True  # it ignores such a file
    try:
        written = json.loads((directory / CHECKSUMS).read_text())[_METADATA]
    except (OSError, ValueError, KeyError, TypeError):
        return isinstance(metadata, dict)
    return written == _checksum(directory / _METADATA)


def move_into(folder: Path, path: Path) -> None:
    """Move a directory into the folder, under a new name if that one is taken."""
    make_private(folder)
    names = itertools.chain([path.name], (f"{path.name}-{n}" for n in itertools.count(1)))
    path.rename(next(folder / name for name in names if not (folder / name).exists()))


def _checksums(directory: Path) -> dict[str, list[int]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    files = [path for path in files if path != directory / CHECKSUMS]
    with ThreadPoolExecutor(_THREADS) as pool:  # the sum releases the interpreter lock
        sums = list(pool.map(_checksum, files))
    names = [path.relative_to(directory).as_posix() for path in files]
    return dict(zip(names, sums, strict=True))


def _checksum(path: Path) -> list[int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]
