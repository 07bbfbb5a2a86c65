"""Test that commands, settings, code and links on the pages exist, without running them.

A page or block whose commands need what the tests do not have says so in a comment, such as
`<!-- not run: needs a TPU -->`.
"""

import ast
import importlib
import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from omegaconf import OmegaConf

import lightning_jax as lj
from lightning_jax.cli.main import _parser
from lightning_jax.cli.runtime import parse
from lightning_jax.settings import load_config
from lightning_jax.train.config import Config

ROOT = Path(__file__).parents[1]
STARTER = "lightning_jax/cli/starter/dates/config.yaml"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))
)
GENERATED = ("docs/settings.md", "docs/python_api.md", "docs/reference/")
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->", re.S)
# Programs and words of commands that need what the tests do not have: containers, clusters, GPUs,
# TPUs, compilers for them, and data sets. A page with one has to say why it is not run.
ABSENT = ("docker", "gcloud", "kubectl", "srun", "sbatch")
NEEDS_ABSENT = re.compile(r"\[(cuda12|tpu)\]|^--target$|^gpu$|scontrol|^data\.root=DIR$")
ORDINARY = {
    *("pip", "python", "make", "cd", "curl", "export", "git", "pre-commit", "node", "sh", "mkdocs"),
    *ABSENT,
}
SETTING = re.compile(r"`([a-z_]+(?:\.[A-Za-z_]+)+)(?:=[^`]*)?`")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
TABLE_OR_LINK = re.compile(r"\s*(\||!?\[|\* \[|.*\]\(http)")


def _text(page: str) -> str:
    return (ROOT / page).read_text()


def _fenced(page: str, *languages: str) -> list[str]:
    found = FENCE.findall(_text(page))
    return [textwrap.dedent(code) for _, language, code in found if language in languages]


def _commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command in indented and shell blocks."""
    prose = FENCE.sub("", _text(page))
    blocks = re.findall(r"(?:^\n|\A)((?:    [^\n]*\n)+)", prose, re.M)
    for block in [*map(textwrap.dedent, blocks), *_fenced(page, "bash", "sh")]:
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # prose or a diagram, not a command
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            for part in _split(words, "&&"):
                if part and _program(part) in {"lightning-jax", "pytest", *ORDINARY}:
                    yield [_program(part), *part[1:]]


def _split(words: list[str], separator: str) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word == separator:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _program(words: list[str]) -> str:
    return words[0].rpartition("/")[2] if ".venv" in words[0] else words[0]


COMMANDS = [
    (page, words) for page in PAGES if not page.startswith(GENERATED) for words in _commands(page)
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
    assert ["lightning-jax", "verify", "runs/first"] in [words for _, words in COMMANDS]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS]
)
def test_command_exists(page: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program, *rest = words
    rest = rest[: rest.index(">")] if ">" in rest else rest
    if program == "lightning-jax" and rest != ["COMMAND", "--help"] and rest != ["--version"]:
        try:
            arguments = parse(_parser(), rest)
        except SystemExit:
            pytest.fail(capsys.readouterr().err)
        if hasattr(arguments, "settings"):
            _check_settings(getattr(arguments, "config", None), arguments.settings)
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        makefile = _text("Makefile")
        known = set(re.findall(r"^([a-z]+):", makefile, re.M)) | {
            "spider",
            "musique",
            "calcx",
            "sums",
        }
        assert set(targets) <= known
    elif program == "pytest" or rest[:2] == ["-m", "pytest"]:
        paths = [word for word in rest if word.startswith("tests")]
        assert all(list(ROOT.glob(path.partition("::")[0])) for path in paths)
    elif program == "python" and rest and rest[0].startswith(("experiments", "benchmarks", "docs")):
        assert (ROOT / rest[0]).is_file()
        if rest[0].startswith("experiments"):
            arguments = parse(_parser(), ["train", *rest[1:]])
            _check_settings(arguments.config, arguments.settings)
    if program in ABSENT or any(map(NEEDS_ABSENT.search, words)):
        assert NOT_RUN.search(_text(page)), f"{page} has to say why {words} is not run"


def test_reasons_for_what_is_not_run_are_sentences() -> None:
    reasons = {page: NOT_RUN.findall(_text(page)) for page in PAGES}
    assert sum(map(len, reasons.values())) > 3
    assert all(len(reason.split()) > 2 for found in reasons.values() for reason in found)


@pytest.mark.parametrize("page", [page for page in PAGES if _fenced(page, "python")])
def test_python_compiles_and_its_imports_exist(page: str) -> None:
    for code in _fenced(page, "python"):
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


@pytest.mark.parametrize("page", [page for page in PAGES if _fenced(page, "yaml")])
def test_yaml_has_settings_that_exist(page: str) -> None:
    for code in _fenced(page, "yaml"):
        if "apiVersion" not in code and not page.startswith(GENERATED):
            OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(yaml.safe_load(code)))


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_settings_in_the_text_exist(page: str) -> None:
    known = get_type_hints(Config)
    named = {key for key in SETTING.findall(_text(page)) if key.split(".")[0] in known}
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
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", _text(page))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        if anchor:
            assert anchor in _anchors(found.read_text()), target


def _anchors(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(GENERATED)])
def test_lines_are_short_and_lists_have_a_blank_line_before(page: str) -> None:
    """Only Python-Markdown, which makes the site, needs that blank line."""
    text = FENCE.sub("", _text(page))
    lines = text.splitlines()
    long = [line for line in lines if len(line) > 100 and not TABLE_OR_LINK.match(line)]
    assert long == []
    glued = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"(\* |1\. )", line) and before and not re.match(r"(\* |\d+\. |  )", before)
    ]
    assert glued == []
