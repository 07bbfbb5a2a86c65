"""Settings of `lightning-jax serve`."""

from collections.abc import Iterator
from dataclasses import field

from lightning_jax.engine.config import ServeConfig
from lightning_jax.models.config import ModelConfig
from lightning_jax.settings.schema import Count, NonNegative, Rule, Section, section


@section
class ServerConfig(Section):
    """Settings of a server without a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    record: str | None = None
    """SQLite file that records every call; None: do not record."""
    drain_s: NonNegative = 30.0
    """Time that running requests have to finish at shutdown."""
    tensor: Count = 1
    """GPUs or TPUs per copy of the model; the others hold more copies."""

    def rules(self) -> Iterator[Rule]:
        yield "record", self.record != "", "expected the name of a file"
