"""Tests of Docker containers against a program in place of Docker's, and Docker where it runs."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.environments import harbor
from lightning_jax.environments.harbor import TestFailure
from lightning_jax.errors import UserError
from lightning_jax.types import LLM, Task

LLM_HERE = LLM("http://localhost:1/v1", "secret", "policy")
# Keeps containers as directories. /app, /tests and /logs lie in them.
FAKE = """#!{python}
import json, os, pathlib, shutil, subprocess, sys

top = pathlib.Path({top!r})
with open(top / "calls", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
command, *rest = sys.argv[1:]


def local(text, name):
    for path in ("/app", "/tests", "/logs"):
        text = text.replace(path, str(top / name) + path)
    return text


if command == "image":
    sys.exit(not (top / rest[1]).exists())
elif command == "build":
    if "FAIL" in (pathlib.Path(rest[2]) / "Dockerfile").read_text():
        sys.exit("no such base image")
    (top / rest[1]).touch()
elif command == "run":
    (top / rest[rest.index("--name") + 1] / "app").mkdir(parents=True)
elif command == "exec":
    given = {{"PATH": os.environ["PATH"]}}
    while rest[0].startswith("-"):
        if rest[0] == "--env":
            given[rest[1]] = os.environ[rest[1]]
        rest = rest[1 if rest[0] == "-i" else 2:]
    name, *words = rest
    words = [local(word, name) for word in words]
    sys.exit(subprocess.run(words, cwd=top / name / "app", env=given).returncode)
elif command == "cp":
    if ":" in rest[0]:
        name, path = rest[0].split(":")
        shutil.copytree(top / name / path.strip("/."), rest[1], dirs_exist_ok=True)
    else:
        name, path = rest[1].split(":")
        shutil.copytree(rest[0], top / name / path.strip("/"))
        for file in (top / name / path.strip("/")).rglob("*.sh"):
            file.write_text(local(file.read_text(), name))
elif command == "rm":
    shutil.rmtree(top / rest[-1])
"""
TEST = 'test "$(cat /app/hello.txt)" = Hello && echo 1 > /logs/verifier/reward.txt\n'


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program in place of Docker's, and return the directory of its containers."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "state").mkdir()
    program = tmp_path / "bin/docker"
    program.write_text(FAKE.format(python=sys.executable, top=str(tmp_path / "state")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path / "state"


def make_task(folder: Path, dockerfile: str = "FROM x\nRUN true\n", test: str = TEST) -> Task:
    for name, text in {
        "instruction.md": "Write Hello to /app/hello.txt.",
        "task.toml": "[verifier]\ntimeout_sec = 3.0\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": test,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return harbor.read_task(folder, folder.parent, docker=True)


def run(task: Task, script: str, **options: Any) -> dict[str, float]:
    words = ["bash", "-c", script]
    return asyncio.run(harbor.run(task, LLM_HERE, command=words, sandbox="docker", **options))


def calls_of(docker: Path) -> list[list[str]]:
    return [json.loads(line) for line in (docker / "calls").read_text().splitlines()]


def test_agent_and_tests_run_in_one_container_that_is_removed(docker: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path / "tasks/hello")
    script = 'test ${#OPENAI_API_KEY} = 6 && test $MODE = x && echo "$0" > hello.txt'
    words = ["bash", "-c", script, "Hello"]
    options: dict[str, Any] = {"command": words, "sandbox": "docker", "env": ["MODE=x"]}
    found = asyncio.run(harbor.run(task, LLM_HERE, **options))
    assert found == {"reward": 1.0, "agent_in_time": 1.0}
    assert not list(docker.glob("lightning-*-*")) and not list(docker.glob("lightning-?????*/app"))
    calls = calls_of(docker)
    names = [call[0] for call in calls]
    put = ["exec", "cp"]
    order = ["image", "build", "run", "exec", "restart", *put, *put, *put, "exec", "cp"]
    assert names == [*order, "rm"]
    start = calls[2]
    assert start[start.index("--memory") + 1] == "2048m"
    assert start[start.index("--pids-limit") + 1] == "64"
    assert "secret" not in (docker / "calls").read_text()
    run(task, "echo Hello > hello.txt")
    assert [call[0] for call in calls_of(docker)].count("build") == 1


def test_failures_are_those_of_tests_and_of_docker(
    docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TestFailure, match="no reward"):
        run(make_task(tmp_path / "a"), "true")
    with pytest.raises(TestFailure, match="timeout_s"):
        run(make_task(tmp_path / "b", test="sleep 60\n"), "true", test_timeout_s=0.5)
    with raises_coded(UserError, "failed", "docker"):
        run(make_task(tmp_path / "c", "FROM FAIL\nRUN true\n"), "true")
    assert not list(docker.glob("*/app"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with raises_coded(UserError, "not_installed", "docker"):
        run(make_task(tmp_path / "d"), "true")


@pytest.mark.parametrize("image", ["--privileged", "-v/:/host", "", 3, "a b"])
def test_image_that_docker_reads_as_an_option_is_refused(
    docker: Path, tmp_path: Path, image: str | int
) -> None:
    task = make_task(tmp_path / "a")
    (tmp_path / "a/environment/Dockerfile").unlink()
    settings = f"[environment]\ndocker_image = {json.dumps(image)}\n"
    (tmp_path / "a/task.toml").write_text(settings)
    with raises_coded(UserError, "invalid", "docker_image"):
        run(task, "true")
    assert not (docker / "calls").exists()


def test_tasks_with_images_are_kept_for_docker(tmp_path: Path) -> None:
    for name in "abcde":
        make_task(tmp_path / name)
    assert harbor.load(tmp_path, "train", tmp_path) == ([], {"needs_docker": 5})
    tasks, left_out = harbor.load(tmp_path, "train", tmp_path, docker=True)
    assert len(tasks) == 4 and left_out == {}


@pytest.mark.slow  # downloads an image
def test_docker_itself(tmp_path: Path) -> None:
    program = shutil.which("docker")
    if program is None or subprocess.run([program, "info"], capture_output=True).returncode:
        pytest.skip("Docker does not run here")
    task = make_task(tmp_path / "hello", "FROM bash:5\nWORKDIR /app\nRUN true\n")
    assert run(task, "echo Hello > hello.txt")["reward"] == 1.0
