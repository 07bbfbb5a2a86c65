"""Orbax checkpoints of a run: params, optimizer state, and positions in the task pipelines."""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from lightning_jax.errors import UserError
from lightning_jax.models.transformer import Params
from lightning_jax.rl.update.train_state import TrainState
from lightning_jax.system.descriptors import causes, is_exhausted
from lightning_jax.system.files import make_private
from lightning_jax.system.text import in_one_line
from lightning_jax.train.config import CheckpointConfig
from lightning_jax.train.state.checkpoint_files import (
    find_damage,
    is_listed,
    move_into,
    write_checksums,
)
from lightning_jax.types import Leaf

log = logging.getLogger(__name__)

DAMAGED = "_damaged"  # end of the name of the directory for damaged checkpoints
MALFORMED = "malformed"  # reason of the error for a damaged checkpoint
T = TypeVar("T")


class CheckpointError(UserError, RuntimeError):
    """Failure to write or read a checkpoint. The message gives the reason and the fix."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Kept:
    """Saved fields of a TrainState: all except frozen weights."""

    step: Leaf
    params: Any
    opt_state: Any
    critic: Any


class Checkpointer:
    """Store for a run's state in `directory`, one folder per step.

    A folder gets its final name only when it is complete, so a crash during a save keeps the
    previous checkpoint. A state is a TrainState, or a dict of them by policy name. Base weights are
    not saved: `restore` takes them from the state it is given.
    """

    def __init__(
        self, directory: Path, config: CheckpointConfig, *, deletes_drafts: bool = False
    ) -> None:
        """Open the directory, or create it.

        `deletes_drafts` deletes checkpoints that a killed process did not complete. Nobody else may
        be writing there.
        """
        self._directory, self._keep = directory.resolve(), config.keep
        self._checked: set[int] = set()
        try:
            make_private(self._directory.parent)  # any process may get here first
            make_private(self._directory)
            if deletes_drafts and jax.process_count() == 1:
                self._set_aside_unlisted()
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=config.keep,
                    enable_async_checkpointing=False,
                    create=True,
                    cleanup_tmp_directories=deletes_drafts,
                ),
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot use {directory} for checkpoints: {error}.",
                reason="not_writable",
                key=str(directory),
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"{directory} has a damaged checkpoint ({in_one_line(str(error))}); resume its "
                "run, which moves it away, or delete it.",
                reason=MALFORMED,
                key=str(directory),
            ) from error

    @property
    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, or None if there is none."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def warn_of_disk(self, state: Any) -> None:
        """Warn if the disk is too small for the checkpoints to keep and the one being written."""
        size = _size(_kept(state))
        needed = size * (self._keep + 1 - len(self.steps))
        free = shutil.disk_usage(self._directory).free
        if needed > free:
            log.warning(
                "checkpoints need %.1f GB more (checkpoint.keep=%d and one being written, %.1f GB "
                "each), and %s has %.1f GB free; free disk space or lower checkpoint.keep",
                *(needed / 1e9, self._keep, size / 1e9, self._directory, free / 1e9),
                extra={"event": "disk_small", "needed": needed, "free": free},
            )

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Write one checkpoint and delete the oldest beyond `keep`. `progress` is any JSON object.

        Raises CheckpointError, for example on a full disk.
        """
        kept = _kept(state)
        described = {"shapes": _shapes(kept), "progress": progress}
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(kept), progress=ocp.args.JsonSave(described)
        )
        try:
            self._check_space(_size(kept))
            self._checked.discard(step)
            self._manager.save(step, args=arguments, force=True)
            self._manager.wait_until_finished()
            if jax.process_index() == 0:
                write_checksums(self._directory / str(step))
        except (OSError, ValueError) as error:
            reason, remedy = _remedy(error)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._directory}: "
                f"{str(error).rstrip('.')}. {remedy}; then run the same command to resume from the "
                "previous checkpoint.",
                reason=reason,
                key=str(step),
            ) from error

    def _check_space(self, size: int) -> None:
        """Raise OSError if the disk has room for less than half of a checkpoint of `size` bytes.

        Half may be enough, because checkpoints are compressed. Without this check each thread that
        writes to a full disk prints a traceback. Runs of several processes skip the check, because
        the other processes would wait for the one that raises.
        """
        free = shutil.disk_usage(self._directory).free
        if jax.process_count() == 1 and free < size / 2:
            raise OSError(
                f"{os.strerror(errno.ENOSPC)} ({size / 1e9:.1f} GB needed, {free / 1e9:.1f} free)"
            )

    def clear(self) -> None:
        """Delete all checkpoints."""
        for step in self.steps:
            self._manager.delete(step)

    def progress(self, step: int) -> dict[str, Any]:
        """Return the `progress` object saved with the state of `step`.

        Raises CheckpointError if it is damaged.
        """
        return self._described(step)["progress"]

    def restore(self, like: Any, step: int | None = None) -> Any:
        """Load the state of a step with the structure, shapes and shardings of `like`.

        By default it is the newest. Raises CheckpointError if there is none or it does not fit.
        """
        step = self.latest_step if step is None else step
        if step is None:
            raise CheckpointError.empty(
                str(self._directory), f"{self._directory} holds no checkpoint."
            )
        kept = _kept(like)
        self._check_shapes(step, self._described(step)["shapes"], _shapes(kept))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, kept)
        saved = self._read(step, state=ocp.args.StandardRestore(abstract))["state"]
        return jax.tree.map(
            lambda state, kept: replace(state, **vars(kept)), like, saved, is_leaf=_is_state
        )

    def read_newest(self, read: Callable[[int], T]) -> T:
        """Return what `read` returns for the newest checkpoint that is not damaged.

        `read` raises CheckpointError with the reason "malformed" for a damaged one. A warning names
        the checkpoints that are newer than the one that was read, and they are moved to a directory
        beside this one. If all are damaged, none is moved and the error of the newest is raised.
        With several processes only the newest is tried, because all must read the same one.
        """
        errors: dict[int, CheckpointError] = {}
        for step in reversed(self.steps):
            try:
                content = read(step)
            except CheckpointError as error:
                if error.reason != MALFORMED or jax.process_count() > 1:
                    raise
                errors[step] = error
                continue
            if errors:
                self._set_aside(list(errors), str(next(iter(errors.values()))))
                self._manager.reload()
            return content
        raise next(iter(errors.values()))

    def _set_aside(self, steps: Sequence[int], why: str) -> None:
        """Move damaged checkpoints to a directory of their own, with a warning."""
        folder = self._directory.with_name(f"{self._directory.name}{DAMAGED}")
        for step in steps:
            move_into(folder, self._directory / str(step))
        log.warning(
            "the checkpoint of step %s is damaged and was moved to %s; resuming from an older one "
            "(%s)",
            *(", ".join(map(str, steps)), folder, in_one_line(why)),
            extra={"event": "checkpoint_damaged", "steps": list(steps)},
        )

    def _set_aside_unlisted(self) -> None:
        """Move away checkpoints that would keep Orbax from listing any.

        Raise CheckpointError instead if there are no others.
        """
        steps = [int(path.name) for path in self._directory.glob("*") if path.name.isdecimal()]
        unlisted = [step for step in steps if not is_listed(self._directory / str(step))]
        if unlisted and len(unlisted) == len(steps):
            raise self._damaged(max(steps), "its metadata is not what was written")
        if unlisted:
            self._set_aside(unlisted, "metadata is not what was written")

    def _described(self, step: int) -> dict[str, Any]:
        """Return the saved shapes and progress. Raise CheckpointError if they are damaged."""
        saved = self._read(step, progress=ocp.args.JsonRestore())["progress"]
        fields = saved if isinstance(saved, dict) else {}
        parts = {name: fields.get(name) for name in ("shapes", "progress")}
        if not all(isinstance(part, dict) for part in parts.values()):
            raise self._damaged(step, "its progress is not the object that was saved")
        return parts

    def restore_params(self, like: Params, step: int, policy: str = "") -> Params:
        """Load only the weights, in the shardings of `like`.

        If several states were saved, `policy` names the one to load.
        """
        abstract: dict[str, Any] = {"params": jax.tree.map(ocp.utils.to_shape_dtype_struct, like)}
        if policy:
            abstract = {policy: abstract}
        arguments = ocp.args.PyTreeRestore(
            item=abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        saved = self._read(step, state=arguments)["state"]
        return (saved[policy] if policy else saved)["params"]

    def _read(self, step: int, **items: Any) -> Any:
        try:
            self._check_files(step)
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (CheckpointError, jax.errors.JaxRuntimeError, MemoryError):
            raise  # the device or the machine is too small
        except Exception as error:  # the libraries raise many kinds
            if not (self._directory / str(step)).exists():
                raise CheckpointError(
                    f"the checkpoint of step {step} in {self._directory} was deleted while it was "
                    "read, because a run keeps only its newest checkpoint.keep; wait for the run "
                    "to end, or stop it.",
                    reason="deleted",
                    key=str(step),
                ) from error
            if (reason := _unreadable(error)) is not None:
                raise CheckpointError(
                    f"the checkpoint of step {step} in {self._directory} cannot be read: "
                    f"{in_one_line(str(error)).rstrip('.')}. Check its permissions, its disk and "
                    "the limit of open files (`ulimit -Hn`), then run the same command again.",
                    reason=reason,
                    key=str(step),
                ) from error
            raise self._damaged(step, error) from error

    def _check_files(self, step: int) -> None:
        """Raise CheckpointError if a file is not the one that was written.

        With several processes the files are not checked, because each would read all of them.
        """
        if step in self._checked or jax.process_count() > 1:
            return
        if (fault := find_damage(self._directory / str(step))) is not None:
            raise self._damaged(step, fault)
        self._checked.add(step)

    def _damaged(self, step: int, fault: object) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint of step {step} in {self._directory} is damaged: "
            f"{in_one_line(str(fault)).rstrip('.')}. Delete its directory to go on from the one "
            "before it, or else from the start with the stored rollouts, or use another run_dir.",
            reason=MALFORMED,
            key=str(step),
        )

    def _check_shapes(self, step: int, saved: dict[str, Any], expected: dict[str, Any]) -> None:
        wrong = sorted(k for k in saved | expected if saved.get(k) != expected.get(k))
        if wrong:
            raise CheckpointError.mismatch(
                wrong[0],
                f"the checkpoint of step {step} in {self._directory} does not match the model: "
                f"{wrong[0]} has shape {saved.get(wrong[0])}, expected {expected.get(wrong[0])}. "
                "Use the model that it was trained with, or another run_dir.",
            )

    def close(self) -> None:
        self._manager.close()


