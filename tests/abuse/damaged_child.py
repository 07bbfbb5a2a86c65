"""Script that damages files and loads each of them. It prints a line of JSON about each.

Its arguments are the folder to work in, a seed, the number of files, and the bytes of address space
that it may take for one.
"""

import contextlib
import json
import logging
import random
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from damaged_files import (
    CHECKPOINT,
    GGUF,
    HF,
    KEPT,
    KINDS,
    OLDER,
    STEPS,
    damage,
    path_of,
    state_of,
    write_checkpoints,
    write_files,
)

from lightning_jax.errors import Coded
from lightning_jax.models.formats.find import load_tokenizer
from lightning_jax.models.formats.load import load_model
from lightning_jax.train.state.checkpoint import Checkpointer


def main(folder: Path, seed: int, number: int, limit: int) -> None:
    """Damage files one after another and load each."""
    warnings.simplefilter("error", RuntimeWarning)
    logging.disable()
    write_files(folder)
    for kind in KINDS:
        _load(kind, folder)
    limit += _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for case in range(number):
        rng = random.Random(f"{seed}-{case}")
        kind = KINDS[case % len(KINDS)]
        path = path_of(kind, folder, rng)
        sound = path.read_bytes()
        path.write_bytes(damage(kind, sound, rng))
        _say(case=case, kind=kind)
        _say(case=case, kind=kind, file=path.name, **_measured(kind, folder))
        if kind in (CHECKPOINT, OLDER):
            write_checkpoints(folder)
        else:
            path.write_bytes(sound)


def _load(kind: str, folder: Path) -> str:
    """Load what the file is part of, and use it. Return which checkpoint was read."""
    if kind in (CHECKPOINT, OLDER):
        return _load_checkpoint(folder, is_checked=kind == CHECKPOINT)
    name = str(folder / (GGUF if kind == GGUF else HF))
    load_tokenizer(name)
    model = load_model(name)
    model.tokenizer.decode(model.tokenizer.encode_text("a b c <|im_end|>"))
    model.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    return "loaded"


def _load_checkpoint(folder: Path, *, is_checked: bool) -> str:
    owner = Checkpointer(folder / CHECKPOINT, KEPT, deletes_drafts=True)
    with contextlib.closing(owner) as checkpointer:

        def read(step: int) -> tuple[int, dict[str, Any], Any]:
            return step, checkpointer.progress(step), checkpointer.restore(state_of(0), step)

        step, progress, state = checkpointer.read_newest(read)
    if is_checked:
        assert progress == {"tasks": {"next_index": step}}
        jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    return "loaded" if step == STEPS[-1] else "the one before"


def _measured(kind: str, folder: Path) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    before, started = _status("VmRSS"), time.monotonic()
    found: dict[str, Any]
    try:
        found = {"outcome": _load(kind, folder)}
    except Coded as error:
        found = {"outcome": "refused", "reason": error.reason, "message": str(error)}
    except BaseException as error:  # noqa: BLE001 (a panic of Rust is no Exception)
        found = {"outcome": "crashed", "message": repr(error)[:500]}
    seconds = time.monotonic() - started
    return found | {"seconds": seconds, "mib": (_status("VmHWM") - before) / 2**20}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201 (read by the test)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
