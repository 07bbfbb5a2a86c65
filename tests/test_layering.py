"""Tests that each room, and each module or room in it, imports only from those before it."""

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
        "system",
        "settings",
        "models",
        "engine",
        "traces",
        "rl",
        "gateway",
        "rollouts",
        "environments",
        "train",
    ),
    *("cluster", "studio", "cli", "__main__", "testing"),
)
# Modules and rooms in a room, in the same order.
INNER = {
    "settings": ("schema", "errors", "paths", "saved", "load", "loading"),
    "train": (
        *("rules", "config", "directory", "hook", "sinks"),
        *("tasks", "state", "watch", "memory", "prompts", "loop"),
    ),
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
    "models": (
        *(
            "model_files",
            "template_limits",
            "chat_template",
            "vocabulary",
            "tokamax_library",
        ),
        *("tokenizer", "config", "policies", "shape", "families", "mesh", "attention", "blocks"),
        *("precision", "transformer", "formats", "lora", "sharding", "reshard", "memory"),
    ),
    "engine": (
        *("types", "config", "sampling", "scheduler", "grammar", "device", "response"),
        *("generation", "logits", "score", "admission", "decode", "prefill", "batcher", "loop"),
        *("jetstream", "replicas", "engine"),
    ),
    "traces": (
        *("config", "attributes", "context", "otlp", "tree", "rewards", "roles"),
        *("export", "_sqlite", "rows", "_spans", "store", "convert", "listing", "trajectories"),
    ),
    "rl": (
        *("config", "algorithms", "choices", "sequence", "token_weights", "gae"),
        *("batches", "credit", "advantages", "dpo", "prepare", "adapters", "critic", "losses"),
        *("update", "distill"),
    ),
}


def _imports(path: Path, package: str) -> set[str]:
    """Return the names that a file imports from a package, such as `rl` from `lightning_jax`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    prefix = f"{package}."
    return {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}


def _violations(folder: Path, order: Sequence[str], package: str) -> list[str]:
    """Return the imports from later entries of `order`. Imports inside functions count, too."""
    level = {name: index for index, name in enumerate(order)}
    violations = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        assert name in level, f"{path} is in no row of the order of {package}"
        violations += [
            f"{path.relative_to(folder)} imports {other}"
            for other in sorted(_imports(path, package))
            if level.get(other, -1) > level[name]
        ]
    return violations


def test_rooms_import_only_from_rooms_before_them() -> None:
    assert _violations(PACKAGE, ROOMS, "lightning_jax") == []


@pytest.mark.parametrize("room", INNER)
def test_modules_of_a_room_import_only_from_those_before_them(room: str) -> None:
    assert _violations(PACKAGE / room, INNER[room], f"lightning_jax.{room}") == []


def test_a_violation_is_found(tmp_path: Path) -> None:
    (tmp_path / "types.py").write_text("from lightning_jax.rl.losses import policy_loss\n")
    (tmp_path / "rl").mkdir()
    (tmp_path / "rl" / "config.py").write_text("from lightning_jax.rl import update\n")
    assert _violations(tmp_path, ROOMS, "lightning_jax") == ["types.py imports rl"]
    rl = _violations(tmp_path / "rl", INNER["rl"], "lightning_jax.rl")
    assert rl == ["config.py imports update"]


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


def test_only_a_setting_names_the_loop_of_jetstream() -> None:
    paths = PACKAGE.rglob("*.py")
    users = {path.parent for path in paths if "jetstream" in _imports(path, "lightning_jax.engine")}
    assert users == {PACKAGE / "engine/jetstream"}
