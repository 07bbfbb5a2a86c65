"""Tests of Harbor's task folders: what is read, and what a rollout of each kind of task gives."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from coded import raises_coded

from lightning_jax.environments import harbor, sandbox
from lightning_jax.environments.harbor import TestFailure, folders
from lightning_jax.environments.harbor.folders import NeedsDocker, Setup
from lightning_jax.errors import UserError
from lightning_jax.rollouts.agents.functions import as_agent
from lightning_jax.rollouts.agents.outcome import outcome_of
from lightning_jax.rollouts.agents.program import ExitStatus, OverLimit, TemporaryFailure
from lightning_jax.types import LLM, Task

needs_namespaces = pytest.mark.skipif(
    bool(sandbox.namespace_error()), reason="this system makes no user namespaces"
)
KINDS = [pytest.param("namespaces", marks=needs_namespaces), "processes"]
NOBODY = LLM("http://localhost:1/v1", "key", "policy")
OPEN = LLM("http://h/rollout/r~full/v1", "full", "policy", {}, "http://h/rollout/r~calls/v1", "few")
CHECK = """\
if [ "$(cat /app/hello.txt)" = "Hello" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def write_task(
    folder: Path,
    test: str = CHECK,
    toml: str = "",
    dockerfile: str | None = "FROM ubuntu:24.04\nWORKDIR /app\n",
    instruction: str = "Write Hello to /app/hello.txt.",
) -> Task:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "instruction.md").write_text(f"{instruction}\n")
    (folder / "task.toml").write_text(f'schema_version = "1.1"\n{toml}')
    (folder / "tests/test.sh").write_text(f"#!/bin/bash\n{test}")
    if dockerfile is not None:
        (folder / "environment/Dockerfile").write_text(dockerfile)
    return {
        "id": folder.name,
        "instruction": instruction,
        "folder": str(folder),
        "root": str(folder.parent),
    }


