"""Measure on an accelerator that is borrowed for minutes: training, decoding, engine, update.

    python benchmarks/accelerator.py --part learn | decode | engine | update [--minutes 8]
                                     [--out DIR] [--work DIR] [--plan] [--tiny]

Each part fits one command. Its cases run in processes of their own, in order of value, and
`report.md` and `report.json` in `--out` are written after every figure. So a case that crashes
costs only itself, and what was measured is kept when the time is up. Cases that an earlier command
measured are not repeated. `--work` keeps the model, runs, reports and compiled programs between
commands. docs/gpu_cluster.md has the order for half an hour.

`--part learn` resumes the run that the last command stopped. `--finish` ends it with the step that
it reached, with an evaluation and the trained adapters, and `--set key=value` changes settings.
"""

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from window.cases import Case, Figure, Setting, tied
from window.parts import DATA, join_parts

PARTS = ("learn", "decode", "engine", "update")
PACKAGES = ("jax", "flax", "optax", "orbax.checkpoint", "grain", "gguf", "aiohttp", "pydantic")
AGENT_PACKAGES = ("langgraph", "langchain_openai", "openai")
SHARE_TO_START = 0.4  # of a case's predicted time that must be left
MOST = 3.0  # times its predicted time, before a measurement is killed
LEAST_S = 30  # for a case
MARGIN_S = 10  # for the last report
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Outcome:
    """State of a case in the report."""

    status: str  # measured, stopped, failed or left out
    seconds: float = 0.0
    reason: str = ""


def cases_of(part: str, args: argparse.Namespace) -> tuple[Case, ...]:
    """Return the part's cases in order of value."""
    module = importlib.import_module(f"window.{part}")
    if part == "learn":
        return module.cases(module.Options(tuple(args.set), args.finish))
    return module.CASES


class Report:
    """Figures and outcomes of one part, kept in a file and written as a table."""

    def __init__(self, part: str, path: Path, out: Path) -> None:
        self._part, self._path, self._out = part, path, out
        self._out.mkdir(parents=True, exist_ok=True)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        stored = json.loads(path.read_text()) if path.exists() else {}
        self.machine: dict[str, str] = stored.get("machine", {})
        self.figures: dict[str, dict[str, dict[str, Any]]] = stored.get("figures", {})
        self.outcomes: dict[str, dict[str, Any]] = stored.get("outcomes", {})

    def add(self, case: str, figure: Figure) -> None:
        """Keep a figure, in place of an earlier one of the same name."""
        self.figures.setdefault(case, {})[figure.name] = asdict(figure)
        self.write()

    def end(self, case: str, outcome: Outcome) -> None:
        self.outcomes[case] = asdict(outcome)
        self.write()

    def is_measured(self, case: str) -> bool:
        return self.outcomes.get(case, {}).get("status") == "measured"

    def write(self) -> None:
        """Write both files. A reader never sees half of one."""
        saved = {"machine": self.machine, "figures": self.figures, "outcomes": self.outcomes}
        text = json.dumps(saved, indent=1) + "\n"
        for path, content in (
            (self._path, text),
            (self._out / "report.json", text),
            (self._out / "report.md", self.table()),
        ):
            draft = path.with_name(f".{path.name}")
            draft.write_text(content)
            draft.replace(path)

    def table(self) -> str:
        """Return the figures as Markdown, beside their predictions."""
        about = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        lines = [f"# {self._part}", "", about, ""]
        lines += ["| case | figure | measured | predicted | note |", "|---|---|---|---|---|"]
        for case, figures in self.figures.items():
            for one in figures.values():
                value = "none" if math.isnan(one["value"]) else f"{one['value']:.4g} {one['unit']}"
                cells = (case, one["name"], value.strip(), one["predicted"], one["note"])
                lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
        for case, one in self.outcomes.items():
            reason = f": {one['reason']}" if one["reason"] else ""
            lines.append(f"* {case} {one['status']} after {one['seconds']:.0f} s{reason}")
        return "\n".join(lines) + "\n"


def run_case(case: Case, args: argparse.Namespace, report: Report, seconds: float) -> Outcome:
    """Run a case in a process of its own, and kill it with all it started when its time is up."""
    log_path = Path(args.work) / f"{args.part}_{case.name}.log"
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--case", case.name]
    command += ["--seconds", f"{seconds:.0f}"]
    started = time.monotonic()
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            tied(command),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as child,
    ):
        timer = threading.Timer(seconds, lambda: _kill_group(child.pid))
        timer.start()
        try:
            assert child.stdout is not None, "its output is piped"
            for line in child.stdout:
                if line.startswith('{"figure"'):  # other lines come from libraries
                    report.add(case.name, Figure(**json.loads(line)["figure"]))
            child.wait()
        finally:
            timer.cancel()
            _kill_group(child.pid)
    took = time.monotonic() - started
    if child.returncode == 0:
        return Outcome("measured", took)
    if took >= seconds:
        return Outcome("stopped", took, "its time was up")
    return Outcome("failed", took, _last_line(log_path))


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, 9)


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error: ")]  # of a run within the case
    last = [*lines[-1:], *ours[-1:]] or ["no output"]
    return f"{last[-1].strip()[:300]} (see {path.name})"


