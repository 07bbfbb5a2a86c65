"""Damaged files of models and runs: each gives one sentence, within bounds of time and memory.

The long run is left out of `make test`:
python -m pytest -m slow tests/abuse/test_damaged_files.py (FUZZ_FILES, 4000; FUZZ_SEED).
"""

import json
import os
import select
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from arena import slowdown
from coded import raises_coded
from damaged_files import CHECKPOINT, GGUF, JSON_FILES, KINDS, OLDER, WEIGHTS, array_of, write_files
from gguf import GGUFValueType

from lightning_jax.models.formats.gguf_file import MAX_TEXTS, open_file
from lightning_jax.models.formats.load import load_model
from lightning_jax.models.model_files import MAX_CHARS, ModelError

FILES = int(os.environ.get("FUZZ_FILES", "4000"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
MAX_S = 5.0  # of one file, on an idle core
MAX_MIB = 64  # beyond what was resident; the files have less than 1 MiB
ADDRESSES = 4 * 2**30
STALL_S = 120.0
BEFORE = "the one before"


def _fuzz(folder: Path, seed: int, number: int) -> list[dict[str, Any]]:
    """Return what became of each damaged file. A process that says nothing is killed."""
    words = [str(Path(__file__).with_name("damaged_child.py")), str(folder)]
    folders = (*Path(__file__).parents[1:3], os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(map(str, folders))
    child = subprocess.Popen(
        [sys.executable, *words, *map(str, (seed, number, ADDRESSES))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Orbax and tensorstore write there
        env=os.environ | {"PYTHONPATH": path, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
    )
    assert child.stdout is not None
    rows: list[dict[str, Any]] = []
    try:
        while select.select([child.stdout], [], [], STALL_S)[0] and (
            line := child.stdout.readline()
        ):
            rows.append(json.loads(line))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    done = [row for row in rows if "outcome" in row]
    assert len(done) == number, f"ended or hung at {rows[-1:]}"
    return done


def _check(done: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Check each outcome, and return the number by kind and outcome."""
    for row in done:
        assert row["outcome"] in ("loaded", "refused", BEFORE), row
        assert row["mib"] < MAX_MIB, row
        message = row.get("message", "one line")
        assert message.isprintable() and 0 < len(message) <= MAX_CHARS, row
    slow = max(row["seconds"] for row in done)
    assert slow < MAX_S * slowdown(), slow
    return Counter((row["kind"], row["outcome"]) for row in done)


def test_damaged_files_give_one_sentence(tmp_path: Path) -> None:
    """Takes 10 s, because JAX starts in a process of its own with a limit of memory."""
    counts = _check(_fuzz(tmp_path, seed=1, number=240))
    for kind in (*JSON_FILES, WEIGHTS, GGUF):
        assert counts[kind, "refused"] > 0 and counts[kind, BEFORE] == 0
    assert counts[CHECKPOINT, BEFORE] == 24  # nothing that is wrong is taken
    assert counts[OLDER, BEFORE] > 0


@pytest.mark.slow
def test_thousands_of_damaged_files_give_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    done = _fuzz(tmp_path, SEED, FILES)
    counts = _check(done)
    with capsys.disabled():
        print(  # noqa: T201 (the result)
            f"\n{len(done)} files in {time.monotonic() - started:.0f} s: {dict(counts)}; longest "
            f"{max(row['seconds'] for row in done):.2f} s, most memory "
            f"{max(row['mib'] for row in done):.1f} MiB"
        )
    assert {kind for kind, _ in counts} == set(KINDS)


@pytest.mark.parametrize("item", list(GGUFValueType))
@pytest.mark.parametrize("number", [2**60, 2**64 - 1])
def test_an_array_longer_than_its_file_is_refused_at_once(
    item: GGUFValueType, number: int, tmp_path: Path
) -> None:
    path = tmp_path / GGUF
    path.write_bytes(array_of(item, number))
    started = time.monotonic()
    with raises_coded(ModelError, "malformed", str(path)):
        open_file(path)
    assert time.monotonic() - started < 1 * slowdown()


@pytest.mark.parametrize(
    "content",
    [
        array_of(GGUFValueType.STRING, MAX_TEXTS + 1, 8 * MAX_TEXTS + 4096),
        array_of(GGUFValueType.STRING, 1, 0) + struct.pack("<Q", 2**40) + bytes(64),
    ],
    ids=["too many texts", "a text longer than the file"],
)
def test_texts_that_would_fill_the_memory_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / GGUF
    path.write_bytes(content)
    with raises_coded(ModelError, "malformed", str(path)):
        open_file(path)


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "hidden_size", "32"),
        ("config.json", "num_attention_heads", 0),
        ("config.json", "num_key_value_heads", 3),
        ("config.json", "num_hidden_layers", 10**9),
        ("config.json", "rms_norm_eps", float("nan")),
        ("config.json", "rope_theta", None),
        ("config.json", "model_type", ["llama"]),
        ("tokenizer_config.json", "chat_template", [{"name": "default"}]),
        ("generation_config.json", "eos_token_id", "</s>"),
        ("generation_config.json", "eos_token_id", 2**80),
    ],
)
def test_a_wrong_field_is_named(file: str, field: str, value: Any, tmp_path: Path) -> None:
    write_files(tmp_path)
    path = tmp_path / "hf" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path / "hf"))
    assert caught.value.key == field or field == "num_key_value_heads"
    assert caught.value.reason in ("malformed", "unsupported")