def run(task: Task, script: str, **options: Any) -> dict[str, float]:
    return asyncio.run(harbor.run(task, NOBODY, command=["bash", "-c", script], **options))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reward_is_what_the_test_script_writes(kind: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "hello")
    good = "test $PWD -ef ~+ && echo Hello > hello.txt"
    assert run(task, good, sandbox=kind) == {"reward": 1.0, "agent_in_time": 1.0}
    assert run(task, "echo Bye > hello.txt", sandbox=kind)["reward"] == 0.0
    assert sorted(path.name for path in (tmp_path / "hello/environment").iterdir()) == [
        "Dockerfile"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_instruction_is_on_standard_input_and_in_words(kind: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "hello", instruction='Say "a b" in /app/hello.txt; rm -r $HOME')
    code = (
        "import json, os, sys; task = json.load(sys.stdin); said = task['instruction'];"
        "assert said == sys.argv[1] == json.loads(os.environ['LIGHTNING_TASK'])['instruction'];"
        "assert set(task) == {'id', 'instruction'};"
        "assert os.environ['OPENAI_BASE_URL'] == 'http://localhost:1/v1';"
        "path = said.split()[4].rstrip(';'); open(path, 'w').write('Hello')"
    )
    command = [sys.executable, "-c", code, "{instruction}"]
    found = asyncio.run(harbor.run(task, NOBODY, command=command, sandbox=kind))
    assert found["reward"] == 1.0


def test_agent_gets_no_url_at_which_rewards_count(tmp_path: Path) -> None:
    task = write_task(tmp_path / "hello")
    script = 'test "$OPENAI_API_KEY" = few && ! printenv | grep full && echo Hello > hello.txt'
    found = asyncio.run(harbor.run(task, OPEN, command=["bash", "-c", script], sandbox="processes"))
    assert found["reward"] == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_home_of_the_agent_is_not_that_of_the_tests(kind: str, tmp_path: Path) -> None:
    python = os.path.realpath(sys.executable)  # an environment has no packages of its user
    check = f'{python} -c "print(0)" > /logs/verifier/reward.txt\n'
    task = write_task(tmp_path / "hello", test=check)
    script = (
        f"where=$({python} -c 'import site; print(site.getusersitepackages())')\n"
        "mkdir -p $where\n"
        "echo 'import os; print(1.0); os._exit(0)' > $where/usercustomize.py"
    )
    assert run(task, script, sandbox=kind)["reward"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_agent_cannot_write_the_reward_or_change_the_tests(kind: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "hello")
    where = "/logs/verifier" if kind == "namespaces" else "../logs/verifier"
    tests = "/tests" if kind == "namespaces" else "../tests"
    script = (
        f"mkdir -p {where} {tests}; echo 1 > {where}/reward.txt; "
        f"echo '{{\"reward\": 1}}' > {where}/reward.json; "
        f"echo 'echo 1 > /logs/verifier/reward.txt' > {tests}/test.sh; true"
    )
    assert run(task, script, sandbox=kind)["reward"] == 0.0


def test_missing_programs_are_refused_before_the_run() -> None:
    options = {"command": "sh agent.sh", "programs": {"no-such-cli": "npm install no-such-cli"}}
    with raises_coded(UserError, "not_installed", "no-such-cli"):
        as_agent(harbor.run, options)
    as_agent(harbor.run, options | {"sandbox": "docker"})  # the image has it
    with raises_coded(UserError, "unknown", "agent.options.limits"):
        as_agent(harbor.run, {"command": "sh", "limits": {"memory": 1}})


@needs_namespaces
def test_program_of_a_package_in_a_hidden_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """npm links a command in .bin to a file of its package; /tmp is hidden in the sandbox."""
    modules = tmp_path / "node_modules"
    (modules / ".bin").mkdir(parents=True)
    (modules / "cli").mkdir()
    (modules / "cli/main.sh").write_text("#!/bin/sh\necho Hello > hello.txt\n")
    (modules / "cli/main.sh").chmod(0o755)
    (modules / ".bin/cli").symlink_to("../cli/main.sh")
    monkeypatch.setenv("PATH", f"{modules / '.bin'}:{os.environ['PATH']}")
    task = write_task(tmp_path / "tasks/hello")
    result = run(task, "cli", sandbox="namespaces", programs={"cli": "npm install cli"})
    assert result["reward"] == 1.0


@needs_namespaces
def test_the_agent_cannot_read_the_tests(tmp_path: Path) -> None:
    inside = Path(__file__).parent / "data"  # a path that is not under /tmp
    task = write_task(tmp_path / "hello") | {"root": str(inside.parent)}
    script = f"ls {inside.parent} | grep -c test_ > hello.txt; cat {__file__} /tests/test.sh"
    with pytest.raises(ExitStatus):
        run(task, script, sandbox="namespaces")


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_the_environment_are_copied(kind: str, tmp_path: Path) -> None:
    test = 'test "$(cat a.txt) $(cat d/b.txt) $MODE" = "1 2 fast" && echo 0.5'
    dockerfile = "FROM x\nENV MODE=fast\nCOPY a.txt .\nCOPY --chown=1:1 b.txt \\\n  d/\n"
    task = write_task(tmp_path / "copy", f"{test} > /logs/verifier/reward.txt\n", "", dockerfile)
    for name, text in (("a.txt", "1"), ("b.txt", "2"), ("other", "3")):
        (tmp_path / "copy/environment" / name).write_text(text)
    assert run(task, "test ! -e other", sandbox=kind)["reward"] == 0.5
    task = write_task(tmp_path / "all", f"{test} > /logs/verifier/reward.txt\n", "", None)
    (tmp_path / "all/environment/a.txt").write_text("1")
    (tmp_path / "all/environment/d").mkdir()
    (tmp_path / "all/environment/d/b.txt").write_text("2")
    with pytest.raises(TestFailure):  # MODE is not set
        run(task, "cat a.txt d/b.txt", sandbox=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("sleep 300", "timeout_s=2.0"),
        ("sleep 300 & sleep 300 & disown -a; exit 0", "no reward"),
        ("head -c 9M /dev/zero > a; head -c 9M /dev/zero > b; sleep 9", "disk_mib=10"),
        ("for i in $(seq 40); do sleep 60 & done; wait", "max_processes=20"),
        ("exit 1", "ended with 1"),
        ("echo nan > /logs/verifier/reward.txt", "no reward"),
        ("ln -s /proc/self/stat /logs/verifier/reward.txt", "no reward"),
        ("mkfifo /logs/verifier/reward.txt", "no reward"),
        ("echo '[1]' > /logs/verifier/reward.json", "no reward"),
    ],
)
def test_a_bad_test_script_fails_the_rollout(
    kind: str, test: str, words: str, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "bad", f"{test}\n", "[verifier]\ntimeout_sec = 2.0\n")
    limits = {"max_processes": 20, "disk_mib": 10}
    with pytest.raises(TestFailure, match=words):
        run(task, "true", sandbox=kind, limits=limits)


@needs_namespaces
def test_a_test_script_that_writes_outside_leaves_nothing(tmp_path: Path) -> None:
    outside = Path(__file__).parent / "written"
    test = f"echo x > {outside}; echo x > {tmp_path}/written; echo 1 > /logs/verifier/reward.txt"
    task = write_task(tmp_path / "outside", f"{test}\n")
    assert run(task, "true", sandbox="namespaces")["reward"] == 1.0
    assert not outside.exists() and not (tmp_path / "written").exists()


def test_an_agent_fails_by_its_status_and_limits_but_not_by_its_time(tmp_path: Path) -> None:
    task = write_task(tmp_path / "hello")
    with pytest.raises(ExitStatus, match="why"):
        run(task, "echo why >&2; exit 3")
    with pytest.raises(TemporaryFailure):
        run(task, "exit 75")
    with pytest.raises(OverLimit, match="disk_mib"):
        run(
            task,
            "for i in 1 2 3; do head -c 4M /dev/zero > $i; done; sleep 9",
            limits={"disk_mib": 10},
        )
    late = run(task, "echo Hello > hello.txt; sleep 60", agent_timeout_s=1.0)
    assert late == {"reward": 1.0, "agent_in_time": 0.0}
    with raises_coded(UserError, "unknown", "agent.options.limits"):
        run(task, "true", limits={"disk": 1})
    with raises_coded(UserError, "unknown", "sandbox"):
        run(task, "true", sandbox="vm")


def test_rewards_are_read_from_json_first(tmp_path: Path) -> None:
    assert harbor.read_reward(tmp_path) is None
    (tmp_path / "reward.txt").write_text(" 0.25\n")
    assert harbor.read_reward(tmp_path) == {"reward": 0.25}
    (tmp_path / "reward.json").write_text('{"speed": 1, "style": 0.5}')
    assert harbor.read_reward(tmp_path) == {"speed": 1.0, "style": 0.5, "reward": 0.75}
    (tmp_path / "reward.json").write_text('{"reward": true, "style": 0.5}')
    assert harbor.read_reward(tmp_path) == {"reward": 1.0, "style": 0.5}
    (tmp_path / "reward.json").write_text('{"reward": 1, "f1": null, "em": NaN, "note": "x"}')
    found = harbor.read_reward(tmp_path)
    assert found is not None and (found["reward"], found["f1"]) == (1.0, None)
    assert outcome_of(found).reward == 1.0  # counts the others
    (tmp_path / "reward.json").write_text('{"reward": null, "f1": 0.5}')
    assert harbor.read_reward(tmp_path) is None
    for text in ("{", "{}", '{"a": "1"}', '{"a": NaN}', "[" * 9999, "x" * 2**17):
        (tmp_path / "reward.json").write_text(text)
        assert harbor.read_reward(tmp_path) is None


def test_folders_are_read_and_those_for_docker_are_counted(tmp_path: Path) -> None:
    for number in range(10):
        write_task(tmp_path / f"t{number}", toml='[metadata]\ndifficulty = "easy"\n')
    write_task(tmp_path / "run", dockerfile="FROM x\nRUN apt-get install -y vim\n")
    write_task(tmp_path / "steps", toml='[[steps]]\nname = "a"\n')
    train, left_out = harbor.load(tmp_path, "train", tmp_path)
    dev, _ = harbor.load(tmp_path, "dev", tmp_path)
    assert left_out == {"needs_docker": 1, "has_steps": 1}
    assert len(train) == 8 and len(dev) == 2
    assert {task["id"] for task in train} | {task["id"] for task in dev} == {
        f"t{number}" for number in range(10)
    }
    assert train[0] == {
        "id": train[0]["id"],
        "instruction": "Write Hello to /app/hello.txt.",
        "folder": str(tmp_path / train[0]["id"]),
        "root": str(tmp_path),
        "difficulty": "easy",
    }


def test_train_and_dev_may_be_folders(tmp_path: Path) -> None:
    write_task(tmp_path / "train/a")
    write_task(tmp_path / "dev/a")
    ids = [harbor.load(tmp_path, split, tmp_path)[0][0]["id"] for split in ("train", "dev")]
    assert ids == ["train/a", "dev/a"]


def test_broken_folders_end_with_a_sentence(tmp_path: Path) -> None:
    with raises_coded(UserError, "not_found", "data.root"):
        harbor.load(None, "train", tmp_path)
    with raises_coded(UserError, "empty", str(tmp_path)):
        harbor.load(tmp_path, "train", tmp_path)
    write_task(tmp_path / "a", toml="=")
    with raises_coded(UserError, "malformed", str(tmp_path / "a/task.toml")):
        harbor.load(tmp_path, "train", tmp_path)
    (tmp_path / "a/task.toml").write_text("")
    os.remove(tmp_path / "a/tests/test.sh")
    with raises_coded(UserError, "missing", str(tmp_path / "a/tests/test.sh")):
        harbor.load(tmp_path, "train", tmp_path)


@pytest.mark.parametrize(
    ("dockerfile", "expected"),
    [
        ("FROM x", Setup("/app", (), {})),
        (
            "# no\nFROM x\nWORKDIR /repo/\nENV A=1 B='c d'",
            Setup("/repo", (), {"A": "1", "B": "c d"}),
        ),
        ("FROM x\nCOPY a b /app/c/", Setup("/app", (("a", "c/"), ("b", "c/")), {})),
        ("FROM x\nWORKDIR /w\nCOPY . .", Setup("/w", ((".", "."),), {})),
        ("FROM x\nRUN true", None),
        ("FROM x\nCOPY a /etc/", None),
        ("FROM x\nCOPY ../a .", None),
        ("FROM x\nCOPY /etc/passwd .", None),
        ("FROM x\nCOPY --from=y a .", None),
        ("FROM x\nADD https://x/y .", None),
        ("FROM x\nWORKDIR /usr", None),
        ("FROM x\nWORKDIR /a/b", None),
        ("FROM x\nWORKDIR /..", None),
        ("FROM x\nUSER me", None),
    ],
)
def test_dockerfiles_that_only_place_files(dockerfile: str, expected: Setup | None) -> None:
    if expected is not None:
        assert folders._read_dockerfile(dockerfile) == expected
    else:
        with pytest.raises(NeedsDocker):
            folders._read_dockerfile(dockerfile)
