"""Test that each module imports only from modules above it in docs/architecture.md's module map."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "lightning_jax"

# From bottom to top. A room imports only from the rooms before it.
ROOMS = (
    *(
        "errors",
        "types",
        "schema",
        "system",
        "settings",
        "loading",
        "models",
        "engine",
        "traces",
        "rl",
        "gateway",
        "rollouts",
        "environments",
        "cluster",
    ),
    *("train", "studio", "cli", "__main__", "testing"),
)
LEVELS = {name: level for level, name in enumerate(ROOMS)}


def _imports(path: Path) -> set[str]:
    """Return the second parts of the lightning_jax names that a file imports, such as `rl`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_jax."):
            found.add((node.module or "").split(".")[1])
        if isinstance(node, ast.Import):
            found |= {
                a.name.split(".")[1] for a in node.names if a.name.startswith("lightning_jax.")
            }
    return found


def _violations(package: Path, row_of: dict[str, int]) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        assert name in row_of, f"{path} is in no row of the module map"
        found += [
            f"{path.relative_to(package)} imports {other}, which lies below it"
            for other in _imports(path)
            if row_of[other] > row_of[name]
        ]
    return found


def test_modules_import_only_from_rows_above() -> None:
    assert _violations(PACKAGE, LEVELS) == []


def test_a_violation_is_found(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("from lightning_jax.rl.losses import policy_loss\n")
    assert _violations(tmp_path, LEVELS) == ["types.py imports rl, which lies below it"]


def test_agents_know_nothing_of_the_package() -> None:
    for suffix in ("py", "mjs", "sh"):
        paths = list((PACKAGE.parent / "agents").rglob(f"*.{suffix}"))
        assert paths, f"agents/ has no *.{suffix}"
        assert [path for path in paths if "lightning_jax" in path.read_text()] == []


def test_only_serve_jetstream_imports_jetstream() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "import jetstream" in path.read_text() or "from jetstream" in path.read_text()
    }
    assert users == {"engine/jetstream/engine.py"}
