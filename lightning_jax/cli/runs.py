"""The commands `lightning-jax runs`, `compare` and `rescore`."""

import argparse
from pathlib import Path

from lightning_jax.cli.runtime import Limit, number_of
from lightning_jax.studio import AXES


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `lightning-jax runs`."""
    where = "folder that holds runs, or one run (default: %(default)s)"
    parser.add_argument(
        "folder", metavar="DIR", type=Path, nargs="?", default=Path("runs"), help=where
    )


def run_runs(arguments: argparse.Namespace) -> int:
    """Print a table of the runs in a folder, newest first: status, steps, rewards, failures."""
    from rich.console import Console

    from lightning_jax.studio.runs import find_runs, runs_table
    from lightning_jax.studio.tables import as_terminal

    console = Console(highlight=False)
    console.print(as_terminal(runs_table(find_runs(arguments.folder)), console.width))
    return 0


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `lightning-jax compare`."""
    names = "a run directory, or several with commas between them: seeds of one experiment"
    parser.add_argument("runs", metavar="RUN[,RUN...]", nargs="+", help=names)
    parser.add_argument("--markdown", action="store_true", help="print Markdown for a pull request")
    axis = "what the curves are drawn over (default: %(default)s)"
    parser.add_argument("--axis", choices=AXES, default="steps", help=axis)
    parser.add_argument("--png", metavar="FILE", type=Path, help="also draw the curves here")


def run_compare(arguments: argparse.Namespace) -> int:
    """Compare runs: settings that differ, curves, and tasks that were won and lost.

    All are compared with the first. Runs with commas between them count as seeds of one experiment.
    """
    from rich.console import Console

    from lightning_jax.settings import ConfigError
    from lightning_jax.studio.compare_runs import compare_runs, plot_runs
    from lightning_jax.studio.runs import read_run
    from lightning_jax.studio.tables import as_markdown, as_terminal

    groups = [
        [read_run(Path(name)) for name in names.split(",") if name] for names in arguments.runs
    ]
    if len(groups) < 2 or not all(groups):
        raise ConfigError(
            "compare needs two runs; pass two run directories.", reason="missing", key="RUN"
        )
    if arguments.png is not None:  # before anything is printed: the path may be wrong
        plot_runs(groups, arguments.axis, arguments.png)
    found = compare_runs(groups, arguments.axis)
    console = Console(highlight=False)
    if arguments.markdown:
        text = "\n\n".join(as_markdown(grid) for grid in found)
        console.print(text, markup=False, soft_wrap=True)
    else:
        for index, grid in enumerate(found):
            console.print(*[""] * bool(index), as_terminal(grid, console.width), sep="\n")
    if arguments.png is not None:
        console.print(f"curves: {arguments.png}", markup=False, soft_wrap=True)
    return 0


def add_rescore(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `lightning-jax rescore`."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory")
    file = "YAML file with a section `rewards`, as in a config"
    parser.add_argument("--rewards", metavar="FILE", type=Path, required=True, help=file)
    phase = "rollouts to score: train or eval (default: %(default)s)"
    parser.add_argument("--phase", choices=("train", "eval"), default="train", help=phase)
    limit = "maximum number of groups, evenly spaced (default: all)"
    parser.add_argument("--limit", type=number_of(Limit), metavar="N", help=limit)


def run_rescore(arguments: argparse.Namespace) -> int:
    """Score the stored rollouts of a run by other rewards, and show what would change.

    Prints the mean of each component, the rank correlation with the stored rewards within groups,
    and the share of rollouts whose advantage changes its sign. With --phase eval, each evaluation
    has a line. The run itself stays as it is, except that verdicts of judges are kept in its store.
    `learn` trains with the other rewards.
    """
    from lightning_jax.train.directory import SETTINGS, STORE, require_run

    require_run(arguments.run_dir, SETTINGS, STORE)

    from lightning_jax.cli.rescore import rescore  # imports JAX, after the check

    rescore(arguments.run_dir, arguments.rewards, phase=arguments.phase, limit=arguments.limit)
    return 0
