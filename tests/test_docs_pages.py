"""Test that commands, settings, code and links on the pages exist, without running them."""

import ast
import importlib
import itertools
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from docs_pages import (
    FENCE,
    GENERATED,
    NOT_RUN,
    PAGES,
    PROGRAMS,
    ROOT,
    WRITTEN,
    blocks,
    commands,
    fenced,
    text,
)
from pydantic import ValidationError

import lightning_jax as lj
from lightning_jax.cli.command import SettingsCommand
from lightning_jax.cli.main import parse
from lightning_jax.settings import load_config
from lightning_jax.settings.schema import from_plain
from lightning_jax.train.config import Config

STARTER = "lightning_jax/cli/starter/dates/config.yaml"
# Programs and words of commands that need what the tests do not have: containers, clusters, GPUs,
# TPUs, compilers for them, and data sets. A block with one has to say why it is not run.
ABSENT = ("docker", "gcloud", "kubectl", "srun", "sbatch", "ray")
NEEDS_ABSENT = re.compile(r"\[(cuda12|tpu|ray)\]|^--target$|^gpu$|scontrol|^data\.root=DIR$")
SETTING = re.compile(r"`([a-z_]+(?:\.[A-Za-z_]+)+)(?:=[^`]*)?`")
TABLE_OR_LINK = re.compile(r"\s*(\||!?\[|\* \[|.*\]\(http)")
COMMANDS = [
    (page, list(command.words), block.reason)
    for page in WRITTEN
    for block in blocks(page)
    for command in commands(block)
    if command.program in PROGRAMS
]


def _check_settings(config: str | None, settings: list[str]) -> None:
    """Check that settings load after the file, or after the starter's if it is a placeholder."""
    path = ROOT / (config or STARTER)
    base = str(path if path.is_file() else ROOT / STARTER)
    files = [word for word in settings if "=" not in word and word.endswith(".yaml")]
    assert len(settings) == len(files) + sum("=" in word for word in settings), settings
    load_config(Config, [base, *(w for w in settings if "=" in w and w != "key=value")])


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 60
    assert ["lightning-jax", "verify", "runs/first"] in [words for _, words, _ in COMMANDS]


@pytest.mark.parametrize(
    ("page", "words", "reason"),
    COMMANDS,
    ids=[f"{page}: {' '.join(words)}" for page, words, _ in COMMANDS],
)
def test_command_exists(
    page: str, words: list[str], reason: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *rest = words
    rest = rest[: rest.index(">")] if ">" in rest else rest
    if program == "lightning-jax" and rest != ["COMMAND", "--help"] and rest != ["--version"]:
        try:
            command = parse(rest)
        except SystemExit:
            pytest.fail(capsys.readouterr().err)
        _check_settings(getattr(command, "config", None), getattr(command, "settings", []))
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        makefile = text("Makefile")
        experiments = re.search(r"^EXPERIMENTS := (.*)$", makefile, re.M)
        assert experiments is not None
        known = set(re.findall(r"^([a-z]+):", makefile, re.M))
        assert set(targets) <= known | set(experiments[1].split())
    elif program == "pytest" or rest[:2] == ["-m", "pytest"]:
        paths = [word for word in rest if word.startswith("tests")]
        assert all(list(ROOT.glob(path.partition("::")[0])) for path in paths)
    elif program == "python" and rest and rest[0].startswith(("experiments", "benchmarks", "docs")):
        assert (ROOT / rest[0]).is_file()
        if rest[0].startswith("experiments") and "import argparse" not in text(rest[0]):
            command = parse(["train", *rest[1:]])
            assert isinstance(command, SettingsCommand)
            _check_settings(command.config, command.settings)
    if program in ABSENT or any(map(NEEDS_ABSENT.search, words)):
        assert reason, f"{page} has to say why {words} is not run"


@pytest.mark.parametrize("page", WRITTEN)
def test_reasons_for_what_is_not_run_are_sentences_before_a_block(page: str) -> None:
    reasons = [block.reason for block in blocks(page) if block.reason is not None]
    assert NOT_RUN.findall(text(page)) == reasons
    assert all(len(reason.split()) > 2 for reason in reasons)


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "python")])
def test_python_compiles_and_its_imports_exist(page: str) -> None:
    for code in fenced(page, "python"):
        tree = _parsed(code, page)
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(ast.Name("lj"), name):
                    assert name in lj.__all__
                case ast.ImportFrom(str(module), names) if module.startswith("lightning_jax"):
                    found = importlib.import_module(module)
                    for alias in names:
                        if not hasattr(found, alias.name):  # a module of a package
                            importlib.import_module(f"{module}.{alias.name}")


