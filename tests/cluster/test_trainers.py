"""Tests of the trainer's processes in a cluster: which end explains the others, and restarts."""

import signal

import pytest
from coded import raises_coded

from lightning_jax.cluster.ray_session import ClusterError
from lightning_jax.cluster.trainers import ProcessExit, Trainers, find_cause
from lightning_jax.train.config import ClusterConfig

KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT


@pytest.mark.parametrize(
    "statuses, index",
    [
        ({0: ABORTED, 1: KILLED, 2: ABORTED}, 1),
        ({0: KILLED, 1: 1, 2: ABORTED}, 0),
        ({0: 1, 1: None}, 1),  # its machine is lost
        ({0: 1, 1: ABORTED}, 0),  # an error of the run
        ({0: ABORTED, 1: 1}, 1),
        ({0: ABORTED, 1: ABORTED}, 0),
        ({1: 1, 0: 1}, 1),  # in the order of their ends
        ({1: 0, 0: 1}, 0),  # such as a run that trained nothing
        ({1: 0, 0: 0}, 0),
    ],
)
def test_a_loss_explains_the_errors_and_aborts_of_others(
    statuses: dict[int, int | None], index: int
) -> None:
    assert find_cause([ProcessExit(i, status) for i, status in statuses.items()]).index == index


class Lives(Trainers):
    """Trainers whose processes end as listed, with a checkpoint then."""

    def __init__(self, ends: list[tuple[ProcessExit, int]]) -> None:
        config = ClusterConfig("local", trainers=2)
        super().__init__(None, config, "run", lambda *_: [], lambda: self.checkpoint)
        self.checkpoint, self.ends = -1, ends

    async def _train_once(self) -> ProcessExit:
        end, self.checkpoint = self.ends.pop(0)
        return end


async def test_restarts_go_on_while_there_are_new_checkpoints() -> None:
    lost = ProcessExit(1, None, "its machine is gone")
    lives = Lives([(lost, 0), (lost, 0), (lost, 5), (lost, 6), (lost, 6), (ProcessExit(0, 0), 9)])
    assert await lives.run() == 0 and not lives.ends


async def test_deaths_without_a_checkpoint_end_the_run() -> None:
    lives = Lives([(ProcessExit(1, KILLED, "SIGKILL"), 4)] * 4)
    with raises_coded(ClusterError, "trainer_lost", "cluster.trainers"):
        await lives.run()
    assert len(lives.ends) == 1  # the first reached a checkpoint, three in a row did not


@pytest.mark.parametrize("status", [0, 1, 130])
async def test_status_of_process_0_is_the_runs(status: int) -> None:
    assert await Lives([(ProcessExit(0, status), 0)]).run() == status


async def test_error_of_another_process_ends_the_run() -> None:
    with raises_coded(ClusterError, "trainer_failed", "cluster.trainers"):
        await Lives([(ProcessExit(1, 1, "error: no such file"), 0)]).run()
