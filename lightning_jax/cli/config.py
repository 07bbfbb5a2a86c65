"""Settings of `lightning-jax serve`."""

from dataclasses import dataclass, field

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import ModelConfig
from lightning_jax.schema import Count, NonNegative, Section, require


@dataclass(frozen=True)
class ServerConfig(Section):
    """Settings of a server without a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    record: str | None = None  # SQLite file that records every call; None: do not record
    drain_s: NonNegative = 30.0  # time that running requests have to finish at shutdown
    tensor: Count = 1  # GPUs or TPUs per copy of the model; the others hold more copies

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, record=(self.record != "", "the name of a file"))
