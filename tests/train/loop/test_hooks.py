"""Tests of hooks that are classes of the reader's: when they are called, and when they fail."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from coded import raises_coded
from docs_pages import fenced
from log_events import records
from toy_runs import TASKS, ahead_config

from lightning_jax.settings import ConfigError, load_config
from lightning_jax.settings.loading import load_function
from lightning_jax.testing.records import sequence
from lightning_jax.train.config import CheckpointConfig, Config, EvalConfig
from lightning_jax.train.directory import newest_checkpoint
from lightning_jax.train.hook import Hook, UpdateInput
from lightning_jax.train.loop import trainer
from lightning_jax.train.loop.check import check_files
from lightning_jax.train.loop.hooks import HookError, UserHook
from lightning_jax.train.watch.metrics import read_metrics

HOOKS = """
import json
from pathlib import Path

from lightning_jax.errors import UserError
from lightning_jax.train.hook import Hook


class Diary(Hook):
    def __init__(self, config):
        self.seed, self.path = config.seed, Path(__file__).with_name("diary.jsonl")

    def note(self, *words):
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\\n")

    async def before_rollouts(self, step):
        self.note("before_rollouts", step)
        return {"my/seed": self.seed}

    def begin_phase(self, phase, num_rollouts=0):
        self.note("begin_phase", phase, num_rollouts)

    def rollout_ended(self, phase):
        self.note("rollout_ended", phase)

    def after_rollouts(self, step, rollouts, metrics):
        self.note("after_rollouts", step, len(rollouts), metrics["rollout/num_rollouts"])

    def before_update(self, step, update):
        self.note("before_update", step, len(update.trajectories), len(update.tasks))
        return update.sequences[:1], {"my/left": 1}

    def after_update(self, step, metrics):
        self.note("after_update", step)

    def after_step(self, step, row):
        self.note("after_step", step, row["my/seed"])

    def close(self, status):
        self.note("close", status)


class Breaks(Hook):
    def __init__(self, config):
        self.method = Path(__file__).with_name("breaks.txt").read_text()

    def fail(self, method, step):
        if self.method == f"{method} {step}":
            raise ValueError("two\\nlines")

    def rollout_ended(self, phase):
        self.fail("rollout_ended", phase)

    def before_update(self, step, update):
        self.fail("before_update", step)
        return update.sequences, None

    def after_update(self, step, metrics):
        self.fail("after_update", step)

    def after_step(self, step, row):
        self.fail("after_step", step)

    def close(self, status):
        Path(__file__).with_name("closed.txt").write_text(status)


class Wrong(Hook):
    async def before_rollouts(self, step):
        return [{"my/a": 1}, {"a": 1}, {"my/a": "one"}][step]

    def before_update(self, step, update):
        return [["text"], {}] if step else None

    def after_step(self, step, row):
        raise UserError("enough", reason="done", key="my")

    def close(self, status):
        raise ValueError("closed")


class NoHook:
    def __init__(self, config):
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hooks_of_mine.py"
    path.write_text(HOOKS)
    return path


def _config(file: Path, name: str) -> Config:
    config = ahead_config(file.parent / "run")
    return dataclasses.replace(
        config,
        num_steps=2,
        hooks=[f"{file}:{name}"],
        eval=EvalConfig(every=0, num_tasks=2, at_start=False),
        checkpoint=CheckpointConfig(every=100),
    )


def test_the_class_of_the_page_leaves_out_long_replies(tmp_path: Path) -> None:
    (tmp_path / "my_hook.py").write_text(fenced("docs/howto/add_a_hook.md", "python")[0])
    hook = load_function(f"{tmp_path}/my_hook.py:LongReplies")(Config())
    assert isinstance(hook, Hook)
    long, short = sequence([1], list(range(17))), sequence([1], list(range(16)))
    assert hook.before_update(0, UpdateInput([long, short])) == ([short], {"my/long_replies": 1})


