"""Commands that read runs: `lightning-jax view`, `runs`, `compare`, `verify` and `rescore`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lightning_jax.cli.command import (
    AtLeastOne,
    Command,
    Index,
    RunCommand,
    UsageError,
    argument,
    flag,
)
from lightning_jax.errors import UserError
from lightning_jax.settings.schema import Positive
from lightning_jax.studio import DEFAULT_CHARS, DEFAULT_LIMIT, Axis
from lightning_jax.system.files import SHARED, write_whole
from lightning_jax.types import PHASES


@dataclass(frozen=True, kw_only=True)
class View(Command):
    """Show a run's rollouts as a table, newest step first, or one rollout as a waterfall.

    The waterfall has agent, LLM and tool spans with prompts, responses, credit and advantages.
    """

    needs_jax: ClassVar[bool] = False
    run_dir: Path = argument("RUN", "a run directory, or a file of `try --record`")
    rollout_id: str | None = argument(
        "ROLLOUT", "rollout to show (default: a table of all)", default=None
    )
    phase: str | None = flag("only rollouts of this phase", choices=PHASES)
    step: Index | None = flag("only rollouts of this step")
    limit: AtLeastOne = flag(
        "maximum number of rollouts (default: %(default)s)", default=DEFAULT_LIMIT
    )
    chars: Index = flag(
        "maximum number of characters per text, 0 for no limit (default: %(default)s)",
        default=DEFAULT_CHARS,
    )
    html: Path | None = flag(
        "write a self-contained HTML page with the details of all rollouts", "FILE"
    )

    def run(self) -> int:
        from rich.console import Console

        from lightning_jax.studio.load import open_run
        from lightning_jax.studio.page import render_page
        from lightning_jax.studio.terminal import render_rollout, render_run

        if self.rollout_id and (self.phase or self.step is not None):
            raise UsageError.conflict(
                "ROLLOUT", "--phase and --step cannot be combined with a rollout; drop one of them."
            )
        self._check_page()
        console = Console(highlight=False)
        with open_run(self.run_dir) as reader:
            table, ids = None, [self.rollout_id or ""]
            if self.rollout_id is None:
                table = reader.run(phase=self.phase, step=self.step, limit=self.limit)
                ids = [row.rollout.rollout_id for row in table.rows]
            if self.html is not None:
                self._write_page(render_page(table, list(map(reader.rollout, ids))))
                text = f"rollouts written to {self.html}: {len(ids)}"
                print(text)
            elif table is not None:
                console.print(render_run(table, console.width))
            else:
                console.print(render_rollout(reader.rollout(ids[0]), console.width, self.chars))
        return 0

    def _check_page(self) -> None:
        if self.html is not None and self.html.suffix not in (".html", ".htm"):  # perhaps a store
            raise UserError(
                f"--html is {str(self.html)!r}; expected a name that ends in .html.",
                reason="wrong_suffix",
                key="--html",
            )

    def _write_page(self, page: str) -> None:
        assert self.html is not None, "there is a page to write"
        try:
            write_whole(self.html, page, SHARED)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise UserError.not_found(
                "--html",
                f"--html is {str(self.html)!r}, which cannot be written ({error.strerror}); use a "
                "file in an existing directory.",
            ) from error


@dataclass(frozen=True, kw_only=True)
class Runs(Command):
    """Print a table of the runs in a folder, newest first: status, steps, rewards, failures."""

    needs_jax: ClassVar[bool] = False
    folder: Path = argument(
        "DIR", "folder that holds runs, or one run (default: %(default)s)", default=Path("runs")
    )

    def run(self) -> int:
        from rich.console import Console

        from lightning_jax.studio.runs import find_runs, runs_table
        from lightning_jax.studio.terminal import as_terminal

        console = Console(highlight=False)
        console.print(as_terminal(runs_table(find_runs(self.folder)), console.width))
        return 0


@dataclass(frozen=True, kw_only=True)
class Compare(Command):
    """Compare runs: settings that differ, curves, and tasks that were won and lost.

    All are compared with the first. Runs with commas between them count as seeds of one experiment.
    """

    needs_jax: ClassVar[bool] = False
    runs: list[str] = argument(
        "RUN[,RUN...]",
        "a run directory, or several with commas between them: seeds of one experiment",
    )
    markdown: bool = flag("print Markdown for a pull request", default=False)
    axis: Axis = flag("what the curves are drawn over (default: %(default)s)", default="steps")
    png: Path | None = flag("also draw the curves here", "FILE")

    def run(self) -> int:
        from rich.console import Console

        from lightning_jax.settings import ConfigError
        from lightning_jax.studio.comparison_tables import compare_runs, plot_runs
        from lightning_jax.studio.runs import read_run
        from lightning_jax.studio.terminal import as_markdown, as_terminal

        groups = [
            [read_run(Path(name)) for name in names.split(",") if name] for names in self.runs
        ]
        if len(groups) < 2 or not all(groups):
            raise ConfigError.missing("RUN", "compare needs two runs; pass two run directories.")
        if self.png is not None:  # before anything is printed: the path may be wrong
            plot_runs(groups, self.axis, self.png)
        grids = compare_runs(groups, self.axis)
        console = Console(highlight=False)
        if self.markdown:
            text = "\n\n".join(as_markdown(grid) for grid in grids)
            print(text)
        else:
            for index, grid in enumerate(grids):
                console.print(*[""] * bool(index), as_terminal(grid, console.width), sep="\n")
        if self.png is not None:
            print(f"curves: {self.png}")
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify(RunCommand):
    """Recompute the log-probs of a run's stored calls with the weights that sampled them.

    The exit code is 1 if any differs.
    """

    limit: AtLeastOne | None = flag(
        "maximum number of calls to compare, evenly spaced (default: all)"
    )
    tolerance: Positive | None = flag(
        "maximum difference of a log-prob in nats (default: 0.001, 1 for bfloat16)"
    )

    def run(self) -> int:
        self.require_run()

        from lightning_jax.cli.verify import as_text, verify  # imports JAX, after the check

        report = verify(self.run_dir, limit=self.limit, tolerance=self.tolerance)
        print(as_text(report))
        return 1 if report.off else 0


@dataclass(frozen=True, kw_only=True)
class Rescore(RunCommand):
    """Score the stored rollouts of a run by other rewards, and show what would change.

    Prints the mean of each component, the rank correlation with the stored rewards within groups,
    and the share of rollouts whose advantage changes its sign. With --phase eval, each evaluation
    has a line. The run itself stays as it is, except that verdicts of judges are kept in its store.
    `learn` trains with the other rewards.
    """

    rewards: Path = flag(
        "YAML file with a section `rewards`, as in a config", "FILE", required=True
    )
    phase: Literal["train", "eval"] = flag(
        "rollouts to score: train or eval (default: %(default)s)", default="train"
    )
    limit: AtLeastOne | None = flag("maximum number of groups, evenly spaced (default: all)", "N")

    def run(self) -> int:
        self.require_run()

        from lightning_jax.cli.rescore import rescore  # imports JAX, after the check

        rescore(self.run_dir, self.rewards, phase=self.phase, limit=self.limit)
        return 0
