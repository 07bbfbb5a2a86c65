"""Tests lie where their module lies, and have its name."""

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "lightning_jax"


def test_tests_mirror_modules() -> None:
    """A name is `test_MODULE`, with what it tests of it behind, or with its room before.

    Tests of several modules lie in `end_to_end` or, if they train, end in `_run`.
    """
    rooms = [path.name for path in PACKAGE.iterdir() if path.is_dir()]
    paths = [path for room in rooms for path in (TESTS / room).rglob("test_*.py")]
    assert len(paths) > 200
    assert {str(path.relative_to(TESTS)) for path in paths if not _mirrors(path)} == set()


def test_names_are_unique() -> None:
    """pytest imports a file by its name alone."""
    names = [path.name for path in TESTS.rglob("test_*.py") if "clients" not in path.parts]
    assert sorted(names) == sorted(set(names))


def _mirrors(path: Path) -> bool:
    folder = PACKAGE / path.parent.relative_to(TESTS)
    name = f"_{path.stem.removeprefix('test_')}_"
    modules = {folder.name, *(entry.stem for entry in folder.glob("[!_]*"))}
    is_of_many = path.parent.name == "end_to_end" or path.stem.endswith("_run")
    return is_of_many or any(
        name.startswith(f"_{module}_") or name.endswith(f"_{module}_") for module in modules
    )
