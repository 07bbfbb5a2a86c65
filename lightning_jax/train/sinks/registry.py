"""Metric sinks by name, and the packages that they need.

To add one, write a class like those beside this file, and add its name here and to `SinkName`.
"""

from collections.abc import Callable, Sequence

from lightning_jax.settings import ConfigError
from lightning_jax.system.packages import is_installed
from lightning_jax.train.sinks.base import RunIdentity, Sink
from lightning_jax.train.sinks.mlflow_sink import MlflowSink
from lightning_jax.train.sinks.tensorboard_sink import TensorBoardSink
from lightning_jax.train.sinks.trackio_sink import TrackioSink
from lightning_jax.train.sinks.wandb_sink import WandbSink

# Each needs the package of its name. `metrics.jsonl` is not one of them: a run always has it.
SINKS: dict[str, Callable[[RunIdentity], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


def check_sinks(names: Sequence[str]) -> None:
    """Raise ConfigError for the first sink whose package is not installed. Imports none."""
    for name in names:
        if name in SINKS and not is_installed(name):
            raise ConfigError(
                f"metrics.sinks names {name}, which is not installed; run `pip install {name}`, or "
                f"remove {name} from metrics.sinks.",
                reason="not_installed",
                key="metrics.sinks",
            )
