"""Test that an update uses the programs that were compiled in advance."""

import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from toy_runs import toy_config

from lightning_jax.rl.batches import microbatches
from lightning_jax.rl.config import BatchConfig
from lightning_jax.testing.records import sequence
from lightning_jax.train.hook import UpdateInput
from lightning_jax.train.loop import hooks
from lightning_jax.train.loop.hooks import CompileAhead
from lightning_jax.train.loop.startup import load_trainable
from lightning_jax.train.state.replica import Replica


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.WARNING)
    jax.config.update("jax_log_compiles", True)  # in all threads, unlike jax.log_compiles()
    yield
    jax.config.update("jax_log_compiles", False)


def test_the_first_update_compiles_nothing_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = BatchConfig(rows=1, row_len=64, max_targets=32, head_chunk=32)
    config = toy_config(Path("tiny"), tmp_path / "run", batch=batch)
    replica = Replica(config, load_trainable(config))
    CompileAhead(replica, 0).rollout_ended(None)  # no update is left
    ahead = CompileAhead(replica, 1)
    ahead.before_update(0, UpdateInput([]))
    assert not _num_compiled(caplog)
    for _ in range(2):
        ahead.rollout_ended(None)
    ahead.before_update(0, UpdateInput([]))
    assert _num_compiled(caplog) == 2
    assert replica.update([sequence([1, 2], [3, 4])])["train/num_updates"] == 1
    assert _num_compiled(caplog) == 2
    replica.close()


def test_smaller_sizes_of_an_accelerator_are_compiled_while_rollouts_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hooks, microbatches):
        monkeypatch.setattr(module, "pair_sizes", lambda *_: (8, 16, 32))
    batch = BatchConfig(rows=1, row_len=64, max_targets=32, head_chunk=8)
    config = toy_config(Path("tiny"), tmp_path / "run", batch=batch)
    replica = Replica(config, load_trainable(config))
    ahead = CompileAhead(replica, 1)
    ahead.rollout_ended(None)
    ahead._thread.join()
    assert _num_compiled(caplog) == 4  # a gradient of each size, and the optimizer's step
    for number in (1, 8, 9, 17):
        response = list(range(1, number + 1))
        assert replica.update([sequence([1, 2], response)])["train/num_updates"] == 1
    assert _num_compiled(caplog) == 4
    replica.close()


def _num_compiled(caplog: pytest.LogCaptureFixture) -> int:
    """Return how often the two programs of an update were compiled."""
    ends = [r.getMessage() for r in caplog.records if "Finished XLA compilation" in r.getMessage()]
    return sum("jit(add_grads)" in end or "jit(apply)" in end for end in ends)