def _parsed(code: str, page: str) -> ast.Module:
    """Return the tree of a block, which may also be entries of a dict."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        return compile(code, page, "exec", flags)
    except SyntaxError:
        return compile("{\n" + code + "}", page, "exec", flags)


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "yaml")])
def test_yaml_has_settings_that_exist(page: str) -> None:
    for code in fenced(page, "yaml"):
        if "apiVersion" not in code and not page.startswith(GENERATED):
            assert _wrong_types(yaml.safe_load(code)) == []


def _wrong_types(settings: Any) -> list[Any]:
    """Return the errors in settings but those of rules, because a block may be a part."""
    try:
        from_plain(Config, settings)
    except ValidationError as error:
        return [found for found in error.errors() if found["type"] != "value_error"]
    return []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_settings_in_the_text_exist(page: str) -> None:
    known = get_type_hints(Config)
    named = {key for key in SETTING.findall(text(page)) if key.split(".")[0] in known}
    named -= {"agent.name"}  # an attribute of spans
    assert [key for key in sorted(named) if not _exists(Config, key)] == []


@pytest.mark.parametrize(
    ("key", "exists"),
    [
        ("serve.mesh.tensor", True),
        ("roles.judge.api_key", True),
        ("data.options.size", True),
        ("eval.jsonl", True),
        ("serve.slot", False),
        ("zzz.a", False),
    ],
)
def test_settings_are_told_from_other_names(key: str, exists: bool) -> None:
    assert _exists(Config, key) is exists


def _exists(section: Any, key: str) -> bool:
    """Return whether a dotted key, or the file of that name, exists."""
    if re.search(r"\.(py|jsonl|yaml|sqlite|json)$", key):
        return True
    for name in key.split("."):
        hints = get_type_hints(section) if is_dataclass(section) else {}
        if not hints:  # keys that users choose
            return section is not None and get_origin(section) is not Literal
        section = hints.get(name)
        inner = [hint for hint in get_args(section) if is_dataclass(hint)]
        section = inner[0] if inner else section
        if get_origin(hints.get(name)) is dict or section is Any:
            return True
    return section is not None


def test_pages_that_code_names_exist() -> None:
    missing = []
    for folder in ("lightning_jax", "tests", "agents", "experiments", "benchmarks", "notebooks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in (".py", ".yaml", ".md", ".ipynb") or ".venvs" in path.parts:
                continue
            for name in re.findall(r"\bdocs/[\w/]+\.(?:md|py|png)", path.read_text()):
                if not (ROOT / name).exists() and path != Path(__file__):
                    missing.append((str(path.relative_to(ROOT)), name))
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_and_headings_exist(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found.read_text()), target


def _anchors(markdown: str) -> set[str]:
    """Return the anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", markdown), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(GENERATED)])
def test_lines_are_short_and_lists_have_a_blank_line_before(page: str) -> None:
    """Only Python-Markdown, which makes the site, needs that blank line."""
    lines = FENCE.sub("", text(page)).splitlines()
    long = [line for line in lines if len(line) > 100 and not TABLE_OR_LINK.match(line)]
    assert long == []
    glued = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"(\* |1\. )", line) and before and not re.match(r"(\* |\d+\. |  )", before)
    ]
    assert glued == []
