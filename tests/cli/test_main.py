"""Tests of the command: flags, signals, exit codes and output."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jax
import openai
import pytest
from agent_folder import write_folder
from one_device import one_device

from lightning_jax.cli.main import COMMANDS, main
from lightning_jax.models.formats.load import save_hf
from lightning_jax.testing.tiny import TINY_RUN, tiny_model
from lightning_jax.traces.convert import spans_to_transitions
from lightning_jax.traces.store import Store
from lightning_jax.train.watch.findings import TROUBLESHOOTING
from lightning_jax.train.watch.report import NOTHING_TRAINED

LONG: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "Count."}],
    "max_tokens": 480,
    "logit_bias": {"258": -100},  # forbids end-of-turn
}
SHORT: dict[str, Any] = LONG | {"max_tokens": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_hf(path, tiny_model(num_layers=1))
    return path


@contextmanager
def _serving(model_dir: Path, *flags: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Yield a process of `lightning-jax serve`, and the line it prints when ready."""
    arguments = ["serve", "--model", str(model_dir), "--max-len", "512", "--slots", "2", *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_jax", *arguments],
        env=one_device(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


async def test_it_answers_records_and_finishes_what_runs(model_dir: Path, tmp_path: Path) -> None:
    record = tmp_path / "calls.sqlite"
    flags = ("--api-key", "k", "--record", str(record), "--any-model")
    with _serving(model_dir, *flags) as (process, line):
        found = re.search(r"(http://127\.0\.0\.1:\d+/v1)\n$", line)
        assert found and line.startswith(f"{model_dir} "), line
        async with openai.AsyncOpenAI(base_url=found[1], api_key="k", max_retries=0) as client:
            assert str(model_dir) in [model.id async for model in await client.models.list()]
            unknown: dict[str, Any] = LONG | {"model": "claude-haiku-4"}
            stream = await client.chat.completions.create(**unknown, stream=True)
            pieces = [await anext(stream)]
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.InternalServerError) as refused:
                while True:  # until the signal has arrived
                    await client.chat.completions.create(**SHORT)
            assert (refused.value.status_code, refused.value.code) == (503, "draining")
            async with aiohttp.ClientSession() as http, http.get(found[1][:-3] + "/healthz") as got:
                assert (got.status, (await got.json())["status"]) == (503, "draining")
            pieces += [piece async for piece in stream]
        assert pieces[-1].choices[0].finish_reason == "length"
        assert await asyncio.to_thread(process.wait, 20) == 0
    store = Store(record)
    transitions, _ = spans_to_transitions(store.spans(None))
    store.close()
    assert len(transitions[0].response_token_ids) == 480


async def test_it_ends_in_time_and_a_random_key_is_printed(model_dir: Path) -> None:
    with _serving(model_dir, "--drain-s", "0") as (process, line):
        found = re.search(r"(http://\S+/v1)\b.* (\S{32})\n$", line)
        assert found, line
        async with openai.AsyncOpenAI(base_url=found[1], api_key=found[2], max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").models.list()
            # Two run; the others wait for a slot.
            calls = [asyncio.create_task(client.chat.completions.create(**LONG)) for _ in range(8)]
            async with aiohttp.ClientSession() as http:
                while await _num_taken(http, found[1]) < 8:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            for ended in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(ended, openai.InternalServerError)
                assert ended.code == "engine_error"
        assert await asyncio.to_thread(process.wait, 20) == 0
        lines = process.communicate()[1].splitlines()
        assert any(found[1].removesuffix("/v1") in line for line in lines), lines
        assert re.search(r"\b8\b", lines[-1]), lines  # how many were cut off


async def _num_taken(http: aiohttp.ClientSession, base_url: str) -> float:
    async with http.get(base_url.removesuffix("/v1") + "/healthz") as got:
        engine = (await got.json())["engine"]
    return engine["serve/running"] + engine["serve/queue_depth"]


def test_stopped_while_it_compiles_it_ends_without_an_error(model_dir: Path) -> None:
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-m", "lightning_jax", "serve", "--model", str(model_dir)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert "http" in process.stdout.readline()  # the first programs are being compiled
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=60)[1]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "code", "names"),
    [
        ([], 2, ("COMMAND", "lightning-jax --help")),
        (["trian"], 2, ("'trian'", "did you mean train?", "lightning-jax --help")),
        (["help", "trian"], 2, ("did you mean train?",)),
        (["zzz"], 2, ("'zzz'", "compare", "lightning-jax --help")),
        (["train", "--stduio"], 2, ("did you mean --studio?",)),
        (["serve", "--slotz", "3"], 2, ("--slotz 3", "--slots", "lightning-jax serve --help")),
        (["serve", "--port", "x"], 2, ("--port", "'x'", "lightning-jax serve --help")),
        (["serve", "--port", "70000"], 2, ("port", "70000", "65535")),
        (["serve", "--slots", "0"], 2, ("slots", "0", "1")),
        (["serve", "--tensor", "0"], 2, ("tensor", "0", "1")),
        (["serve", "--tensor", "3"], 1, ("tensor", "3", "8")),
        (["serve", "--drain-s", "nan"], 2, ("drain_s", "nan")),
        (["serve", "--record", ""], 2, ("record", "''")),
        (["serve", "--dtype", "int4"], 2, ("--dtype", "'int4'", "float32", "bfloat16", "auto")),
        (["serve", "--chat-template-kwargs", "[1]"], 2, ("--chat-template-kwargs", "[1]")),
        (["serve", "--chat-template-kwargs", '{"tools": 1}'], 2, ("'tools'",)),
        (["serve", "--chat-template", "no.jinja"], 1, ("--chat-template", "'no.jinja'")),
        (["serve", "--model", "./none"], 1, ("model", "'./none'")),
        (["serve", "--max-len", "9999"], 1, ("--max-len", "9999", "2048")),
        (["serve", "--record", "no/such/place"], 1, ("no/such/place", "no/such")),
        (["serve", "--host", "0.0.0.0"], 1, ("'0.0.0.0'", "--api-key")),
        (["serve", "--host", "0.0.0.0", "--api-key", ""], 1, ("'0.0.0.0'", "--api-key")),
        (["serve", "--host", "203.0.113.1", "--api-key", "k"], 1, ("203.0.113.1:0", "--host")),
    ],
)
def test_mistakes_give_one_sentence(
    flags: list[str],
    code: int,
    names: tuple[str, ...],
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if flags[:1] == ["serve"] and "--model" not in flags:
        flags = [*flags, "--model", str(model_dir)]
    assert main(flags) == code
    output = capsys.readouterr()
    assert _holds(output.err, *names), output.err
    assert "Traceback" not in output.err and output.out == ""
    assert not re.search(r"\b(model|serve)\.[a-z]", output.err)  # no settings of a run
    assert sum(line.startswith("error: ") for line in output.err.splitlines()) == 1


def test_what_new_makes_trains_and_goes_on(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_sigterm: None,
) -> None:
    folder = tmp_path / "mine"
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert main(["new", str(folder)]) == 0
    made, _, commands = capsys.readouterr().out.strip().rpartition("\n\n")
    assert made.splitlines() == [
        str(folder / name) for name in ("agent.py", "config.yaml", "tasks.jsonl")
    ]
    enter, first, score, then = commands.splitlines()
    assert enter == f"cd {folder}"
    assert first.startswith("lightning-jax try ") and score.startswith("lightning-jax eval ")
    assert then == "lightning-jax train"
    monkeypatch.setattr("shutil.which", lambda name: None)  # the command is not on PATH
    assert main(["new", str(tmp_path / "other")]) == 0
    assert f"{sys.executable} -m lightning_jax train\n" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    settings = TINY_RUN | {"model.name": model_dir, "eval.num_tasks": 2}
    command = ["train", *(f"{k}={v}" for k, v in settings.items())]
    for _ in range(2):  # the second finds nothing to do
        assert main(command) == 1  # a random model earns nothing
        output, logged = capsys.readouterr()
        assert re.findall(r"\d+", logged.splitlines()[0]) == ["240", "60"]
        assert _num_rollouts(output) == [6, 0, 0]  # 2, and 2 evaluations of 2
        assert "runs/first/policy" in output and Path("runs/first/policy").is_dir()
        assert NOTHING_TRAINED in logged.splitlines()[-1]
    assert main(["runs"]) == 0
    assert f"first: {NOTHING_TRAINED}" in capsys.readouterr().out
    assert main([*command, "agent.function=agent.py:walk"]) == 1
    assert _holds(capsys.readouterr().err, "'agent.py:walk'")


def test_a_mended_or_edited_agent_is_asked_again(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_sigterm: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("tasks.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(10)))
    Path("own.yaml").write_text("agent: {function: agent.py:run}\ndata: {root: tasks.jsonl}\n")
    Path("rewards_of_mine.py").write_text("REWARD = 0.25\n")
    settings = TINY_RUN | {"model.name": model_dir, "eval.num_tasks": 2, "run_dir": "run"}
    command = ["train", "num_steps=0", "--config", "own.yaml"]
    command += [f"{key}={value}" for key, value in settings.items() if key != "num_steps"]
    whole = "from rewards_of_mine import REWARD\n\ndef run(task, llm):\n    "
    for body, code, words in (
        ("return task['txt']", 1, ("2", "KeyError", "'txt'")),
        ("return REWARD", 0, ("0.250",)),
        ("return REWARD + 0.5", 0, ("0.750",)),
        ("return REWARD + 0.5", 0, ("0.750",)),
    ):
        Path("agent.py").write_text(whole + body)
        assert main(command) == code, capsys.readouterr()
        output = capsys.readouterr()
        assert _holds(output.out + output.err, *words), output
    with closing(Store(Path("run/store.sqlite"))) as store:
        assert [rollout.attempt for rollout in store.rollouts()] == [1, 2, 3] * 2


def test_a_run_succeeds_if_its_rewards_differ(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_sigterm: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path)
    path = Path("agent.py")
    path.write_text(path.read_text().replace("return {", "return random() or {"))
    path.write_text(f"from random import random\n\n{path.read_text()}")
    Path("train.jsonl").write_text('{"question": "1 + 1?", "id": "sum"}\n')
    assert main(["train", f"model.name={model_dir}", "eval.num_tasks=1"]) == 0
    output, logged = capsys.readouterr()
    assert "lightning-jax compare run" in output and NOTHING_TRAINED not in output + logged


@pytest.mark.parametrize(
    ("flags", "code", "names"),
    [
        (["new"], 2, ("DIR", "lightning-jax new --help")),
        (["new", "."], 1, (".",)),
        (["new", "file/below"], 1, ("file/below", "[Errno 20]")),
        (["train"], 1, ("config.yaml", "FILE")),
        (["train", "no.yaml"], 1, ("config", "no.yaml")),
        (["train", "--config", "no.yaml"], 1, ("config", "no.yaml")),
        (["train", "--config", "own.yaml"], 1, ("data.root",)),
        (["train", "--config", "own.yaml", "data.root=x.jsonl"], 1, ("data.root", "'x.jsonl'")),
    ],
)
def test_mistakes_before_training_give_one_sentence(
    flags: list[str],
    code: int,
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restored_sigterm: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("own.yaml").write_text("agent: {command: sh}\n")
    assert main(flags) == code
    output = capsys.readouterr()
    assert _holds(output.err, *names), output.err
    assert "Traceback" not in output.err and output.out == ""
    assert output.err.startswith("error: ") and output.err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--help"], ["serve", "--help"], ["serv"], ["view", "--chars"]])
def test_nothing_large_is_imported_for_help_and_wrong_flags(flags: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lightning_jax", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "lightning-jax" in (done.stdout if "--help" in flags else done.stderr)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "lightning_jax.cli.main" in imported
    assert not imported & {"jax", "numpy", "matplotlib", "aiohttp", "omegaconf"}


def test_a_taken_port_is_said_before_anything_compiles(
    model_dir: Path, capsys: pytest.CaptureFixture[str], compiled: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", str(model_dir), "--port", str(port)]) == 1
    assert compiled == []
    sentence = capsys.readouterr().err
    assert _holds(sentence, f"127.0.0.1:{port}") and sentence.count("--port") == 1
    jax.jit(lambda x: x + port)(1.0)
    assert "/jax/core/compile/backend_compile_duration" in compiled  # so it would have been seen


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"lightning-jax {command}" in text and "%(" not in text


def test_help_shows_commands_and_what_warnings_point_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help", "train"]) == 0
    of_train = capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert capsys.readouterr().out == of_train
    assert main(["help"]) == 0 and "troubleshoot" not in of_train
    assert main(["help", "trian"]) == 2
    assert _holds(capsys.readouterr().err, "'trian'")
    assert main(TROUBLESHOOTING.partition("lightning-jax ")[2].split()) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 100 and "](" not in page and "`" not in page
    assert _holds(page, "rollout.max_tokens", "rollout.concurrency", "dropped_too_long")


def _holds(text: str, *names: str) -> bool:
    """Return True if a text has all of these names and values as separate words."""
    return all(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) for name in names)


def _num_rollouts(printed: str) -> list[int]:
    """Return the numbers of rollouts scored, failed by the agent and by the infrastructure."""
    (line,) = (line for line in printed.splitlines() if line.startswith("rollouts: "))
    return [int(number) for number in re.findall(r"\d+", line)[:3]]
