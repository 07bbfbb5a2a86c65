"""Sink for Weights & Biases."""

import logging
import os
from pathlib import Path

from lightning_jax.train.sinks.base import ResultTable, Row, RunIdentity, Status

log = logging.getLogger(__name__)


class WandbSink:
    """Run of W&B with the id of the run directory.

    Without an API key it is recorded offline, because W&B would otherwise wait for someone to type
    one.
    """

    def __init__(self, run: RunIdentity) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        is_offline = not os.environ.get("WANDB_MODE") and not _has_key()
        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            config=dict(run.settings),
            dir=str(run.directory),
            mode="offline" if is_offline else None,
            resume="allow",
            reinit="create_new",
            save_code=False,
            # The metadata would hold the command line, which may hold a key.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_meta=True
            ),
        )
        # W&B's own step cannot go back, but a resumed run does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        directory = Path(self._run.dir).parent
        log.info("wandb: %s", f"offline in {directory}" if self._run.offline else self._run.url)

    def write(self, row: Row) -> None:
        """Log the row."""
        self._run.log(dict(row))

    def close(self, results: ResultTable, status: Status) -> None:
        """Log the results as a table, and wait for the upload."""
        if results.rows:
            rows = [list(row) for row in results.rows]
            self._run.log({"results": self._table(columns=list(results.columns), data=rows)})
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _has_key() -> bool:
    """Return whether W&B has a key of this user. Asks nobody."""
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        return wandb.login(prompt=False, verify=False)
    except TypeError:  # an older release
        return bool(wandb.api.api_key)
