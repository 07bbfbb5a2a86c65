"""What the settings only name is compared from start to start."""

from pathlib import Path

from lightning_jax.config import AgentConfig, Config, WarmupConfig
from lightning_jax.sources import changed_sources, digests, save_sources


def test_an_edited_file_and_other_tasks_are_named(tmp_path: Path) -> None:
    agent, script = tmp_path / "agent.py", tmp_path / "agent.sh"
    agent.write_text("one")
    script.write_text("one")
    own = Config(
        agent=AgentConfig(f"{agent}:run"), warmup=WarmupConfig(demonstrations=f"{agent}:show")
    )
    program = Config(agent=AgentConfig(command=f"sh {script} --fast", reward=f"{agent}:judge"))
    tasks = [{"id": "a", "text": "x", "url": "http://127.0.0.1:1/", "db": "/one/db"}]
    moved = [task | {"url": "http://127.0.0.1:2/", "db": "/another/db"} for task in tasks]
    other = [task | {"text": "y"} for task in tasks]
    assert changed_sources(tmp_path, digests(own, tasks, [])) == []
    save_sources(tmp_path, digests(own, tasks, []) | digests(program, tasks, []))
    assert changed_sources(tmp_path, digests(own, moved, [])) == []
    assert changed_sources(tmp_path, digests(own, other, tasks)) == ["dev tasks", "train tasks"]
    agent.write_text("two")
    script.write_text("two")
    assert changed_sources(tmp_path, digests(own, tasks, [])) == [
        "agent.function (its file)",
        "warmup.demonstrations (its file)",
    ]
    assert changed_sources(tmp_path, digests(program, tasks, [])) == [
        f"agent.command's {script} (its file)",
        "agent.reward (its file)",
    ]
