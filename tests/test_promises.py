"""The few texts that are promises to users are as tests/promises.yaml has them."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from log_events import records

from lightning_jax.cli.main import main
from lightning_jax.cli.runtime import STOPPED
from lightning_jax.models.formats.load import load_model, save_hf
from lightning_jax.models.model_files import ModelError
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.settings.loading import load_function
from lightning_jax.testing.tiny import tiny_model
from lightning_jax.traces.store import Store
from lightning_jax.train.config import Config, DataConfig
from lightning_jax.train.memory.plan import GIB, MemoryItem, Plan, one_line
from lightning_jax.train.tasks.data import load_tasks
from lightning_jax.train.watch.report import failure_table

TOY = Path(__file__).with_name("toy_agent.py")
PROMISES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("promises.yaml").read_text())


def _setting(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Config, list(argv))
    return str(caught.value)


def _reference(reference: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_function(reference)
    return str(caught.value)


def _model(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(name)
    return str(caught.value)


def _counts(folder: Path) -> str:
    with closing(Store(folder / "store.sqlite")) as store:
        return failure_table(store)


def _asks(folder: Path) -> str:
    (folder / "asks.yaml").write_text("data:\n  root: ???\n")
    return _setting(str(folder / "asks.yaml"))


# What the code says in place of each text, in an empty folder.
TEXTS: dict[str, Callable[[Path], str]] = {
    "setting_unknown": lambda _: _setting("nmu_steps=3"),
    "setting_missing": _asks,
    "setting_out_of_range": lambda _: _setting("serve.slots=0"),
    "agent_file_missing": lambda _: _reference("nowhere.py:run"),
    "agent_function_missing": lambda _: _reference(f"{TOY}:walk"),
    "model_missing": lambda _: _model("no-such-model"),
    "stopped_run": lambda _: STOPPED,
    "rollout_counts": _counts,
    "planned_memory": lambda _: one_line(
        Plan((MemoryItem("weights in float32", GIB, ""),), "an update", "1 x cpu, data=1", 2 * GIB)
    ),
}
# What a command prints last, and its exit code.
PRINTED: dict[str, tuple[list[str], int]] = {
    "config_missing": (["train"], 1),
    "agent_missing": (["train", "num_steps=1"], 1),
    "config_file_missing": (["train", "--config", "no.yaml"], 1),
    "tasks_missing": (["train", "--config", "own.yaml"], 1),
    "open_port_without_key": (["serve", "--host", "0.0.0.0", "--model", "model"], 1),
    "new_then_train": (["new", "mine"], 0),
}
IN_OTHER_TESTS = {"task_counts"}


def _assert_promised(name: str, text: str) -> None:
    pattern = re.sub(r"\\{\w+\\}", ".+", re.escape(PROMISES[name]))
    assert re.fullmatch(pattern, text), f"{text!r} is not {name}: {PROMISES[name]!r}"


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_as_promised(name: str, tmp_path: Path) -> None:
    _assert_promised(name, TEXTS[name](tmp_path))


@pytest.mark.parametrize("name", PRINTED)
def test_command_prints_what_is_promised(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_jax.cli.commands.train.stop_on_sigterm", lambda: None)
    Path("own.yaml").write_text("agent: {command: sh}\n")
    save_hf(tmp_path / "model", tiny_model(num_layers=1))
    command, code = PRINTED[name]
    assert main(command) == code
    printed = capsys.readouterr()
    _assert_promised(name, (printed.err or printed.out).splitlines()[-1])


def test_task_counts_are_logged_as_promised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for split, questions in (("train", "ab"), ("dev", "c")):
        lines = [f'{{"question": "{question}"}}\n' for question in questions]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    caplog.set_level("INFO", "lightning_jax")
    load_tasks(Config(data=DataConfig(root=str(tmp_path))))
    (record,) = records(caplog, "tasks_loaded")
    _assert_promised("task_counts", record.getMessage())


def test_every_promise_is_tested() -> None:
    assert {*TEXTS, *PRINTED, *IN_OTHER_TESTS} == set(PROMISES)
