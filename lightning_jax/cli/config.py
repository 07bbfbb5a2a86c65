"""Settings of `lightning-jax serve`."""

from dataclasses import dataclass, field

from lightning_jax.engine.config import ServeConfig
from lightning_jax.errors import require
from lightning_jax.models.config import ModelConfig


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server without a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    record: str | None = None  # SQLite file that records every call; None: do not record
    drain_s: float = 30.0  # time that running requests have to finish at shutdown
    tensor: int = 1  # GPUs or TPUs per copy of the model; the others hold more copies

    def __post_init__(self) -> None:
        require(
            self,
            tensor=(self.tensor >= 1, "at least 1"),
            record=(self.record != "", "the name of a file"),
            drain_s=(self.drain_s >= 0, "0 or more seconds"),
        )
