"""Sink for trackio: its local database, or the Space or server that its variables name."""

from typing import Any

from lightning_jax.train.sinks.base import ResultTable, Row, RunIdentity, Status


class TrackioSink:
    """Run of trackio. Its name ends in the run's id, because trackio finds runs by their names."""

    def __init__(self, run: RunIdentity) -> None:
        # trackio drops values while another thread imports this module, to draw the first curves.
        import matplotlib.figure  # noqa: F401
        import trackio  # pyright: ignore[reportMissingImports]

        self._table = trackio.Table
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )
        self._step = run.first_step

    def write(self, row: Row) -> None:
        """Log the row."""
        self._step = int(row["step"])
        self._run.log({name: v for name, v in row.items() if name != "step"}, step=self._step)

    def close(self, results: ResultTable, status: Status) -> None:
        """Log the results as a table, and wait until all is stored."""
        last: dict[str, Any] = {"status": status}
        if results.rows:
            rows = [list(row) for row in results.rows]
            last["results"] = self._table(columns=list(results.columns), data=rows)
        self._run.log(last, step=self._step)
        self._run.finish()