def _remedy(error: Exception) -> tuple[str, str]:
    """Return a reason and a fix for a checkpoint that could not be written.

    Libraries may put the system's error number only into the text of their own errors.
    """
    text = " ".join(str(cause) for cause in causes(error))
    numbers = {cause.errno for cause in causes(error) if isinstance(cause, OSError)}
    if is_exhausted(error) or os.strerror(errno.EMFILE) in text:
        return (
            "open_files",
            "Raise the limit of open files (`ulimit -Hn`) or lower rollout.concurrency",
        )
    if numbers & {errno.ENOSPC, errno.EDQUOT} or os.strerror(errno.ENOSPC) in text:
        return "disk_full", "Free some disk space"
    return "not_writable", "Check the directory and its disk"


def _unreadable(error: Exception) -> str | None:
    """Return the reason if the system could not read a sound file, else None."""
    if is_exhausted(error) or os.strerror(errno.EMFILE) in str(error):
        return "open_files"
    numbers = {cause.errno for cause in causes(error) if isinstance(cause, OSError)}
    if numbers & {errno.EACCES, errno.EPERM, errno.EIO} or "PERMISSION_DENIED" in str(error):
        return "not_readable"
    return None


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def _kept(state: Any) -> Any:
    names = [field.name for field in fields(_Kept)]
    return jax.tree.map(
        lambda state: _Kept(*(getattr(state, name) for name in names)), state, is_leaf=_is_state
    )


def _size(state: Any) -> int:
    """Return the number of bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def _shapes(state: Any) -> dict[str, list[int]]:
    """Return the shape of each array, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}
