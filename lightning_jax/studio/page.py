"""Rollouts in one HTML page without network access: scripts of the live page with JSON inside.

The page may run and load nothing but what it holds. Its scripts set texts as text.
"""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

from pydantic_core import to_json

from lightning_jax.studio.records import RolloutView, RunView, as_json

ASSETS = Path(__file__).parent / "live" / "assets"
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main id="view"></main>
<noscript>This page needs JavaScript. Without it, use <code>lightning-jax view</code>.</noscript>
<script type="application/json" id="stored">$stored</script>
<script>$script</script>
</body>
</html>
""")


def render_page(run: RunView | None, rollouts: Sequence[RolloutView]) -> str:
    """Render these rollouts as a page, below the table of the run if there is one."""
    title = f"{run.name if run else rollouts[0].rollout.rollout_id} - lightning-jax"
    values = as_json({"title": title, "run": run, "rollouts": rollouts})
    stored = to_json(values, inf_nan_mode="null").decode()
    script = f'"use strict";\nconst modules = {{}};\n{_bundle("stored.js", set())}'
    style = (ASSETS / "style.css").read_text(encoding="utf-8")
    return PAGE.substitute(
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'",
        title=html.escape(title),
        style=style,
        stored=stored.replace("<", "\\u003c"),  # so that no text ends the script
        script=script,
    )


def _bundle(name: str, names: set[str]) -> str:
    """Return a module of the live page after those it imports, each in a function of its own.

    `names` are the modules that come before, and get those that are added.
    """
    names.add(name)
    text = (ASSETS / name).read_text(encoding="utf-8")
    before = [_bundle(other, names) for _, other in IMPORT.findall(text) if other not in names]
    exports = ", ".join(match[1] for match in EXPORT.findall(text))
    text = EXPORT.sub(r"\1", IMPORT.sub(r'const \1 = modules["\2"];', text))
    module = f'modules["{name}"] = (() => {{\n{text}return {{ {exports} }};\n}})();\n'
    return "".join((*before, module))


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
