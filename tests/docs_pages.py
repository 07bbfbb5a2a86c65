"""Pages of the documentation, their blocks of code and the commands in these.

Comments apply to the block that follows them: `<!-- not run: needs a TPU -->`, `<!-- file: agent.py
-->` if the block is a file of the reader's, and `<!-- more of: agent.py -->` if it is added to one.
"""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"))
)
GENERATED = ("docs/settings.md", "docs/python_api.md", "docs/reference/")
WRITTEN = [page for page in PAGES if not page.startswith(GENERATED)]
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->", re.S)
MARK = re.compile(r"<!-- (not run|file|more of): ((?:(?!-->).)+?) -->\s*\Z", re.S)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.M | re.S)
INDENTED = re.compile(r"(?:^\n|\A)((?:    [^\n]*\n)(?:\n*    [^\n]*\n)*)", re.M)
SHELL = ("indented", "bash", "sh")
PROGRAMS = {
    *("lightning-jax", "pip", "python", "python3", "pytest", "make", "cd", "curl", "export", "git"),
    *("pre-commit", "node", "sh", ".", "mkdocs", "docker", "gcloud", "kubectl", "srun", "ray"),
}
VARIABLE = re.compile(r"[A-Z_]+=.*", re.S)


@dataclass(frozen=True)
class Block:
    """Code of a page. Its language is `indented` if it has no fence."""

    page: str
    language: str
    code: str
    marks: dict[str, str]
    """The comments before it: `not run`, `file` and `more of`."""

    @property
    def reason(self) -> str | None:
        """Why its commands are not run."""
        return self.marks.get("not run")


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the variables set for it."""

    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.words)

    @property
    def program(self) -> str:
        return self.words[0]


def text(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """Return the blocks of a page in their order."""
    whole = text(page)
    found: list[tuple[int, str, str]] = []
    prose = whole
    for match in FENCE.finditer(whole):
        found.append((match.start(), match[2], textwrap.dedent(match[3])))
        start, end = match.span()
        prose = prose[:start] + re.sub(r"[^\n]", "-", whole[start:end]) + prose[end:]
    for match in INDENTED.finditer(prose):
        found.append((match.start(1), "indented", textwrap.dedent(match[1])))
    return [
        Block(page, language, code, _marks(whole[:start]))
        for start, language, code in sorted(found)
    ]


def _marks(before: str) -> dict[str, str]:
    """Return the comments at the end of the text before a block, by their kind."""
    marks = {}
    while match := MARK.search(before):
        marks[match[1]] = match[2]
        before = before[: match.start()]
    return marks


def fenced(page: str, *languages: str) -> list[str]:
    return [block.code for block in blocks(page) if block.language in languages]


def commands(block: Block) -> list[Command]:
    """Return the commands of a block, or none if it shows something else, such as an output."""
    if block.language not in SHELL:
        return []
    found = [command for line in _lines(block.code) for command in _split(line)]
    is_shell = block.language != "indented" or any(c.program in PROGRAMS for c in found)
    return found if is_shell else []


def _lines(code: str) -> Iterator[list[str]]:
    """Yield the words of each line. Lines within quotes belong together."""
    pending = ""
    for line in code.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:
            pending += "\n"
            continue
        yield words
        pending = ""


def _split(words: list[str]) -> Iterator[Command]:
    """Yield the commands of a line that `&&` joins."""
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        part, words = words[:end], words[end + 1 :]
        number = next((i for i, word in enumerate(part) if not VARIABLE.fullmatch(word)), len(part))
        variables, part = part[:number], part[number:]
        if part:
            if part[0].startswith(".venv/bin/"):
                part[0] = part[0].removeprefix(".venv/bin/")
            yield Command(tuple(part), tuple(variables))
