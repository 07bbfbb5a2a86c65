"""Test that each room imports only from rooms below it, and each inner room likewise."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

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
# Inner rooms and loose modules of a room, also from bottom to top.
INNER_ROOMS = {
    "rollouts": (
        *("config", "agents", "workers", "rewards", "results"),
        *("conditions", "deadlines", "servers", "runner", "collect"),
    ),
    "gateway": (
        *("errors", "fields", "request"),
        "prompt",
        *("answer", "metrics"),
        *("dialects", "sessions", "calls", "http", "app"),
    ),
}


def _imports(path: Path, package: str) -> set[str]:
    """Return the parts after `package` in the names that a file imports, such as `rl`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    prefix = f"{package}."
    return {name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)}


def _violations(folder: Path, package: str, rooms: Sequence[str]) -> list[str]:
    levels = {name: level for level, name in enumerate(rooms)}
    violations = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        assert name in levels, f"{path} is in no room of {package}"
        violations += [
            f"{path.relative_to(folder)} imports {other}, which lies above it"
            for other in _imports(path, package)
            if levels[other] > levels[name]
        ]
    return violations


def test_rooms_import_only_from_rooms_below() -> None:
    assert _violations(PACKAGE, "lightning_jax", ROOMS) == []


@pytest.mark.parametrize("room", INNER_ROOMS)
def test_inner_rooms_import_only_from_inner_rooms_below(room: str) -> None:
    assert _violations(PACKAGE / room, f"lightning_jax.{room}", INNER_ROOMS[room]) == []


def test_a_violation_is_found(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("from lightning_jax.rl.losses import policy_loss\n")
    (tmp_path / "rl.py").write_text("from lightning_jax import train, types\n")
    assert _violations(tmp_path, "lightning_jax", ROOMS) == [
        "rl.py imports train, which lies above it",
        "types.py imports rl, which lies above it",
    ]


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
