"""Tests of what a run's directory tells."""

from pathlib import Path

from lightning_jax.train.directory import newest_checkpoint


def test_newest_checkpoint_counts_whole_ones_only(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") == -1
    for name in ("4", "12", "20.draft"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == 12
