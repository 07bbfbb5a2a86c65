"""Tests of the reference of settings: complete, current, and YAML that loads as the defaults."""

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_jax.cli.main import main
from lightning_jax.cli.reference import all_sections, find_settings, settings_page
from lightning_jax.train.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_blocks_hold_every_default() -> None:
    blocks = [
        OmegaConf.create(text) for text in re.findall(r"```yaml\n(.+?)```", PAGE.read_text(), re.S)
    ]
    assert len(blocks) > 15
    settings = OmegaConf.merge(*(block for block in blocks if "NAME" not in str(block)))
    found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), settings))
    assert found == Config()
    missing = set(_keys(OmegaConf.structured(Config))) - set(_keys(OmegaConf.merge(*blocks)))
    assert missing == set()
    assert {"roles.NAME.served_by", "reward_rules.NAME.fact"} <= set(
        _keys(OmegaConf.merge(*blocks))
    )


def test_comments_and_ranges_are_those_of_the_source() -> None:
    page = settings_page().splitlines()
    assert "  slots: 16  # [at least 1]" in page
    assert "  # devices. With several processes, all devices of process 0 are one engine." in page
    (warm_up,) = (line for line in page if line.startswith("    learning_rate: 0.0001  # "))
    assert warm_up.endswith("[above 0]")
    assert any(line.startswith("  timeout_s: 120.0") and "[seconds, " in line for line in page)


def test_every_setting_has_a_meaning() -> None:
    settings = [setting for section in all_sections() for setting in section.settings]
    assert len(settings) > 150
    assert [".".join(setting.key) for setting in settings if not setting.meaning] == []


def test_settings_are_found_by_key_and_by_meaning() -> None:
    found = [".".join(setting.key) for setting in find_settings(["learning", "rate"])]
    assert found[-1].endswith("optimizer.weight_decay")  # by its meaning, after those by key
    assert {"optimizer.learning_rate", "warmup.optimizer.learning_rate"} < {*found[:-1]}
    assert find_settings(["batch.row_len"])[0].key[-1] == "row_len"
    for word, key in (("wandb", "sinks"), ("resume", "run_dir"), ("lr", "learning_rate")):
        assert find_settings([word])[0].key[-1] == key
    assert not find_settings(["zebra"])


def test_page_is_current_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(), (
        "run lightning-jax config > docs/settings.md"
    )


def _keys(node: Any, prefix: str = "") -> list[str]:
    if not OmegaConf.is_dict(node):
        return [prefix.rstrip(".")]
    return [key for name in node for key in _keys(node._get_node(name), f"{prefix}{name}.")]
