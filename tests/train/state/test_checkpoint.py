"""Tests of checkpoints: restoring returns the saved state, and writes are atomic."""

import errno
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from coded import raises_coded
from log_events import records

from lightning_jax.rl.config import OptimizerConfig
from lightning_jax.rl.update.train_state import TrainState, init_state, make_optimizer
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.train.config import CheckpointConfig
from lightning_jax.train.state.checkpoint import Checkpointer, CheckpointError
from lightning_jax.train.state.checkpoint_files import CHECKSUMS


def _state(seed: int, embed_dim: int = 32) -> TrainState:
    params = tiny_model(seed, embed_dim=embed_dim).params
    return init_state(params, make_optimizer(OptimizerConfig()))


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig(keep=2))
    assert checkpointer.latest_step is None
    for step in (3, 5, 8):
        checkpointer.save(step, _state(step), {"tasks": {"next_index": step}})
    checkpointer.close()
    again = Checkpointer(tmp_path / "c", CheckpointConfig(keep=2))
    assert again.latest_step == 8
    assert again.steps == [5, 8] and again.progress(8) == {"tasks": {"next_index": 8}}
    jax.tree.map(np.testing.assert_array_equal, again.restore(_state(0)), _state(8))
    again.close()
    reader = Checkpointer(tmp_path / "c", CheckpointConfig(keep=2))
    older = reader.restore_params(_state(0).params, 5)
    jax.tree.map(np.testing.assert_array_equal, older, _state(5).params)
    reader.close()


def test_a_save_that_broke_off_is_not_seen(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig())
    checkpointer.save(1, _state(1), {})
    checkpointer.close()
    # Leftovers of a killed process: Orbax writes under a temporary name and renames at the end.
    (tmp_path / "c" / "2.orbax-checkpoint-tmp-7" / "state").mkdir(parents=True)
    again = Checkpointer(tmp_path / "c", CheckpointConfig())
    assert again.latest_step == 1
    jax.tree.map(np.testing.assert_array_equal, again.restore(_state(0)), _state(1))
    again.close()
    owner = Checkpointer(tmp_path / "c", CheckpointConfig(), deletes_drafts=True)
    owner.save(3, _state(3), {})
    owner.close()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["3"]


def test_a_disk_too_small_for_the_checkpoints_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for keep in (1, 10**9):
        checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig(keep=keep))
        checkpointer.warn_of_disk(_state(1))
        checkpointer.close()
    (warning,) = records(caplog, "disk_small")
    assert warning.needed > warning.free


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig())
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with raises_coded(CheckpointError, "disk_full", "1"):
        checkpointer.save(1, _state(1), {})
    assert not list((tmp_path / "c").iterdir())
    checkpointer.close()


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "open_files"),
        (ValueError("RESOURCE_EXHAUSTED: Too many open files [OS error 24]"), "open_files"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (ValueError("RESOURCE_EXHAUSTED: No space left on device [OS error 28]"), "disk_full"),
        (OSError(errno.EIO, "Input/output error"), "not_writable"),
    ],
)
def test_failed_save_names_what_helps(tmp_path: Path, cause: Exception, reason: str) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig())

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("in a library") from cause

    checkpointer._manager.save = fail  # type: ignore[method-assign]
    with raises_coded(CheckpointError, reason, "1"):
        checkpointer.save(1, _state(1), {})
    checkpointer.close()


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig())
    checkpointer.save(1, _state(1), {})
    with raises_coded(CheckpointError, "mismatch"):
        checkpointer.restore(_state(0, embed_dim=16))
    checkpointer.close()


def test_one_that_its_run_deletes_meanwhile_is_not_called_broken(tmp_path: Path) -> None:
    run = Checkpointer(tmp_path / "c", CheckpointConfig(keep=1))
    run.save(1, _state(1), {})
    reader = Checkpointer(tmp_path / "c", CheckpointConfig(keep=1))
    run.save(2, _state(2), {})
    with raises_coded(CheckpointError, "deleted", "1"):
        reader.restore_params(_state(0).params, 1)
    reader.close()
    run.close()


def test_a_broken_one_is_named(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig())
    checkpointer.save(2, _state(2), {})
    for file in (tmp_path / "c" / "2" / "progress").iterdir():
        file.write_text("{")
    with raises_coded(CheckpointError, "malformed", "2"):
        checkpointer.progress(2)
    checkpointer.close()


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "c", CheckpointConfig())
    with raises_coded(CheckpointError, "empty"):
        checkpointer.restore(_state(0))
    checkpointer.close()


