"""Test of an environment of the reader's, the one on its page."""

from pathlib import Path

import pytest
from docs_pages import fenced
from scripted_server import serving

from lightning_jax.settings.loading import load_function
from lightning_jax.train.config import Config, DataConfig
from lightning_jax.train.tasks.data import load_tasks

ENVIRONMENT, TEST = fenced("docs/howto/add_an_environment.md", "python")


async def test_the_environment_of_the_page_makes_tasks_and_plays_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "guess.py"
    file.write_text(ENVIRONMENT)
    data = DataConfig(load=f"{file}:load", options={"size": 20})
    train, dev = load_tasks(Config(run_dir=str(tmp_path / "run"), data=data))
    assert len(train) == 20 and {task["highest"] for task in dev} == {8}
    run = load_function(f"{file}:run")
    async with serving(["9", "none", "I say 0", f"{train[0]['number']}"]) as llm:
        assert await run(train[0], llm) == {"reward": 1.0, "turns": 4}
        words = [message["content"] for message in llm.bodies[-1]["messages"]]
        assert words[2::2] == ["Lower.", "Write a number.", "Higher."]
    async with serving(["9", "9"]) as llm:
        assert await run(train[0], llm, max_turns=2) == {"reward": 0.0, "turns": 2}
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(TEST, "test of the page", "exec"), {})
