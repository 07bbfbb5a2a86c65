"""Hooks of mkdocs: pages made from other files, links out of docs/, llms.txt, and a check.

They run in an environment without JAX, and import only the package itself, which loads no room.
"""

import logging
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import lightning_jax as lj  # noqa: E402

log = logging.getLogger("mkdocs.plugins.site_hooks")

# Pages of the site that are files outside docs/.
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
# What a browser loads by itself. Links that a reader clicks may lead elsewhere.
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b[^>]*\brel=[\"']?(?:stylesheet|preload|preconnect|icon)[^>]*href=[\"']?(?:https?:)?//"
    r"[^>]*>|<link\b[^>]*href=[\"']?(?:https?:)?//[^>]*rel=[\"']?(?:stylesheet|preload)[^>]*>"
)
URL_IN_CSS = re.compile(r"(?:@import\s+[\"']|url\([\"']?)(?:https?:)?//")


def on_config(config: Any) -> Any:
    """Put the pages of docs/frameworks before the reference."""
    docs = Path(config.docs_dir)
    pages = sorted(page.relative_to(docs).as_posix() for page in docs.glob("frameworks/*.md"))
    pages.sort(key=lambda page: not page.endswith("README.md"))
    if pages:
        titles = [title for section in config.nav for title in section]
        config.nav.insert(titles.index("Reference"), {"Frameworks": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files that lie outside docs/."""
    for page, name in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site, and add the details of the Python API."""
    source = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if page.file.src_uri == "python_api.md":
        markdown += _python_details()
    parts = re.split(r"(^```.*?^```$|^    [^\n]*$)", markdown, flags=re.M | re.S)
    parts = [
        part if part.startswith(("```", "    ")) else _with_links(part, source, page.file.src_uri)
        for part in parts
    ]
    return "".join(parts)


def _with_links(text: str, source: str, page: str) -> str:
    def replace(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        place = os.path.normpath(PurePosixPath(source).parent / path)
        if not (ROOT / place).exists():
            log.warning("%s links to %s, which does not exist", source, target)
            return match[0]
        homes = {name: page for page, name in OUTSIDE.items()}
        if place in homes:
            goal = homes[place]
        elif (ROOT / place).is_dir() and (ROOT / place / "README.md").exists():
            goal = f"{place}/README.md".removeprefix("docs/")
        elif place.startswith("docs/") and not place.endswith(".py"):
            goal = place.removeprefix("docs/")
        else:  # a source file, which the site does not hold
            return label
        goal = os.path.relpath(goal, PurePosixPath(page).parent)
        return f"{image}[{label}]({goal}{hash_sign}{anchor})"

    return LINK.sub(replace, text)


def _python_details() -> str:
    """Return a directive of mkdocstrings for each public name."""
    blocks = ["\n## Details\n"]
    for name, (module, attribute) in lj._NAMES.items():
        is_function = name == "train"  # `lj.train` is the room, which calls it
        path = "lightning_jax.train.loop.trainer.train" if is_function else f"{module}.{attribute}"
        blocks.append(f"::: {path}\n")
    return "\n".join(blocks)


def on_post_build(config: Any) -> None:
    """Raise PluginError if a page would load something from another host."""
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        if match := LOADED.search(path.read_text()):
            raise PluginError(f"{path.relative_to(site)} loads from another host: {match[0]}")
    for path in site.rglob("*.css"):
        if URL_IN_CSS.search(path.read_text()):
            raise PluginError(f"{path.relative_to(site)} loads from another host")


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """Remember the pages in their order, for llms.txt."""
    config.extra["llms_nav"] = nav
    return nav


def on_env(env: Any, config: Any, files: Files) -> Any:
    """Write llms.txt, the list of pages with their Markdown beside them, and llms-full.txt."""
    site, nav = Path(config.site_dir), config.extra.pop("llms_nav")
    lines = [f"# {config.site_name}\n", f"> {config.site_description}\n"]
    whole: list[str] = []
    for item in nav.items:
        lines.append(f"## {item.title}\n")
        for page in _pages(item):
            target = site / page.file.src_uri
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page.markdown)
            lines.append(f"- [{page.title}]({page.file.src_uri}){_first_sentence(page.markdown)}")
            whole.append(page.markdown)
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))
    (site / "llms-full.txt").write_text("\n\n".join(whole))
    return env


def _pages(item: Any) -> list[Any]:
    return [item] if item.is_page else [page for child in item.children for page in _pages(child)]


def _first_sentence(markdown: str) -> str:
    """Return the first sentence of the first paragraph, for llms.txt."""
    for block in markdown.split("\n\n"):
        text = " ".join(block.split())
        if text and text[0].isalpha() and not block.startswith("    "):
            return ": " + re.split(r"(?<=[.:]) ", LINK.sub(r"\2", text))[0].rstrip(":.")
    return ""