def _saved(directory: Path, keep: int = 3) -> Checkpointer:
    checkpointer = Checkpointer(directory / "c", CheckpointConfig(keep=keep))
    for step in (1, 2, 3):
        checkpointer.save(step, _state(step), {"tasks": step})
    return checkpointer


def _newest(checkpointer: Checkpointer) -> tuple[int, TrainState]:
    return checkpointer.read_newest(
        lambda step: (checkpointer.progress(step)["tasks"], checkpointer.restore(_state(0), step))
    )


def _empty(path: Path) -> None:
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            file.write_bytes(b"")


@pytest.mark.parametrize("part", ["state", "progress", "progress/metadata", ""])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = _saved(tmp_path)
    _empty(tmp_path / "c" / "3" / part)
    step, state = _newest(checkpointer)
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, state, _state(2))
    (warning,) = records(caplog, "checkpoint_damaged")
    assert warning.steps == [3] and warning.levelname == "WARNING"
    assert checkpointer.steps == [1, 2] and (tmp_path / "c_damaged" / "3").is_dir()
    checkpointer.save(3, _state(5), {"tasks": 5})  # the run has made the step again
    assert _newest(checkpointer)[0] == 5
    checkpointer.close()


def _flip(path: Path) -> None:
    """Change one bit in the middle of the longest file of a directory."""
    file = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_one_wrong_bit_in_the_weights_is_found(tmp_path: Path) -> None:
    checkpointer = _saved(tmp_path)
    _flip(tmp_path / "c" / "3" / "state")
    with raises_coded(CheckpointError, "malformed", "3"):
        checkpointer.restore_params(_state(0).params, 3)
    assert _newest(checkpointer)[0] == 2
    checkpointer.close()


def test_metadata_that_hides_all_checkpoints_is_moved_away(tmp_path: Path) -> None:
    _saved(tmp_path).close()
    (tmp_path / "c" / "3" / "_CHECKPOINT_METADATA").write_text("[]")
    with raises_coded(CheckpointError, "malformed", str(tmp_path / "c")):
        Checkpointer(tmp_path / "c", CheckpointConfig())
    owner = Checkpointer(tmp_path / "c", CheckpointConfig(keep=3), deletes_drafts=True)
    assert owner.steps == [1, 2] and _newest(owner)[0] == 2
    owner.close()
    for step in (1, 2):
        (tmp_path / "c" / str(step) / "_CHECKPOINT_METADATA").write_text("[]")
    with raises_coded(CheckpointError, "malformed", "2"):
        Checkpointer(tmp_path / "c", CheckpointConfig(keep=3), deletes_drafts=True)


def test_if_all_are_damaged_the_newest_is_named_and_stays(tmp_path: Path) -> None:
    checkpointer = _saved(tmp_path, keep=2)
    _empty(tmp_path / "c")
    with raises_coded(CheckpointError, "malformed", "3"):
        _newest(checkpointer)
    assert checkpointer.steps == [2, 3] and not (tmp_path / "c_damaged").exists()
    checkpointer.close()


def test_another_model_is_no_damage(tmp_path: Path) -> None:
    checkpointer = _saved(tmp_path)
    with raises_coded(CheckpointError, "mismatch"):
        checkpointer.read_newest(lambda step: checkpointer.restore(_state(0, embed_dim=16), step))
    assert checkpointer.steps == [1, 2, 3]
    checkpointer.close()


@pytest.mark.parametrize("text", ["3", "[]", "{}", '{"shapes": 1, "progress": {}}', "null"])
def test_progress_of_another_form_is_damage(text: str, tmp_path: Path) -> None:
    checkpointer = _saved(tmp_path)
    (tmp_path / "c" / "3" / CHECKSUMS).unlink()
    (tmp_path / "c" / "3" / "progress" / "metadata").write_text(text)
    assert _newest(checkpointer)[0] == 2
    checkpointer.close()


def test_a_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    checkpointer = _saved(tmp_path)
    (tmp_path / "c" / "3" / CHECKSUMS).unlink()  # as in earlier releases
    assert _newest(checkpointer)[0] == 3
    _empty(tmp_path / "c" / "3" / "progress")
    assert _newest(checkpointer)[0] == 2
    checkpointer.close()
