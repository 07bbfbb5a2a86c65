"""Orbax checkpoints of a run: params, optimizer state, and positions in the task pipelines."""

import errno
import logging
import os
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from lightning_jax.errors import UserError
from lightning_jax.models.transformer import Params
from lightning_jax.rl.train_state import TrainState
from lightning_jax.system.descriptors import causes, is_exhausted
from lightning_jax.system.files import make_private
from lightning_jax.train.config import CheckpointConfig
from lightning_jax.types import Leaf

log = logging.getLogger(__name__)


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
        try:
            make_private(self._directory.parent)  # any process may get here first
            make_private(self._directory)
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
            self._manager.save(step, args=arguments, force=True)
            self._manager.wait_until_finished()
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
        """Return the `progress` object saved with the state of `step`."""
        return self._read(step, progress=ocp.args.JsonRestore())["progress"]["progress"]

    def restore(self, like: Any) -> Any:
        """Load the newest state with the structure, shapes and shardings of `like`.

        Raises CheckpointError if there is none or it does not fit.
        """
        step = self.latest_step
        if step is None:
            raise CheckpointError(
                f"{self._directory} holds no checkpoint.", reason="empty", key=str(self._directory)
            )
        kept = _kept(like)
        described = self._read(step, progress=ocp.args.JsonRestore())["progress"]
        self._check_shapes(step, described["shapes"], _shapes(kept))
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, kept)
        found = self._read(step, state=ocp.args.StandardRestore(abstract))["state"]
        return jax.tree.map(
            lambda state, kept: replace(state, **vars(kept)), like, found, is_leaf=_is_state
        )

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
        found = self._read(step, state=arguments)["state"]
        return (found[policy] if policy else found)["params"]

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError) as error:
            if not (self._directory / str(step)).exists():
                raise CheckpointError(
                    f"the checkpoint of step {step} in {self._directory} was deleted while it was "
                    "read, because a run keeps only its newest checkpoint.keep; wait for the run "
                    "to end, or stop it.",
                    reason="deleted",
                    key=str(step),
                ) from error
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._directory} cannot be read: "
                f"{str(error).rstrip('.')}. Delete its directory to resume from the previous one, "
                "or use another run_dir.",
                reason="malformed",
                key=str(step),
            ) from error

    def _check_shapes(self, step: int, found: dict[str, Any], expected: dict[str, Any]) -> None:
        wrong = sorted(k for k in found | expected if found.get(k) != expected.get(k))
        if wrong:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self._directory} does not match the model: "
                f"{wrong[0]} has shape {found.get(wrong[0])}, expected {expected.get(wrong[0])}. "
                "Use the model that it was trained with, or another run_dir.",
                reason="mismatch",
                key=wrong[0],
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
