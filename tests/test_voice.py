"""Docstrings and names keep the project's voice."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = ("lightning_jax", "agents", "experiments", "benchmarks")
OPENINGS = {"Of", "Those", "That", "What", "As", "Whether", "How"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Pronouns, participles and adverbs say nothing as a part of a name.
NAMES = {
    *("apart", "each", "elsewhere", "own", "placed", "said", "settled", "several"),
    *("together", "told"),
}
# A value is named for what it is, not for what happened to it. Attributes may be read by others.
PARTICIPLES = {
    *("found", "known", "wanted", "held", "made", "taken", "shown", "asked", "given"),
}
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [
        (path, getattr(node, "lineno", 1), text.partition("\n")[0])
        for path, tree in _trees(*PROGRAM, "tests")
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node))
    ]
    assert len(found) > 1000
    assert [(path, line, text) for path, line, text in found if text.split()[0] in OPENINGS] == []


def test_names_are_nouns_and_verbs() -> None:
    found = [(path, *defined) for path, tree in _trees(*PROGRAM) for defined in _defined(tree)]
    assert len(found) > 1000
    assert [(path, line, name) for path, line, name in found if NAMES & set(_words(name))] == []


def test_values_are_named_for_what_they_are() -> None:
    names = [
        (path, line, name) for path, tree in _trees(*PROGRAM) for line, name in _variables(tree)
    ]
    assert len(names) > 1000
    assert [(path, line, name) for path, line, name in names if name in PARTICIPLES] == []


def _trees(*directories: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of each file."""
    for directory in directories:
        paths = sorted((ROOT / directory).rglob("*.py"))
        paths = [path for path in paths if ".venvs" not in path.parts]
        assert paths, f"{directory}/ has no Python files"
        for path in paths:
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def _words(name: str) -> list[str]:
    return [word.lower() for word in WORDS.findall(name)]


def _variables(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter."""
    for node in ast.walk(tree):
        match node:
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id


def _defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a module defines or assigns."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
