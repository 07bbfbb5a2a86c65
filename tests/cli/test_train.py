"""Tests of the code shared by the experiment scripts."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_jax.cli.runtime import STOPPED
from lightning_jax.cli.train import load_splits, run_main
from lightning_jax.errors import UserError
from lightning_jax.settings import ConfigError, load_config
from lightning_jax.train.config import Config

CONFIGS = Path(__file__).parents[2] / "experiments" / "configs"


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(f"run_dir: {tmp_path}/run\nnum_steps: 3\n")
    return str(path)


def test_settings_come_from_the_file_and_then_the_command_line(config_file: str) -> None:
    seen: list[Config] = []
    run_main(
        seen.append,
        "Doc.",
        ["--config", config_file, "num_steps=5", "eval.by=source", "data.sources=[a,b]"],
    )
    assert seen[0].data.sources == ("a", "b")
    assert seen[0].num_steps == 5
    assert seen[0].eval.by == "source"


@pytest.mark.parametrize(
    "raised, message",
    [
        (UserError("x is 1; expected 2."), "error: x is 1; expected 2."),
        (OSError(errno.ENOSPC, "disk full"), "error: [Errno 28] disk full"),
        (KeyboardInterrupt(), STOPPED),
    ],
)
def test_a_mistake_ends_in_one_sentence(
    config_file: str, raised: BaseException, message: str
) -> None:
    def main(config: Config) -> None:
        raise raised

    with pytest.raises(SystemExit) as ended:
        run_main(main, None, ["--config", config_file])
    assert str(ended.value.code).startswith(message)


def test_our_own_faults_keep_their_traceback(config_file: str) -> None:
    def main(config: Config) -> None:
        raise OSError(errno.ECONNRESET, "reset")

    with pytest.raises(OSError) as caught:
        run_main(main, None, ["--config", config_file])
    assert caught.value.errno == errno.ECONNRESET


def test_an_unknown_setting_is_named(config_file: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(lambda config: None, None, ["--config", config_file, "evil.by=source"])
    assert "evil" in str(ended.value.code)


def test_both_splits_are_loaded_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(root: Any, split: str, config: Any, cache: Path) -> Any:
        assert (root, cache) == ("there", tmp_path / "data")
        left_out = {"too_long": 2, "broken": 1} if split == "train" else {}
        return [{"id": f"{split}{i}"} for i in range(2 + (split == "dev"))], left_out

    config = Config(run_dir=str(tmp_path / "run"))
    config = Config(run_dir=config.run_dir, data=type(config.data)(root="there"))
    train, dev = load_splits(config, load)
    assert [task["id"] for task in train] == ["train0", "train1"]
    assert len(dev) == 3
    printed = capsys.readouterr().out
    assert re.findall(r"\d+|too_long|broken", printed) == ["2", "2", "too_long", "1", "broken", "3"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_load_and_name_their_run(path: Path) -> None:
    argv = [str(path)]
    if path.stem.endswith("_real"):
        with pytest.raises(ConfigError) as caught:
            load_config(Config, argv)
        assert "data.root=VALUE" in str(caught.value)
        argv = [*argv, "data.root=DIR"]
    config = load_config(Config, argv)
    assert config.run_dir == f"runs/{path.stem}"
    assert config.agent.function.startswith("agents/")


def test_the_scripts_are_short() -> None:
    for path in CONFIGS.parent.glob("*.py"):
        assert len(path.read_text().splitlines()) < 120, path
