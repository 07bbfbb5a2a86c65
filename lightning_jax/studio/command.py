"""`lightning-jax view`: print a run's rollouts, or write them to a page."""

from pathlib import Path

from rich.console import Console

from lightning_jax.studio.load import ViewError, open_run
from lightning_jax.studio.page import render_page
from lightning_jax.studio.terminal import render_rollout, render_run
from lightning_jax.system.files import SHARED, write_whole


def show(
    run_dir: Path,
    rollout_id: str | None,
    *,
    phase: str | None,
    step: int | None,
    limit: int,
    chars: int,
    html: Path | None,
) -> None:
    """Print the run's table or one rollout. With `html`, write a page instead.

    Raises UserError if there is nothing to show or the page cannot be written.
    """
    if html is not None and html.suffix not in (".html", ".htm"):  # for example a run's store
        raise ViewError(
            f"--html is {str(html)!r}; expected a name that ends in .html.",
            reason="wrong_suffix",
            key="--html",
        )
    console = Console(highlight=False)
    with open_run(run_dir) as reader:
        if rollout_id is not None:
            run, ids = None, [rollout_id]
        else:
            run = reader.run(phase=phase, step=step, limit=limit)
            ids = [row.rollout.rollout_id for row in run.rows]
        if html is not None:
            _write(html, render_page(run, [reader.rollout(rollout_id) for rollout_id in ids]))
            console.print(f"rollouts written to {html}: {len(ids)}", markup=False, soft_wrap=True)
        elif run is not None:
            console.print(render_run(run, console.width))
        else:
            console.print(render_rollout(reader.rollout(ids[0]), console.width, chars))


def _write(path: Path, page: str) -> None:
    try:
        write_whole(path, page, SHARED)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ViewError(
            f"--html is {str(path)!r}, which cannot be written ({error.strerror}); use a file in "
            "an existing directory.",
            reason="not_found",
            key="--html",
        ) from error