def test_a_hook_takes_part_in_each_moment_of_a_step(file: Path) -> None:
    config = _config(file, "Diary")
    check_files(config)
    rows = asyncio.run(trainer.train(config, TASKS, TASKS))
    notes = [json.loads(line) for line in (file.parent / "diary.jsonl").read_text().splitlines()]
    assert [note for note in notes if note[0] not in ("begin_phase", "rollout_ended")] == [
        *(
            note
            for step in range(2)
            for note in (
                ["before_rollouts", step],
                ["after_rollouts", step, 6, 6.0],
                ["before_update", step, 6, 2],
                ["after_update", step],
                ["after_step", step, 0],
            )
        ),
        ["before_rollouts", 2],
        ["after_step", 2, 0],
        ["close", "finished"],
    ]
    phases = [note[1:] for note in notes if note[0] == "begin_phase"]
    of_steps = [[f"train {step}", 6] if is_train else [f"update {step}", 0]
                for step in range(2) for is_train in (True, False)]  # fmt: skip
    assert phases == [*of_steps, ["eval 2", 2], ["checkpoint", 0]]
    assert notes.count(["rollout_ended", "train 1"]) == 6
    assert [row["my/seed"] for row in rows] == [0.0] * 3
    assert rows[0]["my/left"] == rows[0]["train/num_sequences"] == 1.0


@pytest.mark.parametrize(
    ("moment", "num_rows", "saved"),
    [
        ("rollout_ended train 1", 1, 1),
        ("before_update 1", 1, 1),
        ("after_update 1", 1, -1),  # in the middle of a step
        ("after_step 0", 1, 1),
    ],
)
def test_a_hook_that_raises_ends_the_run_in_one_sentence_and_it_goes_on(
    file: Path, moment: str, num_rows: int, saved: int
) -> None:
    config = _config(file, "Breaks")
    (file.parent / "breaks.txt").write_text(moment)
    with raises_coded(HookError, "failed", "hooks") as caught:
        asyncio.run(trainer.train(config, TASKS, TASKS))
    assert moment.split()[0] in str(caught.value) and "\n" not in str(caught.value)
    run = Path(config.run_dir)
    assert len(read_metrics(run / "metrics.jsonl")) == num_rows
    assert newest_checkpoint(run) == saved
    (file.parent / "breaks.txt").write_text("")
    rows = asyncio.run(trainer.train(config, TASKS, TASKS))
    assert [row["step"] for row in rows] == [0, 1, 2]


async def test_what_a_hook_returns_wrongly_is_refused(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = UserHook(f"{file}:Wrong", Config())
    assert await hook.before_rollouts(0) == {"my/a": 1.0}
    for step in (1, 2):
        with raises_coded(HookError, "failed", "hooks"):
            await hook.before_rollouts(step)
        with raises_coded(HookError, "failed", "hooks"):
            hook.before_update(step - 1, UpdateInput([sequence([1], [2])]))
    with raises_coded(HookError, "done", "my"):
        hook.after_step(0, {})
    hook.close("finished")
    (record,) = records(caplog, "hook_failed")
    assert record.hook == f"{file}:Wrong"


def test_a_hook_is_closed_after_an_error_that_came_last(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (file.parent / "breaks.txt").write_text("rollout_ended eval 2")
    hook = UserHook(f"{file}:Breaks", Config())
    hook.rollout_ended("eval 2")
    hook.close("finished")
    assert (file.parent / "closed.txt").read_text() == "finished"
    assert len(records(caplog, "hook_failed")) == 1


def test_a_class_that_is_no_hook_is_refused(file: Path) -> None:
    with raises_coded(ConfigError, "wrong_type", "hooks"):
        asyncio.run(trainer.train(_config(file, "NoHook"), TASKS, TASKS))
    with raises_coded(ConfigError, "no_such_function", "Absent"):
        check_files(_config(file, "Absent"))


def test_hooks_in_a_file_are_relative_to_it(file: Path) -> None:
    text = "hooks: [hooks_of_mine.py:Diary]\nmetrics: {sinks: [wandb, hooks_of_mine.py:Sink]}\n"
    (file.parent / "config.yaml").write_text(text)
    config = load_config(Config, [str(file.parent / "config.yaml")])
    assert [Path(name).resolve() for name in config.hooks] == [Path(f"{file}:Diary").resolve()]
    assert config.metrics.sinks[0] == "wandb"
    assert Path(config.metrics.sinks[1]).resolve() == Path(f"{file}:Sink").resolve()