def run_part(args: argparse.Namespace) -> int:
    """Run the cases that are not measured yet, and return the exit status."""
    end = time.monotonic() + 60 * args.minutes - MARGIN_S
    missing = find_missing(args.part, Path(args.work), args.tiny)
    if missing:
        for line in missing:
            print(line, file=sys.stderr)
        return 2
    path = Path(args.work) / f"report_{args.part}{'_tiny' if args.tiny else ''}.json"
    report = Report(args.part, path, Path(args.out))
    report.machine |= describe_machine()
    print(", ".join(f"{name} {value}" for name, value in report.machine.items()), flush=True)
    failed = False
    for case in cases_of(args.part, args):
        if report.is_measured(case.name):
            continue
        left = end - time.monotonic()
        least = case.least_s or max(LEAST_S, 60 * SHARE_TO_START * case.minutes)
        most = left if case.is_resumed else max(LEAST_S, 60 * MOST * case.minutes)
        if left < least:
            reason = f"{left:.0f} s were left, at least {least:.0f} s are needed"
            outcome = Outcome("left out", 0.0, reason)
        else:
            outcome = run_case(case, args, report, min(left, most))
        report.end(case.name, outcome)
        failed |= outcome.status == "failed"
        took = f"{outcome.status}, {outcome.seconds:.0f} s"
        print(f"{case.name}: {took} {outcome.reason}".strip(), flush=True)
    report.write()
    print(report.table())
    return int(failed)


def find_missing(part: str, work: Path, is_tiny: bool) -> list[str]:
    """Return a sentence for each package, file or device that the part lacks."""
    names = PACKAGES + (AGENT_PACKAGES if part == "learn" else ())
    absent = [name for name in names if not _is_installed(name)]
    lines = [f"packages {', '.join(absent)} are missing; install the wheels"] if absent else []
    if part == "learn" and not is_tiny:
        lines += [f"{missing.name} {missing.reason}" for missing in join_parts(work)]
        if not (work / DATA / "train.jsonl.gz").exists():
            lines.append(f"{work / DATA} has no Spider; carry it with the first command")
    return lines


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def describe_machine() -> dict[str, str]:
    """Return the device, versions and date. JAX runs in a process of its own, to hold no memory."""
    program = "import jax; d = jax.devices(); print(d[0].device_kind, 'x', len(d))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    device = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no device"
    versions = {}
    for name in ("jax", "jaxlib", "flax"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    about = {"date": time.strftime("%Y-%m-%d"), "device": device, "cores": str(os.cpu_count())}
    return about | {"Python": platform.python_version()} | versions


def print_figures(args: argparse.Namespace) -> int:
    """Run one case in this process and print its figures as JSON lines."""
    case = next(case for case in cases_of(args.part, args) if case.name == args.case)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(args.work) / "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    setting = Setting(Path(args.out), Path(args.work), args.seconds, args.tiny)
    for figure in case.run(setting):
        print(json.dumps({"figure": asdict(figure)}), flush=True)
    return 0


def plan_lines(part: str, cases: Sequence[Case]) -> Iterator[str]:
    """Yield the cases with their minutes, and the minute at which each should have ended."""
    ends = itertools.accumulate(case.minutes for case in cases)
    for case, end in zip(cases, ends, strict=True):
        minutes = f"{case.minutes:4.1f} min, until {end:4.1f}"
        yield f"{part:8s} {case.name:20s} {minutes}   {case.measures}"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--minutes", type=float, default=8, help="all cases together (default: 8)")
    parser.add_argument("--out", default="runs/window/out", help="reports and files to bring home")
    parser.add_argument("--work", default="runs/window", help="kept between commands")
    parser.add_argument("--plan", action="store_true", help="print the cases and run none")
    parser.add_argument("--tiny", action="store_true", help="rehearse with a tiny model")
    parser.add_argument("--finish", action="store_true", help="learn: end with the step reached")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.out, args.work = (str(Path(path).absolute()) for path in (args.out, args.work))
    return args


def main() -> int:
    args = parse()
    sys.path.insert(0, str(ROOT))  # the package may not be installed
    if args.plan:
        print("\n".join(plan_lines(args.part, cases_of(args.part, args))))
        return 0
    for folder in (args.work, args.out):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return print_figures(args) if args.case else run_part(args)


if __name__ == "__main__":
    sys.exit(main())
